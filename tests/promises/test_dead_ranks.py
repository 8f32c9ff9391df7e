"""A rank that dies costs the steps since the newest snapshot (`launch --max-restarts`), or none (`--heal`). A rank
without progress is named with the cause, and the run ends so that it can be started again. A slow run continues.
(Other causes, and when a run ends, are in tests/watch/.)
"""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from promises.trial import HELD, Trial, Undisturbed, read_outcome, read_restarts, read_tree
from support.runs import digest, read_bits, read_rows
from support.selection import one_in
from support.tiny import Tiny, update
from torch import Tensor

import samestep
from samestep.errors import PeerFailed
from samestep.launch.rank_reports import is_secondary
from samestep.snapshot.lock import Lock
from samestep.train.watchdog import kill_sibling
from samestep.watch.records import read_status


def test_the_last_failure_is_reported(trial: Trial, undisturbed: Undisturbed) -> None:
    """When no restarts are left: by the launcher, the run's status, and the next start by the user."""
    faults = ["raise rank 0 at step 3 in forward", "kill rank 1 at step 7 in forward"]
    reasons = [f"rank 0 raised RuntimeError: a fault: {faults[0]}", "rank 1 was killed by SIGKILL (out of memory?)"]
    said = trial.run("launch", 2, faults, "--max-restarts", "1", code=137).err.read_text()
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


@pytest.mark.parametrize("flag", one_in(2, ["--fresh", "--resume=5"]))
def test_a_restart_ignores_resume_and_fresh(trial: Trial, undisturbed: Undisturbed, flag: str) -> None:
    """It does not go back to the older snapshot again, and makes no further directory."""
    trial.spawn(1, max_steps=10)
    fault = "kill rank 1 at step 14 in forward"
    launch = trial.run("launch", 2, fault, "--snapshot-every", "3", flag, "--max-restarts", "1")
    run_dir = trial.dir.with_name("run-2") if flag == "--fresh" else trial.dir
    assert sorted(path.name for path in trial.dir.parent.glob("run*") if "faults" not in path.name) == sorted(
        {"run", run_dir.name}
    )
    assert "; resumed at step 12" in launch.output
    assert read_outcome(run_dir) == undisturbed(snapshot_every=3)


# --- healing: a run continues without the ranks that die, to the same end, from the same step -------------------------

FOLDS = Path(__file__).with_name("folds.py")
STAGES = Path(__file__).with_name("stages.py")


def test_the_others_continue(trial: Trial, undisturbed: Undisturbed) -> None:
    """To the last one, with loader workers, which hold no connection of a rank that has left. Each line of the terminal
    is there once. (The simulated runs kill ranks everywhere.)
    """
    faults = ["kill rank 3 at step 0 in forward", "kill rank 0 at step 5 in validation"]
    faults.append("kill rank 1 at step 7 in forward")
    started = trial.run("launch", 4, faults, "--heal", settled=True, num_workers=1)
    trial.assert_struck(*faults)
    assert trial.outcome() == undisturbed()
    assert started.output.count("was killed by SIGKILL") == len(faults)
    assert ": rank 2 -> rank 0\n" in started.output
    assert not read_restarts(trial.dir), "no rank has started again"
    heals = [json.loads(line) for line in (trial.dir / "heals.jsonl").read_text().splitlines()]
    assert [rank for heal in heals for rank in heal["lost"]] == [3, 0, 1]
    lines = [line for line in started.output.splitlines() if "validation/loss" in line]
    assert [re.findall(r"step (\d+)/15", line) for line in lines] == [["5"], ["10"], ["15"]]
    status = read_status(trial.dir)
    assert (status["status"], status["process"]) == ("done", trial.pid(2))


@pytest.mark.parametrize(
    ("num_ranks", "faults", "said", "num_restarts"),
    [
        (
            4,
            [
                "kill rank 3 at step 2 in exchanging",
                "kill rank 0 at step 6 in updating",
                "kill rank 1 at step 9 in sending",
            ],
            ": rank 2 -> rank 0\n",
            0,
        ),
        (3, ["kill rank 2 at step 3 in writing"], "the snapshot of step 3 could not be written (a rank died before", 0),
        (
            3,
            ["kill rank 1 at step 7 in forward", "kill rank 2 at step 7 in forward"],
            "because a part of the optimizers' state had 2 copies (shard_copies), and is lost with ranks 1 and 2\n",
            1,
        ),
    ],
    ids=["step", "snapshot", "both"],
)
def test_the_others_continue_with_a_divided_state(
    num_ranks: int, faults: Sequence[str], said: str, num_restarts: int, trial: Trial, undisturbed: Undisturbed
) -> None:
    """Two ranks have each part of it. If one dies, a third one gets a copy; if both do, all ranks start again."""
    flags = ("--heal", "--shard", "optimizer", "--shard-copies", "2", "--snapshot-every", "3", "--max-restarts", "1")
    started = trial.run("launch", num_ranks, faults, *flags, settled=True)
    trial.assert_struck(*faults)
    assert said in started.output
    assert len(read_restarts(trial.dir)) == num_restarts
    assert trial.outcome() == undisturbed(snapshot_every=3)


def test_the_others_continue_without_two_pipelines(trial: Trial, tmp_path: Path) -> None:
    """The rank that has the other stage of a dead one is left over. The first one is rank 0."""
    alone = Trial(tmp_path / "alone")
    alone.run("launch", 1, script=STAGES)
    started = trial.run("launch", 6, (), "--heal", "--pipeline-ranks", "2", script=STAGES)
    assert (digest(trial.dir), *read_bits(trial.dir)) == (digest(alone.dir), *read_bits(alone.dir))
    heals = [json.loads(line) for line in (trial.dir / "heals.jsonl").read_text().splitlines()]
    assert [(heal["step"], heal["lost"]) for heal in heals] == [(2, [0, 1]), (4, [4, 5])]
    assert not read_restarts(trial.dir), "no rank has started again"
    for rank in (0, 5):
        assert started.output.count(f"samestep: rank {rank} ends, because its pipeline has lost a rank\n") == 1
    assert ": ranks 2 and 3 -> ranks 0 and 1\n" in started.output


@pytest.mark.parametrize(
    ("stuck", "dead"),
    one_in(2, [
        ("freeze rank 0 at step 7 in forward", "kill rank 2 at step 7 in forward"),
        ("freeze rank 0 at step 0 in regrouping", "kill rank 2 at step 7 in forward"),
        ("hold rank 2 at step 7 in forward", "kill rank 0 at step 3 in forward"),  # it is rank 1 of its group then
    ]),
)  # fmt: skip
def test_a_stuck_rank_is_ended(trial: Trial, undisturbed: Undisturbed, stuck: str, dead: str) -> None:
    """Also after a death: the others wait for it, in the new generation, without a limit."""
    started = trial.run("launch", 3, [stuck, dead], "--heal", "--stuck-after-s", "2", settled=True)
    trial.assert_struck(stuck, dead)
    assert trial.outcome() == undisturbed()
    assert f"stopping {re.findall('rank [012]', stuck)[0]}" in started.output


def test_a_named_snapshot_that_is_lost(trial: Trial, undisturbed: Undisturbed) -> None:
    """All ranks start again, since the script asks for it once only."""
    fault = "kill rank 0 at step 10 in committing"
    started = trial.run("launch", 4, fault, "--heal", "--max-restarts", "1", settled=True)
    assert "because the snapshot best of step 10 is lost with the rank that was writing it\n" in started.output
    assert "rank 0 was killed by SIGKILL (out of memory?); restart 1 of 1" in started.output
    assert trial.outcome() == undisturbed()


def test_a_further_run_needs_all_ranks(trial: Trial) -> None:
    """The first of two runs continues after a death. The second one begins in a new start."""
    started = trial.run("launch", 3, (), "--heal", "--max-restarts", "1", script=FOLDS)
    assert started.output.count("ranks 0 and 2 -> ranks 0 and 1") == 1
    assert started.output.count("restart 1 of 1") == 1
    first, second = [read_rows(trial.dir / fold) for fold in "01"]
    assert len(first) == 6
    assert first == second


ADVICE = ": --max-restarts N starts again from the newest snapshot"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--check-compute-every", "5"], "--heal does not support check_compute_every"),
        (["--shard", "optimizer"], "dies with it; shard_copies=2 would let the others continue): if a rank dies, all"),
    ],
    ids=["check_compute_every", "shard"],
)
def test_what_it_does_not_support(trial: Trial, undisturbed: Undisturbed, flags: Sequence[str], reason: str) -> None:
    """The run prints so at its beginning. After a death all ranks start again."""
    started = trial.run("launch", 2, "kill rank 1 at step 7 in forward", "--heal", *flags, "--max-restarts", "1")
    assert reason in started.output
    assert "samestep: the other ranks do not continue, because " in started.output
    assert len(read_restarts(trial.dir)) == 1
    assert trial.outcome() == undisturbed()


COLLECTIVE = """
import os, signal, torch, samestep
run = samestep.Run("run", batch_size=4, micro_batch_size=1)
model = torch.nn.Linear(2, 1)
run.prepare(model=model)
for step in run.steps(torch.ones(16, 2), 3):
    for x in step:
        step.backward(model(x).mean())
    if run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()
"""


def test_a_death_in_a_collective_of_the_script(trial: Trial) -> None:
    """It is not repeated. (What a script keeps from pass to pass is in the simulated runs.)"""
    script = trial.faults / "collective.py"
    script.write_text(COLLECTIVE)
    started = trial.run("launch", 3, (), "--heal", script=script, code=137)
    assert f"do not continue, because they have not formed a new group{ADVICE}" in started.output


def test_an_interrupt_that_the_script_raises(trial: Trial) -> None:
    """It is an error of the script, which would occur again, and no death."""
    script = trial.faults / "interrupt.py"
    script.write_text(COLLECTIVE.replace("os.kill(os.getpid(), signal.SIGKILL)", "raise KeyboardInterrupt"))
    started = trial.run("launch", 3, (), "--heal", script=script, code=130)
    assert "    raise KeyboardInterrupt\nKeyboardInterrupt\n" in started.output
    assert "samestep: rank 1 of 3 failed; the others were stopped\n" in started.output


# --- stuck ranks ------------------------------------------------------------------------------------------------------

STUCK_AFTER_S = 3  # no rank is named before a third of it
LIMIT = {"SAMESTEP_STUCK_AFTER_S": str(STUCK_AFTER_S)}
DATA = torch.ones(48, 4)


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def skip_a_collective() -> None:
    dist.all_reduce(torch.ones(1))


def leave_the_loop() -> None:
    raise ValueError


# The fault, its rank, and the expected message.
STUCK = [
    (leave_the_loop, 1, r"rank 1 \(host \S+\) has been outside the loop for \d+ s at step 6, "
     r"test_dead_ranks\.py:\d+ in train; rank 0 waits for it in the reduction"),
    (stop_itself, 1, r"nothing was heard of rank 1 .*SIGSTOP\); rank 0 waits for it in the reduction"),
    (skip_a_collective, 0, r"the ranks have waited for each other for \d+ s: .*rank 0 \(host \S+\) in all_reduce "
     r"\(test_dead_ranks\.py:\d+ in skip_a_collective\) at step 6"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "rank", "words"), STUCK)
def test_a_stuck_rank_is_named(
    tmp_path: Path, fault: Any, rank: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def then(tiny: Tiny) -> None:
        if (tiny.step.number, tiny.run.rank) == (6, rank):
            fault()
        update(tiny)

    def train() -> None:
        tiny = Tiny(tmp_path)
        with suppress(ValueError):
            tiny.train(data=DATA, num_steps=12, then=then)
        time.sleep(60)  # as a server of the trained model would; the test fails before

    with pytest.raises(RuntimeError, match=words):
        samestep.spawn(train, 2, env=LIMIT)
    said = capfd.readouterr().err
    named = [line for line in said.splitlines() if re.search(words, line)]
    assert len(named) == 1, f"one line on the terminal, whichever ranks' output is hidden: {said}"
    status = read_status(tmp_path)
    assert status["status"] == "failed"
    assert re.match(words, status["reason"])


def train_slowly(run_dir: Path) -> None:
    """Train with a first step, validations and snapshots that take longer than the time until a rank is named. A
    snapshot takes longer than the time until the run would end, and its file grows.
    """
    tiny = Tiny(run_dir)
    location = tiny.run._context.location
    prepare: Any = location.prepare

    def prepare_slowly(*arguments: Any) -> Any:
        with open(run_dir / "slow.tmp" if tiny.run.rank == 0 else os.devnull, "wb", 0) as file:
            for _ in range(10 * (STUCK_AFTER_S + 2)):
                time.sleep(0.1)
                file.write(bytes(1 << 18))
        return prepare(*arguments)

    def score(x: Tensor) -> dict[str, Any]:
        time.sleep(0.4)
        return {"loss": tiny.model(x).mean()}

    location.prepare = prepare_slowly
    tiny.train(
        1, data=DATA, before=lambda t: t.step.number or time.sleep(1.2),
        after_epoch=lambda t: t.run.evaluate(score, DATA[:16]),
    )  # fmt: skip


def test_a_slow_run_continues(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    samestep.spawn(train_slowly, 2, (tmp_path,), env=LIMIT)
    said = capfd.readouterr()
    assert said.err == ""
    assert re.search(r"time +.*%", said.out), "the shares of the time, in the table at the end"
    assert not (tmp_path / "ranks.json").exists()


# --- what processes that are not ranks can make ranks do to others ----------------------------------------------------


@pytest.mark.parametrize("is_of_another_user", [False, True])
def test_a_rank_kills_no_other_process(is_of_another_user: bool) -> None:
    if is_of_another_user and os.geteuid() != 0:
        pytest.skip("needs root, to be two users")
    with subprocess.Popen(["sleep", "1000"], user=65534 if is_of_another_user else None) as child:
        if not is_of_another_user:
            for pid in (child.pid, os.getppid(), 2**22 + 1):
                kill_sibling(pid)
        elif (sibling := os.fork()) == 0:
            kill_sibling(child.pid)
            os._exit(0)
        else:
            os.waitpid(sibling, 0)
        assert child.poll() is None
        child.kill()
