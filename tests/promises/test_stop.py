"""SIGTERM, Ctrl-C and `run.stop`: the step is completed and saved, nothing is lost, and there is no traceback."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from promises.faulty import DEADLINE_S
from promises.trial import Outcome, Started, Trial, resume_is_from
from support.runs import check, run_command
from support.tiny import Pairs, Tiny
from support.waiting import wait_until

Undisturbed = Callable[..., Outcome]

HELD = "hold rank 0 at step 7 in forward"
CODES = {signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGINT: 130}


def assert_stopped(trial: Trial, stopped: Started, step: int) -> None:
    """The run has saved after `step`, and printed only that."""
    assert f"stopped by a signal after step {step}, saved in {trial.dir}" in stopped.output
    assert "Traceback" not in stopped.output
    assert stopped.err.read_text() == ""
    assert trial.snapshots[-1] == f"step-{step:08d}"
    assert trial.num_ends == 0, "code after the loop does not run after a preemption"


def assert_goes_on(trial: Trial, undisturbed: Undisturbed, then: Started, step: int) -> None:
    """The same command has resumed from `step`, and ended as a run without faults."""
    assert resume_is_from(then.output) == step
    assert trial.num_ends == 1
    assert trial.outcome() == undisturbed()


# --- the launcher -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR1])
def test_signal_to_the_launcher(trial: Trial, undisturbed: Undisturbed, signum: signal.Signals) -> None:
    """In the middle of an epoch, with DataLoader workers."""
    arguments = ["--num-workers", "1"]
    launch = trial.start("launch", 2, HELD, arguments=arguments)
    trial.wait_held()
    trial.tell(launch, signum)
    trial.go_on()
    assert launch.wait() == CODES[signum]
    status = json.loads((trial.dir / "status.json").read_text())
    assert (status["status"], status["reason"]) == ("stopped", f"stopped by {signum.name}")
    assert_stopped(trial, launch, step=8)
    assert_goes_on(trial, undisturbed, trial.run("launch", 2, HELD, arguments=arguments), step=8)


# --- other ways to start it -------------------------------------------------------------------------------------------


# torchrun and its ranks are new interpreters that import torch: 6 s, and 18 s on a busy machine.
def test_signal_to_torchrun(trial: Trial, undisturbed: Undisturbed) -> None:
    """torchrun has its own exit code and output. The run is saved, also if a scheduler signals the ranks too."""
    torchrun = trial.start("torchrun", 2, HELD)
    trial.wait_held()
    trial.tell(torchrun, signal.SIGTERM)
    os.kill(trial.pid(0), signal.SIGTERM)
    trial.go_on()
    torchrun.wait()
    assert trial.snapshots[-1] == "step-00000008"
    assert_goes_on(trial, undisturbed, trial.run("torchrun", 2, HELD), step=8)


def check_handlers(directory: Path) -> None:
    """To be run by plain python."""
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    caught: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: caught.append(number))
    first, second = Tiny(directory / "first"), Tiny(directory / "second")
    assert signal.getsignal(signal.SIGINT) is before[0], "Ctrl-C is a request in a loop only"
    assert signal.getsignal(signal.SIGTERM) is not before[1]
    first.train(num_steps=1)
    second.train(num_steps=1)  # its handlers lay on those of the first run, which has ended
    os.kill(os.getpid(), signal.SIGUSR1)
    assert caught == [signal.SIGUSR1]
    third = Tiny(directory / "third")
    Tiny(directory / "fourth")
    with pytest.raises(SystemExit, match="75"):  # the signal concerns both, and the third is in its loop
        third.train(num_steps=3, then=lambda tiny: tiny.step.number or os.kill(os.getpid(), signal.SIGTERM))
    third = Tiny(directory / "fifth")
    for _ in third.run.steps(Pairs(), 2):
        assert signal.getsignal(signal.SIGINT) is not before[0]
        break
    assert signal.getsignal(signal.SIGINT) is before[0]


def test_signal_handlers_of_plain_python(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from promises.test_stop import check_handlers as check; "
    env = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
    done = run_command(sys.executable, "-c", f"{code}check(Path(sys.argv[1]))", tmp_path, cwd=tmp_path, env=env)
    assert "Traceback" not in done.stderr, done.stderr
    assert "the loop was left by break" in check(done, 2).stderr


# A new interpreter imports torch: 32 s, and 71 s on a busy machine.
def test_ctrl_c_outside_of_the_loop_ends_with_130(tmp_path: Path) -> None:
    """Python itself would end with 1 here: it forgets the KeyboardInterrupt when it evaluates a text at its end."""
    code = (
        "import atexit, os, samestep, signal, time\n"
        "samestep.Run('run', batch_size=4, micro_batch_size=2)\n"
        "atexit.register(lambda: print('closed', eval('1 + 1')))\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(300)\n"
    )
    done = run_command(sys.executable, "-c", code, cwd=tmp_path, real=True)
    assert (done.returncode, done.stdout) == (130, "closed 2\n"), done.stderr
    assert done.stderr.endswith("\nKeyboardInterrupt\n")


def test_ctrl_c_while_ranks_join(trial: Trial) -> None:
    """Rank 0 waits in torch for rank 1, which Ctrl-C ends before its run begins."""
    script = trial.faults / "train.py"
    script.write_text(
        "import os, pathlib, time, samestep\n"
        "pathlib.Path('pid' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "if os.environ['RANK'] == '1':\n"
        "    time.sleep(300)\n"
        "samestep.Run('run', batch_size=4, micro_batch_size=2)\n"
    )
    launch = trial.start("launch", 2, script=script)

    def waits(rank: int) -> bool:
        """Whether the rank sleeps each time in a fifth of a second."""
        pid = int((trial.faults / f"pid{rank}").read_text() or 1)
        return all(psutil.Process(pid).status() == "sleeping" and not time.sleep(0.01) for _ in range(20))

    for rank in range(2):
        wait_until((trial.faults / f"pid{rank}").exists, f"rank {rank} starts")
        wait_until(lambda: waits(rank), f"rank {rank} waits")  # noqa: B023
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait(DEADLINE_S) == 130


# --- run.stop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("moment", "step", "stops_at", "every"), [
    ("forward", 7, 8, "1epochs"),
    ("validation", 5, 5, "2epochs"),
])  # fmt: skip
def test_run_stop(
    trial: Trial, undisturbed: Undisturbed, capfd: pytest.CaptureFixture[str], moment: str, step: int, stops_at: int,
    every: str,
) -> None:  # fmt: skip
    """The loop ends, and the code after it runs. The same command does not continue training, except with that step."""
    fault = f"stop all ranks at step {step} in {moment}"
    assert trial.spawn(2, fault, snapshot_every=every) == trial.dir
    printed = capfd.readouterr().out
    assert f"stopped at step {stops_at}: by a fault" in printed
    assert trial.num_ends == 1
    assert f"step-{stops_at:08d}" in trial.snapshots
    before = (trial.dir / "ledger.bin").read_bytes()
    trial.spawn(3, snapshot_every=every)
    printed = capfd.readouterr().out
    assert trial.num_ends == 2
    assert (trial.dir / "ledger.bin").read_bytes() == before
    assert (
        f"run.stop() has ended it after step {stops_at}, and the script continues after it; to train it longer, "
        f"start with SAMESTEP_RESUME={stops_at} in the environment, or begin anew" in printed
    )
    assert f"stopped at step {stops_at}: by a fault" in printed
    trial.spawn(3, snapshot_every=every, resume=stops_at)
    assert resume_is_from(capfd.readouterr().out) == stops_at
    assert trial.num_ends == 3
    assert trial.outcome() == undisturbed()
