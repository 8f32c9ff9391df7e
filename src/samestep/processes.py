"""Programs and processes: how they start, what they wait for, how they fork, and how they end, this process too.

What outlives a call and concerns the whole process is `Held`. When a run ends, its `Services` close what it holds. At
the end of the process, `close` ends what is still open: what was opened last first. In a forked child, `forget`
releases what belongs to the parent.

| held | `close` | `forget` |
|---|---|---|
| `Services` of a run | completes snapshots and files, restores signals, notes the run's error | restores signals |
| `Group` of a run, `LossWatch` | ends threads, closes connections | closes the child's copies of connections |
| `Watchdog` of a run | ends the heartbeat's threads | |
| `Workers` of a loop or an evaluation | kills them | leaves them to the parent |
| `Lock` of a run directory | (`Services` release it) | closes the child's copy |
| `Shared` by all runs | ends the process with the first error, closes the process group | drops the errors |
| `ForkServer` of a launch | ends it and its ranks | closes the child's copy of its connection |

The hooks for this are the package's only ones, except for those that delay a fork.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TypeVar
from weakref import WeakValueDictionary

from samestep.files import open_regular, read_text

T = TypeVar("T")

Program = subprocess.Popen[bytes]  # noqa: TID251
# Limit of the wait of a fork for threads, and of theirs for it: the watchdog must run although a fork hangs, and the
# script must continue although the store that a thread queries does not answer.
FORK_LIMIT_S = 10.0
LEAVE_S = 30  # limit for the atexit functions of a process that has failed


@contextmanager
def running(
    command: Sequence[str], variables: Mapping[str, str], output: Path, directory: Path | None = None
) -> Iterator[Program]:
    """Start a program in a session of its own: Ctrl-C in the terminal does not reach it. The end of the block kills it
    and its process group.

    Args:
        command: the program and its arguments. Its stdin is empty.
        variables: its environment.
        output: file for its stdout and stderr.
        directory: its working directory; None: that of this process.

    Raises:
        OSError: the program cannot be started.
    """
    with open(output, "w", opener=open_regular) as file:
        process = subprocess.Popen(  # noqa: TID251 this is the helper
            command,
            env=variables,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_group(process.pid)
            process.wait()


def kill_group(pid: int) -> None:
    """Kill a process and its process group. One that was just forked does not lead its group yet."""
    for kill in (os.kill, os.killpg):
        with suppress(OSError):  # it has just ended, or does not lead its group
            kill(pid, signal.SIGKILL)


def run_captured(command: Sequence[str], limit_s: float | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end. Returns its exit code, stdout and stderr, where bytes that are no UTF-8 become U+FFFD.

    Args:
        command: the program and its arguments. Its stdin is empty.
        limit_s: the time after which it is killed; None: no limit.

    Raises:
        OSError: the program cannot be started, or was killed after `limit_s`.
    """
    try:
        return subprocess.run(  # noqa: TID251 this is the helper
            command,
            stdin=subprocess.DEVNULL,
            timeout=limit_s,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} has not ended within {limit_s:g} s") from None


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


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


# --- the end of this process ----------------------------------------------------------------------------------------


def leave(code: int, *, waits: bool = False) -> NoReturn:
    """End this process as Python would, but without the teardown of modules, which takes torch 0.3 s.

    After a failure (a code other than 0), it waits for no thread and only LEAVE_S for atexit functions, unless `waits`.
    """
    waits |= code == 0
    if not waits:
        # The other ranks wait for this one until it ends.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LEAVE_S)
    with suppress(BaseException):
        if waits:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons  # noqa: SLF001
    with suppress(BaseException):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a late Ctrl-C would only print a traceback
        atexit._run_exitfuncs()  # noqa: SLF001
    leave_now(code)


def leave_now(code: int) -> NoReturn:
    """End this process at once, with what it has printed, and without atexit functions."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


class Held:
    """Something that a process holds open."""

    def close(self) -> None:
        """At the end of the process, or before: end it. A second call does nothing."""

    def forget(self) -> None:
        """In a forked child: release it, and leave what belongs to the parent as it is."""


_held: WeakValueDictionary[int, Held] = WeakValueDictionary()  # id -> object, in the order in which they were opened


def hold(thing: Held, *, alone: bool = False) -> None:
    """Close a thing at the end of this process, and let a forked child forget it, if something else still refers to it.

    Args:
        alone: whether a process has one thing of its class. An earlier one, of another run, is closed.
    """
    earlier = [each for each in _held.values() if alone and type(each) is type(thing) and each is not thing]
    for each in earlier:
        each.close()
    _held.setdefault(id(thing), thing)
    # Before the hooks of libraries that are there by now: torch's would wait for workers that ignore SIGTERM.
    atexit.unregister(_close_all)
    atexit.register(_close_all)  # noqa: TID251 the one place


def _close_all() -> None:
    with ExitStack() as stack:  # also after an error in one of them
        for each in [*_held.values()]:
            stack.callback(each.close)


def _forget_all() -> None:
    with ExitStack() as stack:
        for each in [*_held.values()]:
            stack.callback(each.forget)
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)  # noqa: TID251 the one place


# --- forks ------------------------------------------------------------------------------------------------------------
#
# The child of `os.fork` has one thread. A lock that another thread of the parent held at the moment of the fork, in C++
# or in Python, stays locked in the child forever, and a child that needs it never returns (docs/dev/forking.md).
# So background threads work inside `at_work()`, and every `os.fork` of this process, by a DataLoader or by the script,
# waits until no thread is inside.


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
            self._changed.wait_for(lambda: not self._num_forks, FORK_LIMIT_S)
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
            self._changed.wait_for(lambda: self._at_work <= {threading.get_ident()}, FORK_LIMIT_S)
        if sys.version_info < (3, 12):
            wait_until(lambda: not _is_gloo_running(), FORK_LIMIT_S, every_s=0.001)

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
