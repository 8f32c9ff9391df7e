"""How processes end: with their parent, or within a time."""

import os
import signal
import time
from contextlib import suppress

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_or_kill(pid: int, limit_s: float) -> None:
    """Wait for the end of a child process. Kill it after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    with suppress(ChildProcessError):  # already waited for
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline_s:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
