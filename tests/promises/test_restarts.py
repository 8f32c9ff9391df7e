"""`launch --max-restarts`: a rank that dies costs the steps since the newest snapshot, without help by a user."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from promises.trial import HELD, Trial, Undisturbed, read_outcome, read_restarts, read_tree

import samestep
from samestep.errors import PeerFailed
from samestep.launch.rank_reports import is_secondary
from samestep.snapshot.lock import Lock
from samestep.watch.records import read_status


def test_the_last_failure_is_reported(trial: Trial, undisturbed: Undisturbed) -> None:
    """When no restarts are left: by the launcher, the run's status, and the next start by the user."""
    faults = ["raise rank 0 at step 3 in forward", "kill rank 1 at step 7 in forward"]
    reasons = [f"rank 0 raised RuntimeError: a fault: {faults[0]}", "rank 1 was killed by SIGKILL (out of memory?)"]
    launch = trial.run("launch", 2, faults, "--max-restarts", "1", code=137)
    said = launch.err.read_text()
    assert said.count("Traceback") == 1
    assert "; restart 1 of 1\n" in said
    assert said.splitlines()[-1] == f"samestep: {reasons[1]}; the others were stopped"
    status = read_status(trial.dir)
    assert (status["status"], status["reason"], status["rank"]) == ("failed", reasons[1], 1)
    trial.spawn(3)
    rows = read_restarts(trial.dir)
    assert [(row["reason"], row["rank"]) for row in rows] == [(reasons[0], 0), (reasons[1], 1)]
    assert (rows[1]["from_step"], rows[1]["world_size"]) == (5, 3)
    assert rows[1]["lost_steps"] in range(3), "rank 0 may be ended before it has recorded steps 5 and 6"
    assert trial.outcome() == undisturbed()


# --- one writer -------------------------------------------------------------------------------------------------------


def test_a_writer_that_was_cut_off_is_fenced(trial: Trial, undisturbed: Undisturbed) -> None:
    """A machine and its lock return after it was taken for dead: the run has resumed on another machine."""
    old = trial.start("python", 1, HELD)
    trial.wait_held()
    old_ledger = os.stat(trial.dir / "ledger.bin").st_ino
    # As on another machine, where the flock of the old writer is gone.
    os.unlink(trial.dir / "lock")
    (trial.dir / "lock").write_text("process 1 on elsewhere since 2026-01-01 00:00:00\n" + "0" * 32 + "\n")
    trial.spawn(2)
    assert os.stat(trial.dir / "ledger.bin").st_ino != old_ledger, "the old writer appends to a removed file"
    assert trial.outcome() == undisturbed()
    before = read_tree(trial.dir)
    trial.go_on()
    assert old.finish() == 2
    assert f"the run in {trial.dir} was taken over by process " in old.err.read_text()
    assert read_tree(trial.dir) == before


def test_the_process_itself_reads_its_lock(tmp_path: Path) -> None:
    """A POSIX lock is lost when the process itself closes the file, as after a copy of the directory."""
    first = Lock(tmp_path / "lock", tmp_path)
    (tmp_path / "lock").read_bytes()
    with pytest.raises(samestep.Error, match=f"is locked by process {os.getpid()} on "):
        Lock(tmp_path / "lock", tmp_path)
    first.forget()


def test_file_systems_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems: the last process to start gets the run."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first = Lock(tmp_path / "lock", tmp_path)
    first.check()
    second = Lock(tmp_path / "lock", tmp_path)
    second.check()
    with pytest.raises(samestep.Error, match=f"was taken over by process {os.getpid()} on "):
        first.check()
    first.forget()
    second.forget()


# --- the cause of a failure -------------------------------------------------------------------------------------------


def raise_in(module: str, error: Exception, inner: str = "") -> BaseException:
    """What code of a module raises, or a function of the module `inner` that it has called."""
    names: dict[str, Any] = {"__name__": inner or module, "error": error}
    exec("def call(): raise error", names)
    with pytest.raises(type(error)) as raised:
        exec("call()", {"__name__": module, "call": names["call"]})
    return raised.value


@pytest.mark.parametrize(("module", "error", "inner", "is_of_a_peer"), [
    ("torch.distributed.distributed_c10d", ConnectionResetError(), "", True),
    ("samestep.engine.routes", RuntimeError("whatever gloo says"), "", True),
    ("torch.distributed._functional_collectives", RuntimeError("whatever gloo says"), "torch._ops", True),
    ("train", torch.distributed.DistBackendError("whatever NCCL says"), "", True),
    ("train", PeerFailed("rank 0 failed"), "", True),
    ("train", RuntimeError("whatever gloo says"), "torch._ops", False),
    ("train", RuntimeError("Connection closed by peer"), "", False),
    ("train", BrokenPipeError(), "", False),
    ("samestep.engine.passes", torch.OutOfMemoryError("no room"), "", False),
])  # fmt: skip
def test_whose_failure_an_error_is(module: str, error: Exception, inner: str, is_of_a_peer: bool) -> None:
    """Of another rank that is gone, or, such as a broken connection to the script's server, of this one."""
    assert is_secondary(raise_in(module, error, inner)) == is_of_a_peer


def test_the_death_of_a_loader_worker_is_a_failure_of_this_rank() -> None:
    worker = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    worker.__cause__ = raise_in("multiprocessing.connection", ConnectionResetError("Connection reset by peer"))
    assert not is_secondary(worker)


@pytest.mark.parametrize("flag", ["--fresh", "--resume=5"])
def test_a_restart_ignores_resume_and_fresh(trial: Trial, undisturbed: Undisturbed, flag: str) -> None:
    """It does not go back to the older snapshot again, and makes no further directory."""
    trial.spawn(1, max_steps=10)
    fault = "kill rank 1 at step 14 in forward"
    flags = ["--snapshot-every", "3", flag, "--max-restarts", "1"]
    launch = trial.run("launch", 2, fault, *flags)
    run_dir = trial.dir.with_name("run-2") if flag == "--fresh" else trial.dir
    assert sorted(path.name for path in trial.dir.parent.glob("run*") if "faults" not in path.name) == sorted(
        {"run", run_dir.name}
    )
    assert "; resumed at step 12" in launch.output
    assert read_outcome(run_dir) == undisturbed(snapshot_every=3)
