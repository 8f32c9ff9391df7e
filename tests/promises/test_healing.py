"""With `samestep launch --heal`, a run continues without the ranks that die, to the same end, from the same step."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from promises.trial import Trial, Undisturbed, read_restarts
from support.runs import read_rows

from samestep.watch.records import read_status

FOLDS = Path(__file__).with_name("folds.py")


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
    ("stuck", "dead"),
    [
        ("freeze rank 0 at step 7 in forward", "kill rank 2 at step 7 in forward"),
        ("freeze rank 0 at step 0 in regrouping", "kill rank 2 at step 7 in forward"),
        ("hold rank 2 at step 7 in forward", "kill rank 0 at step 3 in forward"),  # it is rank 1 of its group then
    ],
)
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
        (["--shard", "optimizer"], '--heal does not support shard="optimizer" (a rank'),
    ],
    ids=["check_compute_every", "shard"],
)
def test_what_it_does_not_support(trial: Trial, undisturbed: Undisturbed, flags: Sequence[str], reason: str) -> None:
    """The run prints so at its beginning. After a death all ranks start again."""
    fault = "kill rank 1 at step 7 in forward"
    started = trial.run("launch", 2, fault, "--heal", *flags, "--max-restarts", "1")
    assert f"samestep: {reason}" in started.output
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
