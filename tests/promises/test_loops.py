"""Several loops in one run: how run.stop ends one, what may change, and samplers that follow from the training.

The simulated runs (phases.py) kill and stop ranks within the loops and between them.
"""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support.runs import ask, read_bits
from support.tiny import Pairs, Tiny, update

import samestep

BETWEEN, STEPS_OF_FIRST, NUM_STEPS = -1, 8, 17


def train(
    run_dir: Path, strikes: Mapping[int, str] | None = None, num_epochs: int = 2, length: int = 22, num_workers: int = 0
) -> list[int]:
    """Train in two loops on other data. Return the steps that this start has taken.

    Args:
        strikes: step (or BETWEEN the loops) -> what happens in its body: "kill", "raise" or "stop".
    """
    taken: list[int] = []

    def reach(place: int) -> None:
        how = (strikes or {}).get(place)
        if how == "raise":
            raise ValueError("in the script")
        if how == "stop":
            tiny.run.stop("bored")
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def then(t: Tiny) -> None:
        update(t)
        t.run.state["seen"] = t.step.number + 1
        taken.append(t.step.number)
        reach(t.step.number)

    def sample(epoch: int) -> list[int]:
        assert tiny.run.state["seen"] == tiny.run.steps_done, "the sampler is called when the epoch begins"
        return torch.randperm(length).roll(tiny.run.steps_done).tolist()  # type: ignore[no-any-return]

    tiny = Tiny(run_dir, snapshot_every=2, keep_last=99, log_every=1)
    tiny.train(num_epochs, data=Pairs(30), then=then)
    reach(BETWEEN)
    tiny.train(3, data=Pairs(length), then=then, sampler=sample, num_workers=num_workers)
    return taken


def test_stop_ends_one_loop(tmp_path: Path) -> None:
    """The script continues with its next loop. Every later snapshot records where the first one ended."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert samestep.spawn(train, 1, (whole, {5: "stop"})) == [*range(6 + NUM_STEPS - STEPS_OF_FIRST)]
    with pytest.raises(ValueError, match="in the script"):
        samestep.spawn(train, 2, (run_dir, {5: "stop", BETWEEN: "raise"}))
    assert json.loads((run_dir / "status.json").read_text())["status"] == "failed"
    with pytest.raises(RuntimeError, match="SIGKILL"):
        samestep.spawn(train, 2, (run_dir, {10: "kill"}), {"num_workers": 2})
    assert samestep.spawn(train, 3, (run_dir,), {"num_workers": 1})[0] > 6
    assert read_bits(run_dir) == read_bits(whole)
    said = ask("inspect", run_dir, "--samples")
    orders = {line.partition(": ")[2] for line in said.splitlines() if " epoch " in line}
    assert len(orders) >= 6 + NUM_STEPS - STEPS_OF_FIRST, "no loop has the order of another one"
    assert samestep.spawn(train, 1, (run_dir,)) == []
    assert samestep.spawn(train, 1, (run_dir,), env={"SAMESTEP_RESUME": "6"})[:3] == [6, 7, 8], "by its step"


def test_a_loop_that_has_changed(tmp_path: Path) -> None:
    """The length of a completed loop cannot change, and neither can the data of the current loop."""
    run_dir = tmp_path / "run"
    with pytest.raises(RuntimeError, match="SIGKILL"):
        samestep.spawn(train, 1, (run_dir, {13: "kill"}))
    with pytest.raises(samestep.Error, match=r"loop 2 of the run .* was a different one \(data_length 22 there, 24"):
        samestep.spawn(train, 1, (run_dir,), {"length": 24})
    assert samestep.spawn(train, 1, (run_dir, {14: "stop"}), {"num_epochs": 3})
    assert samestep.spawn(train, 1, (run_dir,), {"num_epochs": 3, "length": 24}, env={"SAMESTEP_RESUME": "8"})
    assert "audit passed" in ask("inspect", run_dir, "--samples")
