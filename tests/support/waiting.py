"""Waiting for what has no event to wait for."""

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = 120.0) -> None:
    """Waits for what other processes or threads bring about; fails, saying `what`, where it takes too long."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.005)


def catches(pid: int, signum: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    [caught] = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) & 1 << (signum - 1))
