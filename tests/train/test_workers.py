"""A run whose steps are rounds of workers has the same bits at any number of ranks, and those of DiLoCo by hand."""

import copy
import functools
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline.piped import CASES, build_data, digest
from support.runs import read_bits
from torch import Tensor, nn

import samestep

WORKERS, INNER_STEPS, ROUNDS = 4, 2, 4
OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
SETTINGS: dict[str, Any] = {"batch_size": 24, "workers": WORKERS, "inner_steps": INNER_STEPS, "device": "cpu"}


class Unusual(torch.optim.SGD):
    """Its learning rate is a tensor that changes in place, it adds a setting, and it has a state of no parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, torch.tensor(lr))

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        group["calls"] = group.get("calls", 0) + 1
        self.state["all"]["calls"] = self.state["all"].get("calls", 0) + 1
        group["lr"].mul_(0.9 ** (group["calls"] + self.state["all"]["calls"]))
        return super().step(closure)


def train(
    kind: str, run_dir: Path | None = None, *, ends_by: int = 0, scales: bool = False, inner: Any = torch.optim.AdamW,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train a model. Returns what must be the same at any number of ranks, on rank 0.

    Args:
        ends_by: the signal that the rank of the last worker gets in its second inner step of step 1.
    """
    build, shape, _ = CASES[kind]
    run: Any = samestep.Run(run_dir, **{"snapshot_every": 1, "log_every": 1} | SETTINGS | options)
    model: Any = build()
    inner = inner(model.parameters(), lr=1e-2)
    outer = OUTER(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(inner, 2, 0.9)
    run.prepare(model=model, optimizer=outer, inner_optimizer=inner, schedule=schedule)

    def scale(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        inner.param_groups[0]["lr"] = 0.01 / (1 + step.number * INNER_STEPS + step.micro_batch % INNER_STEPS)
        inner.param_groups[0]["weight_decay"] *= 2  # in each inner step from the same value

    if scales:
        inner.register_step_pre_hook(scale)
    seen: list[Any] = []
    for step in run.steps(build_data(shape), ROUNDS):
        for x, y in step:
            with run.autocast():
                out = model(x)
            step.backward(F.cross_entropy(out.float().flatten(0, -2), y.flatten()), weight=float(y.sum()) + 1)
            step.log(drawn=torch.rand(()))
            if ends_by and (step.number, step.micro_batch) == (1, 7):
                os.kill(os.getpid(), ends_by)
        norm = run.clip_grad_norm_(model.parameters(), 10.0)
        outer.step()
        schedule.step()
        seen.append((norm.item().hex(), sorted(step.metrics.items())))
    states = run._prepared.collect_states()
    return {"seen": seen, "state": digest(states) if run.rank == 0 else ""}


@functools.cache
def train_alone(kind: str, **options: Any) -> dict[str, Any]:
    return train(kind, **options)


@pytest.mark.parametrize(("kind", "num_ranks"), [
    ("gpt", 3),
    ("mlp", 4),
    *(pytest.param(*each, marks=pytest.mark.soak) for each in [("gpt", 2), ("gpt", 4), ("mlp", 2)]),
])  # fmt: skip
def test_same_bits(kind: str, num_ranks: int, tmp_path: Path) -> None:
    assert samestep.spawn(train, num_ranks, (kind, tmp_path / "several")) == train_alone(kind)
    samestep.spawn(train, 1, (kind, tmp_path / "one"))
    assert read_bits(tmp_path / "several") == read_bits(tmp_path / "one")


@pytest.mark.parametrize("options", [
    {"micro_batch_size": 1},
    {"scales": True},
    {"exchange_dtype": "bf16"},
    {"precision": "bf16"},
    {"kind": "resnet"},
    {"inner": torch.optim.Adagrad},
    {"inner": Unusual},
    {"workers": 6, "inner_steps": 1},
], ids=str)  # fmt: skip
def test_same_bits_with(options: dict[str, Any]) -> None:
    given = {"kind": "mlp"} | options
    expected = train_alone(**given)
    assert expected != train_alone("mlp")
    assert samestep.spawn(train, given.get("workers", 4) // 2, (), given) == expected


@pytest.mark.parametrize(("ends_by", "steps_done"), [(signal.SIGTERM, 2), (signal.SIGKILL, 1)])
def test_ended_in_a_round_and_resumed_on_other_ranks(ends_by: int, steps_done: int, tmp_path: Path) -> None:
    """The snapshot of each round is complete when the next one begins."""
    with suppress(RuntimeError):  # of the killed rank
        samestep.spawn(train, 3, ("mlp", tmp_path / "parts"), {"ends_by": ends_by})
    samestep.spawn(train, 4, ("mlp", tmp_path / "parts"), {"resume": steps_done, "max_steps": 3})
    found = samestep.spawn(train, 2, ("mlp", tmp_path / "parts"))
    assert found["state"] == train_alone("mlp")["state"]
    samestep.spawn(train, 1, ("mlp", tmp_path / "whole"))
    assert read_bits(tmp_path / "parts") == read_bits(tmp_path / "whole")


def test_the_bits_of_a_plain_loop() -> None:
    run: Any = samestep.Run(None, **SETTINGS)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 5))
    plain = copy.deepcopy(model)
    optimizer, outer = (OUTER(each.parameters()) for each in (model, plain))
    inner, *inners = (torch.optim.AdamW(each.parameters()) for each in (model, *[plain] * WORKERS))
    run.prepare(model=model, optimizer=optimizer, inner_optimizer=inner)
    rounds: list[list[Any]] = []
    for step in run.steps(build_data((8,)), ROUNDS):
        rounds.append([])
        for x, y in step:
            rounds[-1].append((x.clone(), y.clone()))
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    for batches in rounds:
        start = [param.detach().clone() for param in plain.parameters()]
        changes: list[list[Tensor]] = []
        for worker, each in enumerate(inners):
            for x, y in batches[worker * INNER_STEPS : (worker + 1) * INNER_STEPS]:
                each.zero_grad()
                F.cross_entropy(plain(x), y).backward()
                each.step()
            changes.append([before - param.detach() for before, param in zip(start, plain.parameters(), strict=True)])
            plain.load_state_dict(dict(zip(plain.state_dict(), start, strict=True)))
        for param, (a, b, c, d) in zip(plain.parameters(), zip(*changes, strict=True), strict=True):
            param.grad = ((a + b) + (c + d)) / WORKERS
        outer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# --- refusals ---------------------------------------------------------------------------------------------------------


def train_badly(
    *, inner: Any = torch.optim.SGD, only: str = "", calls: bool = False, passes: int = 1, epochs: bool = False,
    num_ranks: int = 1, **options: Any,
) -> None:  # fmt: skip
    settings = {"batch_size": 8, "workers": 2, "inner_steps": 2, "device": "cpu"}
    run: Any = samestep.Run(None, **settings | options)  # type: ignore[arg-type]
    model = nn.Linear(2, 1)
    updated = [getattr(model, only)] if only else model.parameters()
    given = None if inner is None else inner(updated, lr=0.1)
    run.prepare(model=model, optimizer=OUTER(model.parameters()), inner_optimizer=given)
    for step in next(run.epochs(torch.ones(12, 2), 1)) if epochs else run.steps(torch.ones(12, 2), 1):
        for _ in range(passes):
            for x in step:
                step.backward(model(x).mean())
                if calls:
                    given.step()


@pytest.mark.parametrize(("bad", "sentence"), [
    ({"inner": None}, "run.prepare got no inner_optimizer, and the run has 2 workers"),
    ({"workers": None, "inner_steps": None}, "run.prepare got an inner_optimizer, and the run has no workers"),
    ({"inner_steps": None}, "workers is 2, and inner_steps is None"),
    ({"batch_size": 6}, "need a multiple of 4"),
    ({"batch_size": 3}, "need a multiple of 4"),
    ({"micro_batch_size": 4}, "need a multiple of 16"),
    ({"shard": "optimizer"}, 'shard="optimizer" is not available with workers'),
    ({"pipeline": 1}, "pipeline is not available with workers"),
    ({"precision": "fp16"}, 'precision="fp16" is not available with workers'),
    ({"check_compute_every": 2}, "check_compute_every is not available with workers"),
    ({"inner": torch.optim.LBFGS}, "LBFGS is not available with workers"),
    ({"only": "weight"}, "inner_optimizer has other parameters"),
    ({"calls": True}, "the script has called inner_optimizer.step()"),
    ({"passes": 2}, "step 0 was iterated over twice"),
    ({"num_ranks": 3}, "3 ranks cannot share 2 workers: start at most 2"),
    ({"epochs": True}, "the last step of an epoch is shorter than the 8 samples"),
], ids=str)  # fmt: skip
def test_refused(bad: dict[str, Any], sentence: str) -> None:
    with pytest.raises(samestep.Error, match=re.escape(sentence)):
        samestep.spawn(train_badly, bad.get("num_ranks", 1), (), bad)


# --- what an inner step changes beside the parameters -----------------------------------------------------------------


class Counting(torch.optim.Optimizer):
    """It counts its updates in two numbers, and every other one in a tensor. It halves its learning rate, a tensor."""

    seen: list[tuple[int, int, float, int]]
    count = 0

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": torch.tensor(lr), "total": torch.zeros(()), "set_by_hook": 0})

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        group["count"] = group.get("count", 0) + 1
        group["total"] += group["count"] % 2
        group["lr"] *= 0.5
        self.count += 1
        assert self.count == group["count"]
        self.seen.append((group["count"], int(group["total"]), float(group["lr"]), group["set_by_hook"]))


def train_rounds(inner_class: Any, run_dir: Path | None = None, *, averages: bool = False, **options: Any) -> Any:
    """Train 2 workers with 2 inner steps each. The script halves the learning rate after the second round."""
    run: Any = samestep.Run(run_dir, batch_size=8, device="cpu", **{"workers": 2, "inner_steps": 2} | options)
    model: Any = nn.Linear(2, 1)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    inner = None if inner_class is None else inner_class(model.parameters(), lr=1.0)
    outer = OUTER(model.parameters())
    run.prepare(model=model, averaged=averaged, optimizer=outer, inner_optimizer=inner)

    def set_for_one_step(*_: Any) -> None:
        inner.param_groups[0]["set_by_hook"] = inner.param_groups[0].get("set_by_hook", 0) + 1

    if inner is not None:
        inner.register_step_pre_hook(set_for_one_step)
    if averages:
        inner.register_step_post_hook(lambda *_: averaged.update_parameters(model))
    for step in run.steps(torch.ones(16, 2), 3):
        for x in step:
            step.backward(model(x).mean())
        outer.step()
        if inner is not None and step.number == 1:
            inner.param_groups[0]["lr"] /= 2


def test_each_worker_has_settings_of_its_own(tmp_path: Path) -> None:
    """What an update changes stays with the worker, until the script sets it; what a hook changes, for one update."""
    Counting.seen = []
    train_rounds(Counting, tmp_path / "run", max_steps=1)
    train_rounds(Counting, tmp_path / "run")
    rates = [[0.5, 0.25], [0.125, 0.0625], [0.25, 0.125]]
    rounds = [[(2 * k + 1, k + 1, lr, 1), (2 * k + 2, k + 1, last, 1)] for k, (lr, last) in enumerate(rates)]
    assert Counting.seen == [each for of_worker in rounds for each in of_worker * 2]


def test_an_inner_step_that_changes_what_workers_share() -> None:
    with pytest.raises(samestep.Error, match=r"a parameter that no optimizer holds \(of an averaged model\?\)"):
        train_rounds(torch.optim.SGD, averages=True)


def test_refused_to_continue_a_run_with_other_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_rounds(torch.optim.SGD, tmp_path / "two")
    monkeypatch.setenv("SAMESTEP_CONTINUE_FROM", str(tmp_path / "two"))
    for inner_class, workers in ((None, None), (torch.optim.SGD, 1)):
        options = {"workers": workers, "inner_steps": workers and 2}
        with pytest.raises(samestep.Error, match=f"was trained with workers=2, and this run has workers={workers}"):
            train_rounds(inner_class, tmp_path / "other", **options)
