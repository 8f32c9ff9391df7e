"""`launch --max-restarts`: a rank that dies costs the steps since the newest snapshot, without help by a user."""

import errno
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from promises.faulty import DEADLINE_S
from promises.trial import Outcome, Trial, read_outcome, read_tree

import samestep
from samestep.errors import PeerFailed
from samestep.launch.failure import is_secondary
from samestep.snapshot.lock import Lock
from samestep.tools.report.run_data import read_run_data
from samestep.watch.records import read_status

Undisturbed = Callable[..., Outcome]


def read_restarts(trial: Trial) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (trial.dir / "restarts.jsonl").read_text().splitlines()]
    assert [row["restart"] for row in rows] == list(range(1, len(rows) + 1))
    for row in rows:
        assert abs(time.time() - time.mktime(time.strptime(row["time"] + "+0000", "%Y-%m-%dT%H:%M:%SZ%z"))) < 2 * 86400
    return rows


def flags_of(*faults: str) -> list[str]:
    return [word for fault in faults for word in ("--fault", fault)]


def test_the_last_failure_is_reported(trial: Trial, undisturbed: Undisturbed) -> None:
    """When no restarts are left: by the launcher, the run's status, a report, and the next start by the user."""
    faults = ["raise rank 0 at step 3 in forward", "kill rank 1 at step 7 in forward"]
    reasons = [f"rank 0 raised RuntimeError: a fault: {faults[0]}", "rank 1 was killed by SIGKILL (out of memory?)"]
    launch = trial.run("launch", 2, "", "--max-restarts", "1", arguments=flags_of(*faults), code=137)
    said = launch.err.read_text()
    assert said.count("Traceback") == 1
    assert "; restart 1 of 1\n" in said
    assert said.splitlines()[-1] == f"samestep: {reasons[1]}; the others were stopped"
    status = read_status(trial.dir)
    assert (status["status"], status["reason"], status["rank"]) == ("failed", reasons[1], 1)
    logs = dict(read_run_data(trial.dir, "run", {}).logs)
    assert [*logs] == [f"start 0: {reasons[0]}", f"start 1: {reasons[1]}"]
    assert logs[f"start 0: {reasons[0]}"].endswith(f"RuntimeError: a fault: {faults[0]}")
    trial.spawn(3)
    rows = read_restarts(trial)
    assert [(row["reason"], row["rank"]) for row in rows] == [(reasons[0], 0), (reasons[1], 1)]
    assert (rows[1]["from_step"], rows[1]["world_size"]) == (5, 3)
    assert rows[1]["lost_steps"] in range(3), "rank 0 may be ended before it has recorded steps 5 and 6"
    assert trial.outcome() == undisturbed()


@pytest.mark.parametrize("flag", ["--fresh", "--resume=5"])
def test_a_restart_ignores_resume_and_fresh(trial: Trial, undisturbed: Undisturbed, flag: str) -> None:
    """It does not go back to the older snapshot again, and makes no further directory."""
    trial.spawn(1, max_steps=10)
    fault = "kill rank 1 at step 14 in forward"
    flags = ["--snapshot-every", "3", flag, "--max-restarts", "1"]
    launch = trial.run("launch", 2, "", *flags, arguments=flags_of(fault))
    run_dir = trial.dir.with_name("run-2") if flag == "--fresh" else trial.dir
    assert sorted(path.name for path in trial.dir.parent.glob("run*") if "faults" not in path.name) == sorted(
        {"run", run_dir.name}
    )
    assert "; resumed at step 12" in launch.output
    assert read_outcome(run_dir) == undisturbed(snapshot_every=3)


def test_a_busy_rank_ends_at_once(trial: Trial, undisturbed: Undisturbed) -> None:
    """Rank 0 computes, outside of an exchange, when rank 1 dies: the launcher ends it at once, without a vote."""
    launch = trial.start("launch", 2, "hold rank 0 at step 7 in forward", "--max-restarts", "1")
    trial.wait_held()
    os.kill(trial.pid(1), signal.SIGKILL)  # it waits for rank 0, or will
    killed_s = time.time()
    assert launch.wait() == 0, launch.output
    took_s = (trial.dir / "restarts.jsonl").stat().st_mtime - killed_s
    assert took_s < DEADLINE_S, "rank 0 is held for so long"
    assert "a second one ends at once" not in launch.output, "there was no vote"
    assert trial.outcome() == undisturbed()


# Five starts of one run: 14 s, and 19 s on a busy machine.
def test_the_record_of_starts_by_the_user(trial: Trial, undisturbed: Undisturbed) -> None:
    """After a stop by a signal, a crash without a message, `run.stop`, and for a run that is longer now."""
    stopped = trial.start("launch", 2, "hold rank 0 at step 2 in forward")
    trial.wait_held()
    trial.tell(stopped, signal.SIGUSR1)
    trial.go_on()
    assert stopped.wait() == 75
    trial.spawn_to_fail(2, "kill all ranks at step 9 in update")
    trial.spawn(1, "stop all ranks at step 12 in update")
    trial.spawn(2, resume=13)
    trial.spawn(3, epochs=4)
    rows = read_restarts(trial)
    told = [(row["reason"], row["from_step"], row["lost_steps"], row["world_size"]) for row in rows]
    assert told == [
        ("stopped by SIGUSR1", 3, 0, 2),
        ("unknown", rows[1]["from_step"], rows[1]["lost_steps"], 1),
        ("by a fault", 13, 0, 2),
        ("the run was done", 15, 0, 3),
    ]
    # A kill loses a snapshot that is being written, and the records of the last tenth of a second.
    assert rows[1]["from_step"] in (3, 5)
    assert 0 <= rows[1]["lost_steps"] <= 9 - rows[1]["from_step"]
    assert trial.outcome() == undisturbed(epochs=4)


# --- one writer -------------------------------------------------------------------------------------------------------


def test_a_writer_that_was_cut_off_is_fenced(trial: Trial, undisturbed: Undisturbed) -> None:
    """A machine and its lock return after it was taken for dead: the run has resumed on another machine."""
    old = trial.start("python", 1, "hold rank 0 at step 7 in forward")
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
    assert old.wait() == 2
    assert f"the run in {trial.dir} was taken over by process " in old.err.read_text()
    assert read_tree(trial.dir) == before


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
    first.release()
    second.release()


# --- the cause of a failure -------------------------------------------------------------------------------------------


def raise_in(module: str, error: Exception, inner: str = "") -> BaseException:
    """What code of a module raises, or a function of the module `inner` that it has called."""
    names: dict[str, Any] = {"__name__": inner or module, "error": error}
    exec("def call(): raise error", names)
    with pytest.raises(type(error)) as raised:
        exec("call()", {"__name__": module, "call": names["call"]})
    return raised.value


def test_a_broken_connection_that_is_not_between_ranks() -> None:
    """The death of a DataLoader worker or of the script's server is a failure of this rank."""
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(BrokenPipeError) as raised:
        ours.sendall(b"x")
    assert not is_secondary(raised.value)
    worker = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    worker.__cause__ = raise_in("multiprocessing.connection", ConnectionResetError("Connection reset by peer"))
    assert not is_secondary(worker)
    assert is_secondary(raise_in("torch.distributed.distributed_c10d", ConnectionResetError()))
    assert is_secondary(raise_in("samestep.engine.routes", RuntimeError("whatever gloo says")))
    error = RuntimeError("whatever gloo says")
    assert is_secondary(raise_in("torch.distributed._functional_collectives", error, "torch._ops"))
    assert not is_secondary(raise_in("train", RuntimeError("whatever gloo says"), "torch._ops"))
    assert is_secondary(torch.distributed.DistBackendError("whatever NCCL says"))
    assert not is_secondary(raise_in("train", RuntimeError("Connection closed by peer")))
    assert not is_secondary(raise_in("samestep.engine.passes", torch.OutOfMemoryError("no room")))
    assert is_secondary(PeerFailed("rank 0 failed"))
