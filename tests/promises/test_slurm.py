"""Runs under Slurm: the tasks of srun as ranks, and `samestep slurm` with the events of a job."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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


class Jobs:
    """A run's jobs on a cluster."""

    def __init__(self, trial: Trial, cluster: Cluster) -> None:
        self.trial, self.cluster = trial, cluster
        self._started: list[Started] = []

    def start(self, *words: str | Path, **variables: str) -> Started:
        """Starts a command with the variables of the cluster."""
        output = self.trial.faults / f"job-{len(self._started)}"
        started = Started(words, output, {**self.cluster.variables, **variables})
        self._started.append(started)
        return started

    def submit(self, *flags: str | Path, fault: str = HELD, **variables: str) -> "Job":
        """Submits a job on two nodes with a rank each."""
        run_dir = self.trial.dir
        started = self.start(
            "bash", "-c", '"$@" | sbatch', "bash", sys.executable, "-m", "samestep", "slurm", "--nodes", "2",
            "--run-dir", run_dir, *flags,
            SCRIPT, run_dir, repr({"fault": fault}), **variables,
        )  # fmt: skip
        assert started.wait(DEADLINE_S) == 0, started.output  # without the processes of the job
        (number,) = re.findall(r"Submitted batch job (\d+)", started.output)
        return Job(self, number, run_dir / "slurm" / f"{number}.out")

    def go_on_signalled(self) -> None:
        """Let rank 0 continue once a signal has reached it, which is after scancel has returned."""
        wait_until(lambda: (self.trial.faults / "heard-0").exists(), "the signal reaches rank 0")
        self.trial.go_on()

    def close(self) -> None:
        for started in self._started:
            started.close()
        self.cluster.wait_idle()


@dataclass
class Job:
    """A job of `samestep slurm`, with the file of its output."""

    jobs: Jobs
    number: str
    file: Path

    @property
    def output(self) -> str:
        return self.file.read_text() if self.file.exists() else ""

    def show(self) -> Mapping[str, str]:
        return self.jobs.cluster.show(self.number)

    def signal(self, *flags: str) -> None:
        self.jobs.cluster.run("scancel", *flags, self.number)

    def wait_held(self) -> None:
        """Waits until the fault holds rank 0."""
        held = self.jobs.trial.faults / "held-0"
        wait_until(lambda: held.exists() or self.show()["JobState"] == "FAILED", "rank 0 is held", every_s=ASK_EVERY_S)
        assert held.exists(), self.output

    def finish(self, state: str = "COMPLETED") -> str:
        """Waits until Slurm says that the job has ended so. Returns its output."""
        self.jobs.cluster.wait_for(self.number, state)
        return self.output


@pytest.fixture
def jobs(trial: Trial, cluster: Cluster) -> Iterator[Jobs]:
    opened = Jobs(trial, cluster)
    yield opened
    opened.close()


# --- srun -------------------------------------------------------------------------------------------------------------


def test_tasks_are_ranks(jobs: Jobs, trial: Trial, undisturbed: Undisturbed) -> None:
    """Without a launcher of samestep, on two nodes, with unequal shares."""
    started = jobs.start("srun", "-N2", "-n3", sys.executable, SCRIPT, trial.dir, "{}", **ADDRESS)
    assert started.finish() == 0, started.output
    assert "samestep: 4 micro-batches on 3 ranks, " in started.output
    assert trial.outcome() == undisturbed()


# --- slurm ------------------------------------------------------------------------------------------------------------


# Slurm waits before it starts a job that was queued again: 16 s, and 23 s on a busy machine.
def test_a_job_is_queued_again(jobs: Jobs, trial: Trial, undisturbed: Undisturbed) -> None:
    """After a signal it saves, is queued again, and ends as a run without faults. One file has the output of all."""
    job = jobs.submit()
    job.wait_held()
    job.signal("--signal=USR1")
    jobs.go_on_signalled()
    said = job.finish()
    assert "samestep: 4 micro-batches on 2 ranks, which are 100 % busy\n" in said
    assert "resumed at step 8" in said
    assert job.show()["Restarts"] == "1"
    assert said.count("samestep: ranks 0 on ") == 2, "once per start, though each node has a launcher"
    assert trial.num_ends == 1
    assert [path.name for path in (trial.dir / "slurm").iterdir()] == [f"{job.number}.out"]
    assert trial.outcome() == undisturbed()
