"""Several loops in one run: phases of training on other data, with the same bits at any number of ranks and after
any kill or stop, inside a loop and between two loops.
"""

import json
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.runs import ask, read_bits
from support.tiny import Pairs

import samestep

BETWEEN, STEPS_OF_FIRST, NUM_STEPS = -1, 8, 22
Outcome = tuple[str, bytes, bytes]


def train(
    run_dir: Path, strikes: Mapping[int, str] | None = None, num_epochs: int = 2, length: int = 22,
) -> list[int]:  # fmt: skip
    """Pretrains, scores, freezes and fine-tunes on other data, then takes some more steps on the first data.

    Args:
        strikes: step (or BETWEEN the first two loops) -> what happens in its body: "kill", "raise", "terminate" or
            "stop".

    Returns:
        The steps that this start has taken.
    """
    import torch
    import torch.nn.functional as F
    from torch import nn

    def reach(place: int) -> None:
        how = (strikes or {}).get(place)
        if how == "raise":
            raise ValueError("in the script")
        if how == "stop":
            run.stop("bored")
        elif how is not None:
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGTERM)

    def walk(steps: Iterable[Any]) -> None:
        for step in steps:
            for x, y in step:
                step.backward(F.mse_loss(model(x), y))
            optimizer.step()
            taken.append(step.number)
            reach(step.number)

    def score(batch: Any) -> dict[str, Any]:
        return {"between": F.mse_loss(model(batch[0]), batch[1]), "noise": torch.rand(())}

    def draw(epoch: int) -> list[int]:
        return torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()  # type: ignore[no-any-return]

    run = samestep.Run(run_dir, batch_size=8, micro_batch_size=2, snapshot_every=2, keep_last=99, log_every=1)
    model = torch.nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    run.prepare(model=model, optimizer=optimizer)
    taken: list[int] = []
    numbers = []
    for epoch in run.epochs(Pairs(30), num_epochs):
        walk(epoch)
        run.log({"epoch/first": epoch.number})
    run.log(run.evaluate(score, Pairs(30)))
    reach(BETWEEN)
    data = torch.utils.data.TensorDataset(torch.randn(length, 4), torch.randn(length, 1))
    optimizer.param_groups[0]["lr"] = 1e-3
    model[0].requires_grad_(False)
    run.state["phases"] = run.state.get("phases", 0) + 1
    for epoch in run.epochs(data, 3, sampler=draw):
        numbers.append(epoch.number)
        walk(epoch)
        model[0].requires_grad_(True)
    assert numbers == sorted(numbers)
    walk(run.steps(Pairs(30), 5))
    assert run.state["phases"] == 1, "code between two loops runs once"
    run.log({"drawn": torch.rand(()).item()})
    return taken


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    run_dir = tmp_path_factory.mktemp("loops") / "run"
    assert samestep.spawn(train, 1, (run_dir,)) == [*range(NUM_STEPS)]
    said = ask("inspect", run_dir, "--samples")
    assert "in 2 complete epochs each of 30 samples was used once; in 3 complete epochs each of 22 samples was" in said
    assert "in 1 complete epoch each of 30 samples was used once; epoch 6 is incomplete, no sample twice" in said
    orders = {line.partition(": ")[2] for line in said.splitlines() if " epoch " in line}
    assert len(orders) >= NUM_STEPS, "no loop has the order of another one"
    return read_bits(run_dir)


def test_any_number_of_ranks(tmp_path: Path, undisturbed: Outcome) -> None:
    samestep.spawn(train, 3, (tmp_path / "run",))
    assert read_bits(tmp_path / "run") == undisturbed


def test_killed_and_stopped_everywhere(tmp_path: Path, undisturbed: Outcome) -> None:
    """In the first loop, in its last step, between two loops, inside later ones."""
    run_dir = tmp_path / "run"
    strikes = [(7, "terminate"), (BETWEEN, "kill"), (12, "kill"), (16, "terminate"), (19, "kill")]
    for number, (strike, how) in enumerate(strikes):
        num_ranks = 1 + number % 3
        if how == "terminate":  # the run saves and ends
            assert samestep.spawn(train, num_ranks, (run_dir, {strike: how})) is None
            saved = max((run_dir / "snapshots").glob("step-*")).name
            assert saved == f"step-{strike + 1:08d}"
        else:
            with pytest.raises((RuntimeError, ValueError)):
                samestep.spawn(train, num_ranks, (run_dir, {strike: how}))
    assert samestep.spawn(train, 2, (run_dir,))[-1] == NUM_STEPS - 1
    assert read_bits(run_dir) == undisturbed
    ask("inspect", run_dir, "--samples", "--json")
    assert samestep.spawn(train, 3, (run_dir,)) == [], "the run is complete"
    assert read_bits(run_dir) == undisturbed


def test_stop_ends_one_loop(tmp_path: Path) -> None:
    """The script continues with its next loop. Every later snapshot records where the first one ended."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert samestep.spawn(train, 1, (whole, {5: "stop"})) == [*range(6 + NUM_STEPS - STEPS_OF_FIRST)]
    with pytest.raises(ValueError, match="in the script"):
        samestep.spawn(train, 2, (run_dir, {5: "stop", BETWEEN: "raise"}))
    assert json.loads((run_dir / "status.json").read_text())["status"] == "failed"
    with pytest.raises(RuntimeError, match="SIGKILL"):
        samestep.spawn(train, 2, (run_dir, {11: "kill"}))
    assert samestep.spawn(train, 3, (run_dir,))[0] > 6
    # (What the epoch's body logs after the snapshot of the stop is not in it.)
    assert read_bits(run_dir)[::2] == read_bits(whole)[::2]
    assert "audit passed" in ask("inspect", run_dir, "--samples")
    assert samestep.spawn(train, 1, (run_dir,)) == []
    assert samestep.spawn(train, 1, (run_dir,), env={"SAMESTEP_RESUME": "6"})[:3] == [6, 7, 8], "by its step"


def test_a_loop_that_has_changed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The length of a completed loop cannot change, and neither can the data of the current loop."""
    run_dir = tmp_path / "run"
    with pytest.raises(RuntimeError, match="SIGKILL"):
        samestep.spawn(train, 1, (run_dir, {13: "kill"}))
    with pytest.raises(samestep.Error, match=r"loop 2 of the run .* was a different one \(data_length 22 there, 24"):
        samestep.spawn(train, 1, (run_dir,), {"length": 24})
    assert samestep.spawn(train, 1, (run_dir, {14: "stop"}), {"num_epochs": 3})
    said = "loop 1 of this run ended at step 8 and is not continued, although its planned end is now step 12 (was 8)"
    assert said in capfd.readouterr().out
    assert samestep.spawn(train, 1, (run_dir,), {"num_epochs": 3, "length": 24}, env={"SAMESTEP_RESUME": "8"})
    assert "audit passed" in ask("inspect", run_dir, "--samples")


def test_the_page(tmp_path: Path) -> None:
    """Runs the script of docs/loops.md."""
    page = (Path(__file__).parents[2] / "docs" / "loops.md").read_text()

    def run_page() -> int:
        os.chdir(tmp_path)
        names: dict[str, Any] = {}
        exec(page.partition("```python\n")[2].partition("```")[0], names)
        return names["run"].steps_done  # type: ignore[no-any-return]

    assert samestep.spawn(run_page, 2) == 2 * 13 + 3 * 4 + 5
    assert "audit passed" in ask("inspect", tmp_path / "runs" / "phases", "--samples")
