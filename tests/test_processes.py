"""Programs are started and ended, and forks wait for threads, as `samestep.processes` says."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.waiting import DEADLINE_S, wait_until

from samestep import processes
from samestep.processes import at_rest, at_work, run_captured, running

# Ignores SIGTERM, and prints the pid of a child process.
STUBBORN = ["sh", "-c", "trap '' TERM; sleep 1000 & echo $!; wait; sleep 1000"]


def test_the_end_of_the_block_kills_the_program_and_its_children(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with running(STUBBORN, dict(os.environ), output) as process:
        wait_until(lambda: output.read_text().endswith("\n"), "it prints the pid")
        child = psutil.Process(int(output.read_text()))
        assert process.poll() is None
        assert child.is_running()
    assert process.wait() == -signal.SIGKILL
    assert not psutil.wait_procs([child], DEADLINE_S)[1], "the child process ends"


def test_captured_output() -> None:
    done = run_captured(["sh", "-c", "cat; printf '\\377' >&2; echo b; exit 3"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "b\n", "\ufffd")


def test_captured_output_has_a_limit_of_time() -> None:
    with pytest.raises(TimeoutError, match=r"sleep has not ended within 0\.1 s"):
        run_captured(["sleep", "1000"], limit_s=0.1)


# --- forks beside background threads ----------------------------------------------------------------------------------


def fork_and_run(child: Callable[[], bool]) -> bool:
    """Return whether `child` returned True in a forked process."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if child() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_fork_waits_for_a_thread_at_work_and_passes_one_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    # No fork waits up to the limit, which may end the wait too early.
    monkeypatch.setattr(processes, "FORK_LIMIT_S", 1000.0)
    lock, taken, is_over = threading.Lock(), threading.Event(), threading.Event()
    num_rounds = 0

    def work() -> None:
        nonlocal num_rounds
        while not is_over.is_set():
            with at_work():
                with lock:
                    taken.set()
                    time.sleep(0.0005)  # with the lock held, as C++ code holds its own
                with at_rest():
                    num_rounds += 1

    thread = threading.Thread(target=work)
    thread.start()
    taken.wait()
    free = [fork_and_run(lambda: lock.acquire(blocking=False)) for _ in range(20)]
    is_over.set()
    thread.join()
    assert all(free)
    assert num_rounds


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python repairs that lock in the child")
def test_a_fork_waits_for_a_running_thread_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a thread may hold a lock of the interpreter without the GIL."""
    monkeypatch.setattr(processes, "FORK_LIMIT_S", 1000.0)
    numbers = np.ones(100_000_000, np.int8)

    def run_without_gil() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop")  # PR_SET_NAME
        np.negative(numbers, out=numbers)

    thread = threading.Thread(target=run_without_gil)
    thread.start()
    wait_until(lambda: numbers[0] == -1, "it runs", every_s=0.0005)
    assert fork_and_run(lambda: bool(numbers[-1] == -1))
    thread.join()


def test_neither_side_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FORK_LIMIT_S", 0.05)
    inside, is_over = threading.Event(), threading.Event()

    def hang() -> None:
        with at_work():
            inside.set()
            is_over.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    inside.wait()
    assert fork_and_run(lambda: True)
    is_over.set()
    thread.join()
