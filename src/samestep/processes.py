"""Starts programs, and ends processes: with their parent, or within a time."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from samestep.files import open_regular
from samestep.waiting import wait_until

Program = subprocess.Popen[bytes]  # noqa: TID251
PR_SET_PDEATHSIG = 1


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

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_or_kill(pid: int, limit_s: float) -> None:
    """Wait for the end of a forked process. Kill it after `limit_s`."""
    with suppress(ChildProcessError):  # already waited for
        if not wait_until(lambda: os.waitpid(pid, os.WNOHANG) != (0, 0), limit_s, every_s=0.001):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
