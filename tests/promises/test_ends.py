"""Unusual ends of runs: forked processes, ranks that leave early, runs without a reference."""

import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import find_tests, run_command
from support.tiny import Pairs, Tiny, update
from support.waiting import wait_until

import samestep
from samestep import console
from samestep.world import group

# --- processes forked by the script -----------------------------------------------------------------------------------


CODES = {"exit": 0, "raise": 1, "signal": -signal.SIGTERM}


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
            assert [fork(how) for how in hows] == [CODES[how] for how in hows]
            assert (run_dir / "lock").exists()

    tiny.train(then=then, num_workers=num_workers)


def assert_alike(run_dir: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "ledger.bin"):
        assert (run_dir / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_forked_processes(tmp_path: Path, num_ranks: int) -> None:
    """They are not part of the run: they write nothing, remove nothing, and end as without a run."""
    samestep.spawn(train, num_ranks, (tmp_path / "lone" / "x",))
    samestep.spawn(train, num_ranks, (tmp_path / "x", *CODES), {"num_workers": 1})
    assert_alike(tmp_path / "x", tmp_path / "lone" / "x")


# --- ranks that leave early -------------------------------------------------------------------------------------------


def test_a_rank_that_leaves_after_its_loop(tmp_path: Path) -> None:
    """The loop is complete, but the script continues."""

    def train() -> None:
        run = Tiny(tmp_path / "x").train().run
        if run.rank == 1:
            os._exit(0)
        run.evaluate(lambda batch: {"one": 1.0}, list(range(8)))

    with pytest.raises(RuntimeError, match="rank 1 has closed its connection"):
        samestep.spawn(train, 2)


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


# --- runs without a reference -----------------------------------------------------------------------------------------


def test_a_snapshot_asked_for_after_the_loop(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    samestep.spawn(lambda: Tiny(tmp_path / "x").train().run.snapshot("best"))
    shown = "".join(capfd.readouterr())
    assert "the snapshot best is not taken: run.snapshot was called outside of a loop" in shown


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
    """To be run by plain python."""
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
    code = "from pathlib import Path; from promises.test_ends import run_cells; run_cells(Path())"
    done = run_command(sys.executable, "-c", code, cwd=tmp_path, env={"PYTHONPATH": find_tests()})
    assert "Traceback" not in done.stderr, done.stderr


# --- loops that the script leaves -------------------------------------------------------------------------------------


def leave(tiny: Tiny, how: str) -> None:
    steps = tiny.run.steps(Pairs(), 8)
    for tiny.step in steps:
        if how == "error" and tiny.step.number == 3:
            raise ValueError("planted")
        tiny.take([tiny.step])
        if how != "error" and tiny.step.number == 3:
            break
    if how == "held":
        held.append(steps)  # its generator is open until the process ends


held: list[Any] = []


@pytest.mark.parametrize("how", ["break", "held", "error"])
def test_the_status_of_a_loop_that_was_left(tmp_path: Path, how: str) -> None:
    """It says so at once, or at the end of the process if Python has not closed the loop before."""
    path = tmp_path / "x" / "status.json"

    def train() -> None:
        tiny = Tiny(tmp_path / "x")
        with suppress(ValueError):
            leave(tiny, how)
        if how != "held" and tiny.run.rank == 0:
            assert json.loads(path.read_text())["status"] == "failed"

    left = "the loop was left by break"
    with pytest.raises(samestep.Error, match=left):
        samestep.spawn(train, 2)
    status = json.loads(path.read_text())
    assert status["status"] == "failed"
    assert status["reason"].startswith(left)
    assert "at run.steps_done=3, so that" in status["reason"]
