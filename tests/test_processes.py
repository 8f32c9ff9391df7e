"""Programs are started and ended as `samestep.processes` says."""

import os
import signal
from pathlib import Path

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


def test_the_end_of_the_block_kills_the_program_and_its_children(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with running(STUBBORN, dict(os.environ), output) as process:
        wait_until(lambda: output.read_text().endswith("\n"), "it prints the pid")
        child = int(output.read_text())
        assert process.poll() is None
        assert is_running(child)
    assert process.wait() == -signal.SIGKILL
    wait_until(lambda: not is_running(child), "the child process ends")


def test_captured_output() -> None:
    done = run_captured(["sh", "-c", "cat; printf '\\377' >&2; echo b; exit 3"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "b\n", "\ufffd")


def test_captured_output_has_a_limit_of_time() -> None:
    with pytest.raises(TimeoutError, match=r"sleep has not ended within 0\.1 s"):
        run_captured(["sleep", "1000"], limit_s=0.1)
