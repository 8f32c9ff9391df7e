"""Programs are started and ended as `samestep.processes` says."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from support.waiting import wait_until

from samestep.processes import ChildProcess, run_captured

# Ignores SIGTERM, and prints the pid of a child process.
STUBBORN = ["sh", "-c", "trap '' TERM; sleep 1000 & echo $!; wait; sleep 1000"]


def is_running(pid: int) -> bool:
    """Whether a process exists that is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The ends of a pipe, to read what a program writes."""
    reader, writer = os.pipe()
    with open(reader, "rb") as ours, open(writer, "wb") as theirs:
        yield ours, theirs


def test_the_end_of_the_block_kills_the_program_and_its_children(pipe: tuple[IO[bytes], IO[bytes]]) -> None:
    with ChildProcess(STUBBORN, output=pipe[1]) as process:
        child = int(pipe[0].readline())
        assert process.poll() is None
        assert process.wait_for(0.01) is None
        assert is_running(child)
    assert process.wait() == -signal.SIGKILL
    wait_until(lambda: not is_running(child), "the child process ends")


def test_a_program_has_time_to_end() -> None:
    process = ChildProcess(["cat"])
    process.end(60.0)  # its input is empty
    assert process.wait() == 0
    process.end()  # a second call does nothing


def test_the_exit_code_and_the_signal() -> None:
    with ChildProcess(["sh", "-c", "exit 7"]) as process:
        assert process.wait() == 7
    with ChildProcess(["sleep", "1000"]) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM


def test_an_interrupt_during_the_start_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            signal.raise_signal(signal.SIGINT)
            super().__init__(*args, **options)
            started.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        ChildProcess(["sleep", "1000"])
    [pid] = started
    assert not is_running(pid)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_is_bound_to_its_parent(pipe: tuple[IO[bytes], IO[bytes]]) -> None:
    code = (
        "import signal; from samestep.processes import ChildProcess\n"
        "process = ChildProcess(['sh', '-c', 'echo $$; exec sleep 1000'], dies_with_parent=True)\n"
        "signal.pause()"
    )
    with ChildProcess([sys.executable, "-c", code], output=pipe[1]) as parent:
        pid = int(pipe[0].readline())
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
        assert parent.wait() == -signal.SIGKILL
    wait_until(lambda: not is_running(pid), "the program ends with its parent")


def test_captured_output() -> None:
    done = run_captured(["sh", "-c", "cat; printf '\\377' >&2; echo $WORD; exit 3"], variables={"WORD": "b"}, stdin="a")
    assert (done.returncode, done.stdout, done.stderr) == (3, "ab\n", "\ufffd")


def test_captured_output_has_a_limit_of_time() -> None:
    with pytest.raises(TimeoutError, match=r"sleep has not ended within 0\.1 s"):
        run_captured(["sleep", "1000"], limit_s=0.1)
