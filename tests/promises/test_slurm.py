"""Runs under Slurm: the tasks of srun as ranks, and `samestep slurm` with the events of a job."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from promises.trial import HELD, SCRIPT, Started, Trial, Undisturbed
from support.slurm import ASK_EVERY_S, Cluster, open_cluster, why_not
from support.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.packages
ADDRESS = {"MASTER_ADDR": "127.0.0.1"}  # the names of the nodes have no addresses


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with open_cluster() as opened:
        yield opened


@pytest.fixture
def start(trial: Trial, cluster: Cluster) -> Iterator[Callable[..., Started]]:
    """Starts a command with the variables of the cluster."""
    started: list[Started] = []

    def start(*words: str | Path, **variables: str) -> Started:
        output = trial.faults / f"job-{len(started)}"
        started.append(Started(words, output, {**cluster.variables, **variables}))
        return started[-1]

    yield start
    for each in started:
        each.kill_all()
    cluster.wait_idle()


# --- srun -------------------------------------------------------------------------------------------------------------


def test_tasks_are_ranks(start: Callable[..., Started], trial: Trial, undisturbed: Undisturbed) -> None:
    """Without a launcher of samestep, on two nodes, with unequal shares."""
    started = start("srun", "-N2", "-n3", sys.executable, SCRIPT, trial.dir, "{}", **ADDRESS)
    assert started.finish() == 0, started.output
    assert "samestep: 4 micro-batches on 3 ranks, " in started.output
    assert trial.outcome() == undisturbed()


# --- slurm ------------------------------------------------------------------------------------------------------------


# Slurm waits before it starts a job that was queued again: 16 s, and 23 s on a busy machine.
def test_a_job_is_queued_again(
    start: Callable[..., Started], trial: Trial, cluster: Cluster, undisturbed: Undisturbed
) -> None:
    """On two nodes with a rank each. After a signal it saves, is queued again, and ends as a run without faults. One
    file has the output of all.
    """
    submitted = start(
        "bash", "-c", '"$@" | sbatch', "bash", sys.executable, "-m", "samestep", "slurm", "--nodes", "2",
        "--run-dir", trial.dir, SCRIPT, trial.dir, repr({"fault": HELD}),
    )  # fmt: skip
    assert submitted.wait(DEADLINE_S) == 0, submitted.output  # without the processes of the job
    (job,) = re.findall(r"Submitted batch job (\d+)", submitted.output)
    output, held = trial.dir / "slurm" / f"{job}.out", trial.faults / "held-0"
    wait_until(lambda: held.exists() or cluster.show(job)["JobState"] == "FAILED", "rank 0 is held", ASK_EVERY_S)
    assert held.exists(), output.read_text()
    cluster.run("scancel", "--signal=USR1", job)
    wait_until((trial.faults / "heard-0").exists, "the signal reaches rank 0")  # after scancel has returned
    trial.go_on()
    cluster.wait_for(job, "COMPLETED")
    said = output.read_text()
    assert "samestep: 4 micro-batches on 2 ranks, which are 100 % busy\n" in said
    assert "resumed at step 8" in said
    assert cluster.show(job)["Restarts"] == "1"
    assert said.count("samestep: ranks 0 on ") == 2, "once per start, though each node has a launcher"
    assert trial.num_ends == 1
    assert [path.name for path in (trial.dir / "slurm").iterdir()] == [f"{job}.out"]
    assert trial.outcome() == undisturbed()
