"""Runs under Slurm: the tasks of srun as ranks, and `samestep submit` with the events of a job."""

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from promises.test_restarts import flags_of
from promises.trial import SCRIPT, Outcome, Started, Trial
from support.commands import find_programs
from support.selection import one_in
from support.slurm import Cluster, open_cluster, why_not
from support.waiting import DEADLINE_S, wait_until

from samestep.launch.sbatch import FIRST_PORT, NUM_PORTS
from samestep.launch.target import Target
from samestep.tools.scale.run_scale import estimate_queue_s

Undisturbed = Callable[..., Outcome]
HELD = "hold rank 0 at step 7 in forward"


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
        self.python = find_programs() / "python"
        self._started: list[Started] = []

    def start(self, *words: str | Path, **variables: str) -> Started:
        """Starts a command with the variables of the cluster."""
        output = self.trial.faults / f"job-{len(self._started)}"
        started = Started(words, output, {**self.cluster.variables, **variables})
        self._started.append(started)
        return started

    def submit(self, *flags: str | Path, fault: str = HELD, **variables: str) -> Started:
        """Two nodes with a rank each, followed."""
        run_dir = self.trial.dir
        return self.start(
            self.python, "-m", "samestep", "submit", "--nodes", "2", "--run-dir", run_dir, *flags,
            SCRIPT, run_dir, *flags_of(*([fault] if fault else [])), **variables,
        )  # fmt: skip

    def wait_held(self, started: Started) -> None:
        """Waits until the fault holds rank 0."""
        held = self.trial.faults / "held-0"
        wait_until(lambda: held.exists() or started.process.poll() is not None, "rank 0 is held")
        assert held.exists(), started.output

    def go_on_signalled(self) -> None:
        """Let rank 0 continue once a signal has reached it, which is after scancel has returned."""
        wait_until(lambda: (self.trial.faults / "heard-0").exists(), "the signal reaches rank 0")
        self.trial.go_on()

    def number(self, started: Started) -> str:
        started.wait_for_words("submitted job")
        return re.findall(r"submitted job (\d+)", started.output)[0]

    def close(self) -> None:
        for started in self._started:
            started.close()
        self.cluster.wait_idle()


@pytest.fixture
def jobs(trial: Trial, cluster: Cluster) -> Iterator[Jobs]:
    opened = Jobs(trial, cluster)
    yield opened
    opened.close()


def finish(started: Started, code: int = 0) -> str:
    """Waits for the end with exit code `code`. Returns the output."""
    found = started.wait()
    assert found == code, f"{found}, not {code}:\n{started.output}"
    return started.output


# Prints the place that a process reads from the variables of Slurm.
PLACE = """
from samestep.world.environment import read_environment, read_master
e = read_environment()
place = e.launcher, e.rank, e.world_size, e.local_rank, e.local_world_size
print(*place, *(read_master() if e.world_size > 1 else ()))
"""


def read_places(output: str) -> list[list[str]]:
    return sorted(line.split() for line in output.splitlines() if line.startswith(("srun", "python")))


# --- srun -------------------------------------------------------------------------------------------------------------


# Two jobs of Slurm, with six programs in all: 14 s, and 16 s on a busy machine.
def test_places(jobs: Jobs) -> None:
    """Each task of a step is a rank. A process that a job starts without srun is alone and waits for no other."""
    said = finish(jobs.start("salloc", "-N2", "-n3", "bash", "-c", 'srun "$@"; "$@"', "-", jobs.python, "-c", PLACE))
    alone, *tasks = read_places(said)
    assert alone == ["python", "0", "1", "0", "1"]
    assert [task[:5] for task in tasks] == [
        ["srun", "0", "3", "0", "2"],
        ["srun", "1", "3", "1", "2"],
        ["srun", "2", "3", "0", "1"],
    ]
    (meeting,) = {tuple(task[5:]) for task in tasks}
    assert meeting[0] == "127.0.0.1", "only Slurm knows the name n1: its address"
    assert 15000 <= int(meeting[1]) < 32000
    batch = jobs.trial.faults / "batch"
    wrapped = f"{jobs.python} -c '{PLACE}'; srun -n1 {jobs.python} -c '{PLACE}'"
    finish(jobs.start("sbatch", "-n2", "--wait", f"--output={batch}", f"--wrap={wrapped}"))
    assert read_places(batch.read_text()) == [alone, alone]


@pytest.mark.parametrize(("num_tasks", "shares"), one_in(4, [(2, "2 ranks: 2+2"), (3, "3 ranks: 2+1+1")]))
def test_tasks_are_ranks(jobs: Jobs, trial: Trial, undisturbed: Undisturbed, num_tasks: int, shares: str) -> None:
    """Without a launcher of samestep, on two nodes, with equal or unequal shares."""
    python = jobs.python if num_tasks == 2 else sys.executable
    said = finish(jobs.start("srun", "-N2", f"-n{num_tasks}", python, SCRIPT, trial.dir))
    assert f"on {shares}" in said
    assert trial.outcome() == undisturbed()


def test_a_task_fails(jobs: Jobs, trial: Trial) -> None:
    """Its error is printed. The other tasks end with one line each."""
    fault = "raise rank 1 at step 7 in forward"
    said = finish(jobs.start("srun", "-N2", "-n2", jobs.python, SCRIPT, trial.dir, *flags_of(fault)), 1)
    assert f"RuntimeError: a fault: {fault}" in said
    assert "samestep: rank 0 has lost another rank" in said
    assert said.count("Traceback") == 1
    trial.note_strike(fault)


# Two jobs of Slurm, each on two nodes: 13 s, and 22 s on a busy machine.
@pytest.mark.parametrize("name", one_in(4, ["TERM", "USR1"]))
def test_tasks_are_signalled(jobs: Jobs, trial: Trial, undisturbed: Undisturbed, name: str) -> None:
    """As before a time limit, with loader workers that get the signal too: all ranks save and end without an error."""
    words = ["srun", "-N2", "-n2", "--job-name=signalled", jobs.python, SCRIPT, trial.dir]
    started = jobs.start(*words, *flags_of(HELD), "--num-workers", "1")
    jobs.wait_held(started)
    jobs.cluster.run("scancel", f"--signal={name}", "--name=signalled")
    jobs.go_on_signalled()
    assert f"SIG{name}: the run stops and saves within a step\n" in finish(started)
    assert trial.num_ends == 0
    finish(jobs.start(*words))
    assert trial.outcome() == undisturbed()


def test_port_in_use(jobs: Jobs, trial: Trial) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        words = ["srun", "-n2", f"--export=ALL,MASTER_PORT={port}", "--kill-on-bad-exit=1"]
        started = jobs.start(*words, jobs.python, SCRIPT, trial.dir)
        started.wait()
    said = [line for line in started.output.splitlines() if line.startswith("samestep: error: ")]
    assert said == [
        f"samestep: error: port {port} is in use here: set MASTER_PORT to a free one, the same for all ranks [SS509]"
    ]


# --- the doctor -------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_doctor_on_all_tasks(jobs: Jobs, trial: Trial) -> None:
    """The tasks of srun are its ranks, on both nodes. In the shell of an allocation it prints what it left out."""
    words = [jobs.python, "-m", "samestep", "doctor", "--device", "cpu", "--run-dir", trial.dir, "--json"]
    tasks, alone = jobs.start("srun", "-N2", "-n2", *words), jobs.start("salloc", "-N2", "-n2", *words)
    finish(tasks)
    report = json.loads(tasks.out.read_text())
    assert report["world_size"] == 2
    assert [finding["check"] for finding in report["findings"] if finding["status"] == "fail"] == []
    curves = next(f["measured"]["curves"] for f in report["findings"] if f["check"] == "collectives")
    assert list(curves) == ["all-reduce", "all-gather", "all-to-all"]
    finish(alone)
    assert json.loads(alone.out.read_text())["world_size"] == 1
    hint = "samestep doctor: this job has 2 nodes, and only this one is checked: srun samestep doctor checks all\n"
    assert hint in alone.err.read_text()
    assert not trial.dir.exists()


# --- submit -----------------------------------------------------------------------------------------------------------


# Slurm waits before it starts a job that was queued again: 16 s, and 23 s on a busy machine.
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_job_is_queued_again(jobs: Jobs, trial: Trial, undisturbed: Undisturbed, real: bool) -> None:
    """After a signal it saves, is queued again, and ends as a run without faults. The output of all starts is shown."""
    if real:
        jobs.python = Path(sys.executable)
    started = jobs.submit()
    jobs.wait_held(started)
    number = jobs.number(started)
    jobs.cluster.run("scancel", "--signal=USR1", number)
    jobs.go_on_signalled()
    said = finish(started)
    assert "samestep: 4 micro-batches on 2 ranks: 2+2, 100 % busy\n" in started.out.read_text()
    assert "resumed at step 8" in started.out.read_text()
    # A start that ends between two queries of the state is seen only while it is pending.
    assert f"samestep: job {number} is running on n[1-2]\n" in said
    assert re.search(rf"samestep: job {number} is (running on n\[1-2\]|pending \(\w+\)), start 2\n", said)
    assert said.count("samestep: ranks 0 on ") == 2, "once per start, though each node has a launcher"
    assert trial.num_ends == 1
    assert {path.name for path in (trial.dir / "slurm").iterdir()} == {f"{number}.sbatch", f"{number}.out"}
    assert trial.outcome() == undisturbed()


def test_a_job_without_progress(jobs: Jobs, trial: Trial) -> None:
    """Stopped for the third time before its first step, it is not queued again, and prints why, on both nodes."""
    for _ in range(2):
        trial.preempt_at_start()
    started = jobs.submit(fault="hold rank 0 at step 0 in start")
    jobs.wait_held(started)
    number = jobs.number(started)
    jobs.cluster.run("scancel", "--signal=USR1", number)
    jobs.go_on_signalled()
    said = finish(started, 2)
    assert "samestep: error: 3 starts in a row were stopped before they had saved more than step 0: " in said
    assert f"samestep: job {number} has ended: failed, exit code 2:0\n" in said
    assert jobs.cluster.show(number)["Restarts"] == "0"


# Slurm waits before it starts a job that was queued again, and looks at time limits every 30 s.
def test_time_limit(jobs: Jobs, trial: Trial, undisturbed: Undisturbed) -> None:
    """Slurm sends a signal before the limit: once the ranks train, the limit is changed to less than the grace time."""
    started = jobs.submit("--time", "60", "--grace-s", "600", "--heal")  # a shell passes the signal on
    jobs.wait_held(started)
    number = jobs.number(started)
    jobs.cluster.run("scontrol", "update", f"jobid={number}", "timelimit=9")
    wait_until(lambda: (trial.faults / "heard-0").exists(), "the signal reaches rank 0")
    jobs.cluster.run("scontrol", "update", f"jobid={number}", "timelimit=60")  # of the next start
    trial.go_on()
    assert "SIGUSR1: the run stops" in finish(started)
    assert int(jobs.cluster.show(number)["Restarts"]) >= 1
    assert trial.outcome() == undisturbed()


# Slurm waits before it starts a job that was queued again, and before it uses a node that has failed: 10 s in all.
def test_a_node_fails(jobs: Jobs, trial: Trial, undisturbed: Undisturbed) -> None:
    """The job loses what came after the newest snapshot, and waits for two nodes again."""
    started = jobs.submit("--snapshot-every", "2")
    jobs.wait_held(started)
    wait_until(lambda: "step-00000006" in trial.snapshots, "it has saved")
    jobs.cluster.fail("n2")
    for rank in (0, 1):  # Slurm would wait for them to end
        os.kill(trial.pid(rank), signal.SIGKILL)
    started.wait_for_words("is pending (")
    jobs.cluster.repair("n2")
    trial.go_on()
    assert "resumed at step 6" in finish(started)
    assert trial.outcome() == undisturbed()


def test_the_others_continue_without_a_rank(jobs: Jobs, trial: Trial, undisturbed: Undisturbed) -> None:
    fault = "kill rank 1 at step 7 in forward"
    started = jobs.submit("--heal", fault=fault)
    said = finish(started)
    assert "rank 1 was killed by SIGKILL" in said
    assert "rank 1 is gone in step 7: rank 0 continues alone" in said
    assert not (trial.dir / "restarts.jsonl").exists()
    assert trial.outcome() == undisturbed()


# On this machine, a launcher of any node could become the rendezvous. So the others wait for that of the first node.
PROLOG = f"""\
#!/bin/bash
if [ "$SLURM_NODEID" != 0 ]; then
  until (echo > /dev/tcp/127.0.0.1/$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))) 2>/dev/null; do sleep 0.1; done
fi
"""


def test_the_others_continue_without_a_node(jobs: Jobs, trial: Trial, undisturbed: Undisturbed) -> None:
    """Slurm lets the job continue, and reports its success."""
    prolog = trial.faults / "prolog.sh"
    prolog.write_text(PROLOG)
    prolog.chmod(0o755)
    started = jobs.submit("--heal", SLURM_TASK_PROLOG=str(prolog))
    jobs.wait_held(started)
    jobs.cluster.fail("n2")
    started.wait_for_words("rank 1 was lost with ")
    trial.go_on()
    finish(started)
    jobs.cluster.repair("n2")
    assert not (trial.dir / "restarts.jsonl").exists()
    assert trial.outcome() == undisturbed()


@pytest.mark.soak
def test_array(jobs: Jobs, trial: Trial) -> None:
    """A run for each task. One gets a signal, and only it is queued again. The worst exit code is that of the job."""
    script = trial.faults / "script.py"
    script.write_text(ARRAY)
    words = ["-m", "samestep", "submit", "--array", "3,5", "--run-dir", trial.dir]
    started = jobs.start(jobs.python, *words, script, trial.faults)
    held = [trial.faults / f"held-{task}" for task in (3, 5)]
    wait_until(lambda: all(path.exists() for path in held), "both are at it")
    number = jobs.number(started)
    jobs.cluster.run("scancel", "--signal=USR1", f"{number}_5")
    wait_until(lambda: (trial.faults / "heard-5").exists(), "it has heard")
    trial.go_on()
    said = finish(started, 7)
    assert f"samestep: job {number}_3 has ended: failed, exit code 7:0\n" in said
    assert "[3] 3 at step 0\n" in said
    assert "[5] 5 at step 0\n" in said
    assert "[5] 5 at step 1\n" in said
    assert said.count("[3] 3 at step") == 1
    assert {path.name for path in trial.dir.iterdir()} == {"3", "5", "slurm"}


ARRAY = """
import os, sys, time
from pathlib import Path
import torch, samestep
task, directory = os.environ["SLURM_ARRAY_TASK_ID"], Path(sys.argv[1])
run = samestep.Run("no directory of its own", batch_size=2, micro_batch_size=1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.prepare(model=model, optimizer=optimizer)
print(task, "at step", run.steps_done)
for step in run.steps(torch.utils.data.TensorDataset(torch.ones(4, 1)), 3):
    for (x,) in step:
        step.backward(model(x).sum())
    optimizer.step()
    (directory / f"held-{task}").touch()
    while not (directory / "go").exists():
        if run._services.stopping.signals.heard:
            (directory / f"heard-{task}").touch()
        time.sleep(0.01)
sys.exit(7 if task == "3" else 0)
"""


def test_cancelled(jobs: Jobs, trial: Trial) -> None:
    """Ctrl-C in the command that shows the output does not end the job; scancel does, and the job has saved."""
    started = jobs.submit()
    jobs.wait_held(started)
    number = jobs.number(started)
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(DEADLINE_S) == 130
    output = trial.dir / "slurm" / f"{number}.out"
    assert f"samestep: job {number} continues; to follow it again: tail -F {output}" in started.output
    assert jobs.cluster.show(number)["JobState"] == "RUNNING"
    jobs.cluster.run("scancel", number)
    jobs.go_on_signalled()
    jobs.cluster.wait_idle()
    assert jobs.cluster.show(number)["JobState"] == "CANCELLED"
    assert jobs.cluster.show(number)["Restarts"] == "0"


def test_followed_and_cancelled(jobs: Jobs, trial: Trial) -> None:
    started = jobs.submit()
    jobs.wait_held(started)
    number = jobs.number(started)
    jobs.cluster.run("scancel", number)
    jobs.go_on_signalled()
    assert f"samestep: job {number} has ended: cancelled" in finish(started, 143)
    assert "step-00000008" in trial.snapshots, trial.snapshots


def test_how_it_ends(jobs: Jobs, trial: Trial) -> None:
    """If the script fails, the command has its exit code and the job is not queued again. --detach does not wait."""
    script = trial.faults / "script.py"
    script.write_text("print('as far as this')\nraise SystemExit(7)\n")
    submit = [jobs.python, "-m", "samestep", "submit", "--run-dir", trial.dir]
    started = jobs.start(*submit, script)
    said = finish(started, 7)
    number = jobs.number(started)
    assert "as far as this\n" in started.out.read_text()
    assert f"samestep: job {number} has ended: failed, exit code 7:0\n" in said
    detached = jobs.start(*submit, "--detach", "--sbatch=--begin=now+1hour", script)
    assert detached.process.wait(DEADLINE_S) == 0
    number = jobs.number(detached)
    assert f"samestep: its output: {trial.dir}/slurm/{number}.out\n" in detached.output
    assert jobs.cluster.show(number)["JobState"] == "PENDING"
    jobs.cluster.run("scancel", number)


def test_the_state_of_a_pending_job(jobs: Jobs, trial: Trial) -> None:
    """The time at which it would start, and the reason why it does not."""
    submit = [jobs.python, "-m", "samestep", "submit", "--run-dir", trial.dir]
    estimate = finish(jobs.start(*submit, "--test-only", SCRIPT))
    assert re.match(r"Job \d+ to start at \S+ using 1 processors on nodes n1 in partition main\n", estimate)
    for flags, reason in [
        (["--partition", "gpu"], "the job: invalid partition specified: gpu; "),
        (["--gpus-per-node", "1"], "the job: Invalid generic resource (gres) specification"),
        (["--sbatch=--nonsense"], "unrecognized option '--nonsense'; "),
    ]:
        said = finish(jobs.start(*submit, *flags, SCRIPT), 2)
        assert said.startswith("samestep: error: sbatch refused the job: ")
        assert reason in said
        assert said.count("\n") == 1
    assert not trial.dir.exists()


def test_queue_times_of_scale(jobs: Jobs, trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank would start at once; two ranks on two nodes once the job on one of them has reached its limit.

    What `samestep scale` does with these times is tested in test_scale.py.
    """
    for name, value in {**jobs.cluster.variables, "SLURM_TIME_FORMAT": "relative"}.items():
        monkeypatch.setenv(name, value)
    target = Target("script", str(SCRIPT), [])
    hold = ["--nodelist=n1", "--exclusive", "--time=60", "--output=/dev/null", "--wrap=sleep 600"]
    number = jobs.cluster.run("sbatch", "--parsable", *hold).strip()
    try:
        jobs.cluster.wait_for(number, "RUNNING")
        alone_s, both_s = (estimate_queue_s(target, {"ranks_per_node": 1, "time": "30"}, size) for size in (1, 2))
        scale = [jobs.python, "-m", "samestep", "scale", "--slurm", "--for-steps", "100", "--ranks-per-node", "1"]
        said = finish(jobs.start(*scale, "--world-sizes", "1,3", SCRIPT, trial.dir), 2)
    finally:
        jobs.cluster.run("scancel", number)
    assert alone_s < 60
    assert 3000 < both_s <= 3600
    assert said.startswith("samestep: error: --slurm has no queue time of 3 ranks on 3 nodes: sbatch refused the job: ")
    assert said.count("\n") == 1, "before anything is measured"
    assert not trial.dir.exists()
