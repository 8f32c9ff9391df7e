"""Starts programs, and ends processes: with their parent, or within a time."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from samestep.waiting import wait_until

PR_SET_PDEATHSIG = 1


class ChildProcess:
    """A program in a session of its own: Ctrl-C in the terminal does not reach it. Leaving the `with` block ends it.

    Its stdin is empty, and its stdout and stderr are those of this process, unless `output` is given.

    Args:
        command: the program and its arguments.
        variables: its environment; None: that of this process.
        directory: its working directory; None: that of this process.
        output: a file for its stdout and stderr.
        dies_with_parent: whether the kernel kills it when the thread that starts it ends.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        directory: Path | None = None,
        output: IO[Any] | None = None,
        dies_with_parent: bool = False,
    ) -> None:
        process: subprocess.Popen[bytes] | None = None  # noqa: TID251
        try:
            with delaying_interrupts():
                process = subprocess.Popen(  # noqa: TID251 this is the helper
                    command,
                    env=variables,
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=die_with_parent if dies_with_parent else None,
                )
        except BaseException:
            if process is not None:  # no caller has it yet, to end it
                process.kill()
                process.wait()
            raise
        self._process = process

    def __enter__(self) -> "ChildProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait(self) -> int:
        """Wait for the end of the program. Returns its exit code, or minus the signal that killed it."""
        return self._process.wait()

    def wait_for(self, limit_s: float | None) -> int | None:
        """As `wait`, but return None if the program still runs after `limit_s`."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(limit_s)
        return None

    def poll(self) -> int | None:
        """As `wait`, but return None if the program still runs now."""
        return self._process.poll()

    def send_signal(self, signum: int) -> None:
        """Send a signal to the program, if it runs, and not to its children."""
        self._process.send_signal(signum)

    def end(self, limit_s: float = 0.0) -> None:
        """Wait for the end of the program. Kill it and its process group after `limit_s`."""
        if self.wait_for(limit_s) is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self.wait()


def kill_group(pid: int) -> None:
    """Kill a process and its process group. One that was just forked does not lead its group yet."""
    for kill in (os.kill, os.killpg):
        with suppress(OSError):  # it has just ended, or does not lead its group
            kill(pid, signal.SIGKILL)


def run_captured(
    command: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    stdin: str = "",
    limit_s: float | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end. Returns its exit code, stdout and stderr, where bytes that are no UTF-8 become U+FFFD.

    Args:
        command: the program and its arguments.
        variables: its environment; None: that of this process.
        stdin: the content of its stdin.
        limit_s: the time after which it is killed; None: no limit.

    Raises:
        OSError: the program cannot be started, or was killed after `limit_s`.
    """
    try:
        return subprocess.run(  # noqa: TID251 this is the helper
            command,
            env=variables,
            input=stdin,
            timeout=limit_s,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} has not ended within {limit_s:g} s") from None


@contextmanager
def delaying_interrupts() -> Iterator[None]:
    """Call the handlers of SIGINT and SIGTERM only after the block: one that raises would lose what the block makes."""
    received: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(handler := signal.getsignal(number)):
                before[number] = handler
                signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for each in received:
        signal.raise_signal(each)


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_or_kill(pid: int, limit_s: float) -> None:
    """Wait for the end of a forked process. Kill it after `limit_s`."""
    with suppress(ChildProcessError):  # already waited for
        if not wait_until(lambda: os.waitpid(pid, os.WNOHANG) != (0, 0), limit_s, every_s=0.001):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
