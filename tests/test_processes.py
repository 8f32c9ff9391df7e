"""Programs are started and ended as `samestep.processes` says."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from support.waiting import wait_until

from samestep.processes import run_captured, running

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
    with running(STUBBORN, output=pipe[1]) as process:
        child = int(pipe[0].readline())
        assert process.poll() is None
        assert is_running(child)
    assert process.wait() == -signal.SIGKILL
    wait_until(lambda: not is_running(child), "the child process ends")


def test_captured_output() -> None:
    done = run_captured(["sh", "-c", "cat; printf '\\377' >&2; echo $WORD; exit 3"], variables={"WORD": "b"}, stdin="a")
    assert (done.returncode, done.stdout, done.stderr) == (3, "ab\n", "\ufffd")


def test_captured_output_has_a_limit_of_time() -> None:
    with pytest.raises(TimeoutError, match=r"sleep has not ended within 0\.1 s"):
        run_captured(["sleep", "1000"], limit_s=0.1)
