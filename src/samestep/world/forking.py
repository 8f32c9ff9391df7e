"""Delays `os.fork` until no background thread of this process holds a lock.

The child of `os.fork` has one thread. A lock that another thread of the parent held at the moment of the fork, in C++
or in Python, stays locked in the child forever, and a child that needs it never returns (docs/dev/forking.md).
So background threads work inside `at_work()`, and every `os.fork` of this process, by a DataLoader or by the script,
waits until no thread is inside.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from samestep.files import read_text
from samestep.processes import wait_until

# Limit of both waits: the watchdog must run although a fork hangs, and the script must continue although the store that
# a thread queries does not answer.
LIMIT_S = 10.0


def _is_gloo_running() -> bool:
    """Return whether a thread of gloo that calls Python is running.

    It drops the tensors of a completed exchange. For that it creates a thread state of Python, under a lock that is not
    the GIL. Before Python 3.12, a child that is forked meanwhile stops in `os.fork`
    (https://github.com/python/cpython/issues/112275). A thread that sleeps, also for the GIL, does not hold the lock.
    """
    for path in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            name, _, rest = read_text(path).partition("(")[2].rpartition(")")
            if name.startswith("pt_gloo") and rest.split()[0] != "S":
                return True
    return False


class _Gate:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._at_work: set[int] = set()  # thread idents
        self._num_forks = 0

    def enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._num_forks, LIMIT_S)
            self._at_work.add(threading.get_ident())

    def leave(self) -> bool:
        """Return whether this thread was inside."""
        with self._changed:
            was_at_work = threading.get_ident() in self._at_work
            self._at_work.discard(threading.get_ident())
            self._changed.notify_all()
        return was_at_work

    def begin_fork(self) -> None:
        with self._changed:
            self._num_forks += 1
            self._changed.wait_for(lambda: self._at_work <= {threading.get_ident()}, LIMIT_S)
        if sys.version_info < (3, 12):
            wait_until(lambda: not _is_gloo_running(), LIMIT_S, every_s=0.001)

    def end_fork(self) -> None:
        with self._changed:
            self._num_forks -= 1
            self._changed.notify_all()


_gate = _Gate()  # of the process, as its forks are
os.register_at_fork(  # noqa: TID251 also before a fork
    before=_gate.begin_fork,
    after_in_parent=_gate.end_fork,
    after_in_child=lambda: _gate.__init__(),  # type: ignore[misc]
)


@contextmanager
def at_work() -> Iterator[None]:
    """Mark the work of a background thread: no fork happens inside this block."""
    _gate.enter()
    try:
        yield
    finally:
        _gate.leave()


@contextmanager
def at_rest() -> Iterator[None]:
    """Allow forks during a wait or a slow system call inside `at_work`. The block must hold no lock.

    Does nothing in a thread that is not inside `at_work`.
    """
    was_at_work = _gate.leave()
    try:
        yield
    finally:
        if was_at_work:
            _gate.enter()
