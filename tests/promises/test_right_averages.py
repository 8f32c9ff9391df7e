"""Each epoch reads and uses each sample once, as the ledger says. (test_loop_plan.py has all lengths and divisions.)
Gradients, losses, metrics and statistics are those of the whole batch, against references in plain PyTorch.
"""

import copy
import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.runs import ask, read_rows
from support.tiny import Tiny, learn, tiny_run, update
from torch import Tensor, nn
from torch.utils.data import Dataset

import samestep

NUM_RANKS = 5


class Recorded(Dataset[tuple[int, Tensor]]):
    """Writes to a file which samples any process reads."""

    def __init__(self, length: int, path: Path) -> None:
        self.length, self.path = length, path

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        with open(self.path, "ab", buffering=0) as file:
            file.write(b"%d\n" % index)
        return index, torch.tensor([index / self.length])


def use_samples(directory: Path, name: str) -> list[list[int]]:
    """Train two epochs, or some steps. Return the samples of each step, in the order of the micro-batches."""
    length, how = CASES[name]
    steps: list[list[int]] = []
    used: list[int] = []

    def body(t: Tiny, indices: Tensor, x: Tensor) -> None:
        used.extend(indices.tolist())
        learn(t, x)

    def then(t: Tiny) -> None:
        update(t)
        steps.append([*chain.from_iterable(t.run._context.group.gather(used))])
        used.clear()

    tiny_run(
        directory / name, model=lambda: nn.Linear(1, 1), batch_size=24, micro_batch_size=4,
        data=Recorded(length, directory / f"{name}.read"), body=body, then=then, **how,
    )  # fmt: skip
    return steps


def draw_some(epoch: int) -> list[int]:
    """Some samples twice, some not at all."""
    return [(epoch + 3 * i) % 31 for i in range(38)]


# Numbers of samples, in steps of 24, and how they are read.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "a ragged micro-batch": (24 + 14, {"num_workers": 2}),
    "drop_last": (24 + 15, {"drop_last": True}),
    "a sampler": (31, {"sampler": draw_some}),
    "several epochs in a step": (7, {"num_steps": 7}),
}


def test_each_sample_is_used_once(tmp_path: Path) -> None:
    results = samestep.spawn(lambda: {name: use_samples(tmp_path, name) for name in CASES}, NUM_RANKS)
    counts = {name: Counter(chain.from_iterable(used)) for name, used in results.items()}
    for name, used in results.items():
        length, _ = CASES[name]
        # To identify its data, each rank reads a few samples, twice.
        identifying = Counter(dict.fromkeys({0, length // 2, length - 1}, 2 * NUM_RANKS))
        read = map(int, (tmp_path / f"{name}.read").read_text().split())
        assert Counter(read) == counts[name] + identifying, name
        shown = json.loads(ask("inspect", tmp_path / name, "--samples", "--json"))
        assert shown["audit"]["passed"], name
        assert [step["samples"] for step in shown["steps"]] == used, name
    assert counts["a ragged micro-batch"] == dict.fromkeys(range(38), 2)
    assert counts["several epochs in a step"] == dict.fromkeys(range(7), 24)
    assert counts["a sampler"] == Counter(draw_some(0) + draw_some(1))
    first, second = results["drop_last"]
    assert len({*first}) == len({*second}) == 24
    assert {*first} != {*second}, "each epoch drops others"


# --- averages ---------------------------------------------------------------------------------------------------------

Row = dict[str, Any]
FEW = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Weighted(Dataset[tuple[int, Tensor, Tensor, Tensor]]):
    """Samples with their index, of float64. Some stand for many units, and some for none."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(num_samples)
        self.x = 3 * torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randn(num_samples, 2, generator=generator, dtype=torch.float64) + 1
        self.units = torch.randint(-2, 9, (num_samples,), generator=generator).clamp(min=0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor, Tensor]:
        return index, self.x[index], self.y[index], self.units[index]


def compute_mean(model: nn.Module, x: Tensor, y: Tensor, units: Tensor) -> Tensor:
    """The squared error, averaged over all units of all samples: nan without units."""
    return (units * ((model(x) - y) ** 2).mean(1)).sum() / units.sum()


def measure_steps(run_dir: Path, data: Weighted, batch_size: int, micro_batch_size: int, by_units: bool) -> list[Row]:
    """Per step: its errors against a reference of the whole batch, and the reference's own metrics."""
    run = samestep.Run(run_dir, batch_size=batch_size, micro_batch_size=micro_batch_size, log_every=1)
    model = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    run.prepare(model=model, optimizer=optimizer)
    rows: list[Row] = []
    for epoch in run.epochs(data, 2):
        for step in epoch:
            held: list[int] = []
            for indices, x, y, units in step:
                held += indices.tolist()
                units = units if by_units else torch.ones_like(units)
                step.backward(compute_mean(model, x, y, units), weight=units.sum() if by_units else None)
                step.log(first=(units * x[:, 0]).sum() / units.sum().clamp(min=1))
            indices = [*chain.from_iterable(run._context.group.gather(held))]
            assert len(indices) == step.num_samples
            units = data.units[indices] if by_units else torch.ones(len(indices))
            if not units.sum():
                assert all(param.grad is None for param in model.parameters())
                assert step.loss.isnan()
                rows.append({})
                continue
            whole = copy.deepcopy(model)
            loss = compute_mean(whole, data.x[indices], data.y[indices], units)
            wanted = torch.autograd.grad(loss, list(whole.parameters()))
            errors = [((p.grad - w).norm() / w.norm()).item() for p, w in zip(model.parameters(), wanted, strict=True)]
            first = float((units * data.x[indices, 0]).sum() / units.sum())
            rows.append({"gradient": max(errors), "loss": (float(step.loss), loss.item()), "first": first})
            optimizer.step()
    return rows


@given(data=st.data())
@settings(FEW, max_examples=2)
def test_a_step_is_the_whole_batch(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, 5), "ranks")
    runs = []
    for _ in range(3):
        num_micro_batches = data.draw(st.integers(world_size, 9), "micro-batches")
        micro_batch_size = data.draw(st.integers(1, 4), "samples of one")
        num_samples = data.draw(st.integers(1, 3 * num_micro_batches * micro_batch_size), "samples")
        by_units = data.draw(st.booleans(), "weighted by units")
        run_dir = tmp_path_factory.mktemp("whole") / "run"
        runs.append((run_dir, Weighted(num_samples), num_micro_batches * micro_batch_size, micro_batch_size, by_units))
    measured = samestep.spawn(lambda: [measure_steps(*arguments) for arguments in runs], world_size)
    logged_rows = [row for run_dir, *_ in runs for row in read_rows(run_dir)]
    for row, logged in zip(chain.from_iterable(measured), logged_rows, strict=True):
        if not row:  # a step of samples without units
            assert "train/loss" not in logged
            assert logged["train/skipped_steps"] > 0
            continue
        found, wanted = row["loss"]
        assert row["gradient"] < 1e-12
        assert found == pytest.approx(wanted, rel=1e-6)  # a tensor of float32
        assert logged["train/loss"] == pytest.approx(wanted, rel=1e-12)
        assert logged["train/first"] == pytest.approx(row["first"], rel=1e-12, abs=1e-12)


def evaluate_means(data: Weighted, micro_batch_size: int) -> dict[str, Any]:
    tiny = Tiny(model=lambda: nn.Linear(5, 2).double(), batch_size=24)
    run, model = tiny.run, tiny.model

    def score(batch: Any) -> dict[str, Any]:
        indices, x, y, units = batch
        assert not model.training
        assert not torch.is_grad_enabled()
        return {
            "loss": ((model(x) - y) ** 2).mean(),
            "by unit": (compute_mean(model, x, y, units), units.sum()),
            "number": (len(indices), 1),
            "indices": indices.tolist(),
        }

    out = run.evaluate(score, data, micro_batch_size=micro_batch_size)
    assert model.training
    errors = (model(data.x) - data.y).square().mean(1)
    return out | {"wanted": (float(errors.mean()), float((data.units * errors).sum() / data.units.sum()))}


@given(st.integers(1, 5), st.integers(1, 70), st.integers(1, 8))
@FEW
def test_evaluate_is_the_mean_over_the_data_set(world_size: int, num_samples: int, micro_batch_size: int) -> None:
    data = Weighted(num_samples)
    assume(data.units.sum() > 0)
    out = samestep.spawn(evaluate_means, world_size, (data, micro_batch_size))
    assert (out["loss"], out["by unit"]) == pytest.approx(out["wanted"], rel=1e-12)
    assert out["indices"] == list(range(num_samples))
    assert out["number"] == pytest.approx(num_samples / -(-num_samples // micro_batch_size))
