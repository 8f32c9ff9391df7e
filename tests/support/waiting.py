"""Waits for conditions for which there is no event."""

from collections.abc import Callable

from samestep import processes

DEADLINE_S = 120.0  # of what takes seconds on an idle machine


def wait_until(condition: Callable[[], object], what: str, every_s: float = 0.005) -> None:
    """Wait for a condition that other processes or threads fulfil. Fail with `what` if it takes too long. `every_s`:
    time between two checks; longer for a condition that starts processes.
    """
    assert processes.wait_until(condition, DEADLINE_S, every_s), f"not within {DEADLINE_S:.0f} s: {what}"
