"""Waiting for what has no event to wait for."""

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = 120.0, every_s: float = 0.005) -> None:
    """Wait for what other processes or threads bring about; fail, naming `what`, if it takes too long.

    `every_s`: between two looks; longer for a condition that starts processes.
    """
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(every_s)


def catches(pid: int, signum: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    [caught] = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) & 1 << (signum - 1))
