"""Waits for what another process or machine does, where nothing can be selected on."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], within_s: float, every_s: float = 0.02) -> T:
    """Call `condition` until it returns something true or the time is over. Returns its last result.

    Args:
        every_s: time between two calls.

    Example::

        >>> from itertools import count
        >>> numbers = count()
        >>> wait_until(lambda: next(numbers) >= 3, within_s=60, every_s=0.001)
        True
    """
    deadline_s = time.monotonic() + within_s
    while not (result := condition()) and time.monotonic() < deadline_s:
        time.sleep(every_s)
    return result
