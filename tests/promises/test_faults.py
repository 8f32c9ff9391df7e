"""After any fault at any moment, a run continues or resumes by the same command, to the same end.

The tests of resuming, stops and restarts have the faults of launchers and the signals from other processes.
"""

import json
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime

import psutil
import pytest
from promises.faulty import (
    IN_BODY,
    IN_SAVING,
    IN_STEP,
    NUM_STEPS,
    Fault,
    repair,
    set_clock_back,
)
from promises.trial import Outcome, Trial, resume_is_from
from support.disks import open_disk
from support.runs import ask
from support.selection import cover
from support.waiting import wait_until

Undisturbed = Callable[..., Outcome]

ACTIONS_OF_RANKS = ("kill", "freeze", "raise", "exit", "exhaust", "preempt")
BESIDE = {  # in a thread of rank 0: an exception there loses the snapshot, not the run
    "staging": ("raise", "exhaust"),
    "hashing": ("exhaust", "freeze"),
    "writing tensors": ("raise", "preempt"),
    "writing manifest": ("exhaust", "exit"),
    "before rename": ("raise", "preempt"),
    "after rename": ("exit", "freeze"),
    "replacing best": ("exhaust", "raise"),
    "between best and numbered": ("exit", "preempt"),
    "pruning": ("exhaust", "freeze"),
}

# --- every moment -----------------------------------------------------------------------------------------------------


def build_faults() -> list[str]:
    """Each moment with faults and victims in turn. The first and the last step come by themselves."""

    def is_possible(moment: str, action: str, who: str) -> bool:
        return moment not in IN_SAVING or (who == "rank 0" and action in ("kill", *BESIDE[moment]))

    factors = {"action": ACTIONS_OF_RANKS, "who": ("rank 0", "rank 2", "all ranks")}
    rows = cover(("start", *IN_STEP, *IN_BODY, *IN_SAVING[::3]), factors, is_possible)
    steps = {"start": 0} | dict.fromkeys(IN_STEP, 7)
    faults = [f"{action} {who} at step {steps.get(moment, 10)} in {moment}" for moment, action, who in rows]
    faults += ["kill rank 1 at step 0 in backward", "kill rank 1 at step 14 in update"]
    return [*faults, "kill rank 0 at step 10 in before rename", "kill rank 0 at step 15 in between best and numbered"]


@pytest.mark.parametrize("fault", build_faults())
def test_at_every_moment(trial: Trial, undisturbed: Undisturbed, capfd: pytest.CaptureFixture[str], fault: str) -> None:
    """With keep_last=1, so that snapshots are pruned. (The simulated runs have faults at all operations on files.)"""
    num_ranks_then = 1 + len(fault) % 4
    parsed = Fault.parse(fault)
    step, moment, action = parsed.step, parsed.moment, parsed.action
    arguments = {"keep_last": 1, "settled": moment in IN_BODY or action == "preempt"}
    with trial.killing_the_frozen():
        if action == "preempt":
            assert trial.spawn(3, fault, **arguments) is None
            assert trial.num_ends == 0
        elif action in ("raise", "exhaust") and moment in BESIDE:
            assert trial.spawn(3, fault, **arguments) == trial.dir
            assert ("could not be removed" if moment == "pruning" else "could not be written") in capfd.readouterr().out
        else:
            error = trial.spawn_to_fail(3, fault, **arguments)
            ends = {"raise": "a fault", "exhaust": "allocate", "exit": "exit code 3"}
            assert ends.get(action, "SIGKILL") in str(error)
    trial.assert_struck(fault)
    saved = trial.snapshots
    if parsed.rank is None and action in ("raise", "exit", "exhaust"):
        fault = ""  # it has struck all ranks, also those that had not reached it
    assert trial.spawn(num_ranks_then, fault or (), keep_last=1) == trial.dir
    assert trial.outcome() == undisturbed()
    assert not [*trial.dir.glob("snapshots/.*"), *trial.dir.glob(".*")], "incomplete files are removed"
    if step < NUM_STEPS:  # otherwise the run may have been complete
        assert trial.snapshots == ["best", "step-00000015"]
    if fault.startswith(("kill rank 0 at step 10", "exit rank 0 at step 10")) and moment in (*IN_BODY, *IN_SAVING[:5]):
        assert "step-00000005" in saved, "the snapshot of an epoch comes after its body"
        assert "step-00000010" not in saved
    if moment in ("after rename", "pruning") and action in ("kill", "exit"):
        assert f"step-{step:08d}" in saved


@pytest.mark.parametrize("action", ["freeze", "raise", "preempt"])
def test_in_a_worker(trial: Trial, undisturbed: Undisturbed, action: str) -> None:
    """A fault in a DataLoader worker. (A kill there under the launcher is in test_resume.)"""
    fault = f"{action} rank 1 at step 9 in worker"
    with trial.killing_the_frozen():
        if action == "preempt":  # as a scheduler does, signal the rank too
            assert trial.spawn(2, fault, num_workers=1) == trial.dir
        else:
            error = trial.spawn_to_fail(2, fault, num_workers=1)
            said = {"raise": "a fault", "exhaust": "allocate"}.get(action, "DataLoader worker|Connection|closed")
            heard = f"{error!r} {error.__cause__!r}"
            assert any(words in heard for words in said.split("|")), heard
    trial.assert_struck(fault)
    trial.spawn(3, fault, num_workers=1)
    assert trial.outcome() == undisturbed()


def test_frozen_and_thawed(trial: Trial, undisturbed: Undisturbed) -> None:
    """As when a laptop is closed or a debugger attached: the other ranks wait, and the run continues."""
    launch = trial.start("launch", 2, "freeze rank 1 at step 7 in backward")
    wait_until(lambda: list(trial.faults.glob("frozen-*")), "rank 1 says so")
    frozen = psutil.Process(trial.pid(1))
    wait_until(lambda: frozen.status() == psutil.STATUS_STOPPED, "rank 1 is stopped")
    assert launch.process.poll() is None
    frozen.send_signal(signal.SIGCONT)
    assert launch.wait() == 0, launch.output
    assert trial.outcome() == undisturbed()


# --- disks and directories --------------------------------------------------------------------------------------------

SAID = {"fill": "No space left on device", "protect": "Read-only file system", "forbid": "Permission denied"}


@pytest.mark.parametrize(("how", "moment", "until"), [
    ("fill", "update", "step 12"),
    ("protect", "backward", "the end"),
    ("forbid", "writing manifest", "the last step"),
])  # fmt: skip
def test_a_disk_fails_during_a_run(
    trial: Trial, undisturbed: Undisturbed, capfd: pytest.CaptureFixture[str], how: str, moment: str, until: str
) -> None:
    """The run continues with a message and saves again when it can. Otherwise the same command resumes it."""
    fault = f"{how} rank 0 at step {10 if moment == 'validation' else 6} in {moment}"
    repaired_at = {"step 12": "step 12 in forward", "the last step": "step 15 in validation"}
    with open_disk(trial.dir) if how != "forbid" else nullcontext():
        faults = [fault, *([f"repair rank 0 at {repaired_at[until]}"] if until in repaired_at else [])]
        if until == "the end":
            error = trial.spawn_to_fail(2, faults, snapshot_every=2, settled=True)
            assert "the snapshot of step 15 could not be written" in str(error)
        else:
            trial.spawn(2, faults, snapshot_every=2, settled=True)
        trial.assert_struck(fault)
        printed = capfd.readouterr().out
        assert SAID[how] in printed
        assert trial.num_ends == 1
        if until == "the end":
            assert "step-00000015" not in trial.snapshots
            repair(how, trial.dir)
        else:
            assert "step-00000015" in trial.snapshots
        trial.spawn(3, snapshot_every=2)
        assert ("nothing left to do" in capfd.readouterr().out) == (until != "the end")
        assert trial.outcome() == undisturbed()
        assert not [*trial.dir.glob("snapshots/.*"), *trial.dir.glob(".*")]


@pytest.mark.parametrize(("moment", "is_disk"), [("writing tensors", False), ("forward", True)])
def test_the_directory_is_removed_during_a_run(
    trial: Trial, undisturbed: Undisturbed, capfd: pytest.CaptureFixture[str], moment: str, is_disk: bool
) -> None:
    """There is a message at each snapshot, and the same command begins a new run. A mounted directory is emptied."""
    fault = f"remove rank 0 at step 6 in {moment}"
    with open_disk(trial.dir) if is_disk else nullcontext():
        error = trial.spawn_to_fail(2, fault, snapshot_every=3)
        assert "the snapshot of step 15 could not be written" in str(error)
        trial.assert_struck(fault)
        assert "was removed during the run" in capfd.readouterr().out
        assert trial.num_ends == 1
        assert trial.snapshots == []
        trial.spawn(3)
        assert trial.outcome() == undisturbed()


# --- clocks -----------------------------------------------------------------------------------------------------------


def test_the_clock_is_set_back(trial: Trial, undisturbed: Undisturbed, capfd: pytest.CaptureFixture[str]) -> None:
    """By a day, within a run, and between a crash and the resume. The newest snapshot is that of the last step."""
    faults = ["backdate rank 0 at step 7 in update", "kill rank 1 at step 13 in forward"]
    trial.spawn_to_fail(2, faults, snapshot_every=3, keep_last=3, settled=True)
    for fault in faults:
        trial.assert_struck(fault)

    def read_time(name: str) -> datetime:
        manifest = json.loads((trial.dir / "snapshots" / name / "manifest.json").read_text())
        return datetime.fromisoformat(manifest["time"])

    assert trial.snapshots == ["step-00000006", "step-00000009", "best", "step-00000012"]
    assert read_time("step-00000012") < read_time("step-00000006")
    assert "step 12" in ask("inspect", trial.dir) or "12" in ask("inspect", trial.dir)
    capfd.readouterr()
    trial.spawn(3, "backdate rank 0 at step 12 in start", snapshot_every=3, keep_last=2)
    assert resume_is_from(capfd.readouterr().out) == 12
    assert trial.snapshots == ["step-00000012", "best", "step-00000015"]
    trial.spawn(2, "backdate all ranks at step 12 in start", snapshot_every=3, resume=12)
    assert trial.outcome() == undisturbed()


def test_setting_the_clock_back_is_seen() -> None:
    """By every function of time that the code uses."""

    def look() -> list[float]:
        from samestep.snapshot import manifest

        told = [time.time(), time.time_ns() / 1e9, time.mktime(time.localtime())]
        return [*told, time.mktime(time.strptime(time.strftime("%c"))), manifest.datetime.now().timestamp()]

    def compare() -> list[float]:
        before = look()
        set_clock_back()
        return [now - then for now, then in zip(look(), before, strict=True)]

    import samestep

    assert [round(change / 3600) for change in samestep.spawn(compare)] == [-24] * 5
