"""How runs end: SIGTERM, Ctrl-C and `run.stop` complete and save the step, nothing is lost, and there is no traceback.
Also unusual ends: forked processes, ranks that leave early, runs without a reference.
"""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest
import torch
from promises.trial import HELD, Trial, Undisturbed, resume_is_from
from support.runs import check, find_tests, run_command
from support.tiny import Pairs, Tiny, update
from support.waiting import wait_until

import samestep
from samestep import console
from samestep.world import group

# --- other ways to start it -------------------------------------------------------------------------------------------


# torchrun and its ranks are new interpreters that import torch: 6 s, and 18 s on a busy machine.
def test_signal_to_torchrun(trial: Trial, undisturbed: Undisturbed) -> None:
    """torchrun has its own exit code and output. The run is saved, also if a scheduler signals the ranks too."""
    torchrun = trial.start("torchrun", 2, HELD)
    trial.wait_held()
    torchrun.send_signal(signal.SIGTERM)
    wait_until(lambda: "a second one ends at once" in torchrun.output, "rank 0 prints that it has got the signal")
    os.kill(trial.pid(0), signal.SIGTERM)
    trial.go_on()
    torchrun.finish()
    assert trial.snapshots[-1] == "step-00000008"
    assert resume_is_from(trial.run("torchrun", 2, HELD).output) == 8
    assert trial.num_ends == 1
    assert trial.outcome() == undisturbed()


def check_handlers(directory: Path) -> None:
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


def run_plainly(fn: Callable[[Path], None], directory: Path) -> CompletedProcess[str]:
    """Call a function of this module in plain python, which starts no ranks and is no pytest."""
    code = f"from pathlib import Path; from promises.test_ends import {fn.__name__} as fn; fn(Path())"
    done = run_command(sys.executable, "-c", code, cwd=directory, env={"PYTHONPATH": find_tests()})
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_signal_handlers_of_plain_python(tmp_path: Path) -> None:
    assert "the loop was left by break" in check(run_plainly(check_handlers, tmp_path), 2).stderr


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
    launch.send_signal(signal.SIGINT)
    assert launch.finish(60) == 130


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
    assert trial.spawn(2, f"stop all ranks at step {step} in {moment}", snapshot_every=every) == trial.dir
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


# --- processes forked by the script -----------------------------------------------------------------------------------


FORK_CODES = {"exit": 0, "raise": 1, "signal": -signal.SIGTERM}


def fork(how: str) -> int:
    """Forks a process that ends as Python programs do. Returns its exit code."""
    pid = os.fork()
    if pid == 0:
        if how == "raise":
            raise ValueError("in the child")
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def train(run_dir: Path, *hows: str, num_workers: int = 0) -> None:
    """A run that forks before its loop and in its third step."""
    tiny = Tiny(run_dir, snapshot_every=None, log_every=1)
    if "exit" in hows:
        assert fork("exit") == 0
        assert (run_dir / "lock").exists()

    def then(t: Tiny) -> None:
        update(t)
        if hows and t.step.number == 2:
            assert [fork(how) for how in hows] == [FORK_CODES[how] for how in hows]
            assert (run_dir / "lock").exists()

    tiny.train(then=then, num_workers=num_workers)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_forked_processes(tmp_path: Path, num_ranks: int) -> None:
    """They are not part of the run: they write nothing, remove nothing, and end as without a run."""
    samestep.spawn(train, num_ranks, (tmp_path / "lone" / "x",))
    samestep.spawn(train, num_ranks, (tmp_path / "x", *FORK_CODES), {"num_workers": 1})
    for name in ("metrics.jsonl", "ledger.bin"):
        assert (tmp_path / "x" / name).read_bytes() == (tmp_path / "lone" / "x" / name).read_bytes()


# --- ranks that leave early -------------------------------------------------------------------------------------------


def test_a_run_that_one_rank_creates_later(tmp_path: Path) -> None:
    """The first rank prints what it waits for: the other one may never create the run."""
    said = tmp_path / "said"

    def train() -> str:
        Tiny(tmp_path / "x").train(num_steps=1)
        if os.environ["RANK"] == "0":
            group.PATIENCE_S, console.say = 0.1, said.write_text  # type: ignore[assignment]
        else:
            wait_until(said.exists, "rank 0 has waited")
        Tiny(tmp_path / "y")
        return said.read_text()

    sentence = samestep.spawn(train, 2)
    assert sentence.startswith("rank 0 has waited 0.1 s in samestep.Run for the other ranks: create each Run on every")


# --- the cells of a notebook ------------------------------------------------------------------------------------------

CELL = """
run = samestep.Run(directory, batch_size=8, micro_batch_size=2, snapshot_every=2, device="cpu")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.prepare(model=model, optimizer=optimizer)
for epoch in run.epochs(Pairs(), 3, num_workers=1):
    for step in epoch:
        for x, y in step:
            step.backward((model(x) - y).square().mean())
        if step.number % 3 == 2:
            interrupt()
        optimizer.step()
"""


def interrupt() -> None:
    raise KeyboardInterrupt


def run_cells(tmp_path: Path) -> None:
    names: dict[str, Any] = {"samestep": samestep, "torch": torch, "Pairs": Pairs}

    def run_cell(directory: Path | None, interrupt: Callable[[], object]) -> list[object]:
        """As a notebook does, which keeps the traceback. Returns what the process has open."""
        names.update(directory=directory, interrupt=interrupt)
        try:
            exec(CELL, names)
        except BaseException as error:
            sys.last_value, sys.last_traceback = error, error.__traceback__
        gc.collect()
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
        return [*threading.enumerate(), *multiprocessing.active_children(), *handlers, len(os.listdir("/proc/self/fd"))]

    open_at_rest = run_cell(None, lambda: None)
    for directory in (None, tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        run_cell(directory, lambda: os.kill(os.getpid(), signal.SIGINT))
        run_cell(directory, interrupt)
    assert run_cell(None, lambda: None) == open_at_rest


def test_an_interrupted_cell_leaves_nothing_open(tmp_path: Path) -> None:
    """A later run closes what it has left: threads, workers, files, the lock and the handlers of signals."""
    run_plainly(run_cells, tmp_path)
