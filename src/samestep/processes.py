"""How processes end: with their parent, or within a time."""

import os
import signal
from contextlib import suppress

from samestep.waiting import wait_until

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_or_kill(pid: int, limit_s: float) -> None:
    """Wait for the end of a child process. Kill it after `limit_s`."""
    with suppress(ChildProcessError):  # already waited for
        if not wait_until(lambda: os.waitpid(pid, os.WNOHANG) != (0, 0), limit_s, every_s=0.001):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
