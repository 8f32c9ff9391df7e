"""`log_every` in steps, epochs and seconds, and warnings about what is logged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import read_rows
from support.tiny import Pairs, tiny_run
from torch.optim import SGD, Optimizer

import samestep
from samestep.train.state.stateful import find_wrapped, learning_rates


@pytest.mark.parametrize(
    ("log_every", "steps"),
    [(5, [5, 10]), ("2epochs", [6, 12]), ("1epoch", [3, 6, 9, 12]), ("1h", [1])],
)
def test_rows_are_written_at_intervals(tmp_path: Path, log_every: int | str, steps: list[int]) -> None:
    """3 steps per epoch. By the clock, the first step has a row, and the next row comes after the interval."""
    arguments = {"num_epochs": 4, "data": Pairs(10), "batch_size": 4, "log_every": log_every}
    samestep.spawn(tiny_run, 2, (tmp_path / "run",), arguments)
    assert [row["step"] for row in read_rows(tmp_path / "run")] == steps


class Wrapper(Optimizer):
    """Has parameter groups of its own, without a learning rate or with one that nothing uses."""

    def __init__(self, params: Any, defaults: dict[str, Any], build: Callable[[Any], list[Optimizer]]) -> None:
        super().__init__(params, defaults)
        self.held = build(self.param_groups[0]["params"])

    def step(self, closure: Any = None) -> None:
        for each in self.held:
            each.step()


class Plain:
    """No optimizer of torch."""

    def __init__(self, held: Optimizer) -> None:
        self.held = held
        self.step, self.state_dict, self.load_state_dict = held.step, held.state_dict, held.load_state_dict


def build_one(params: Any) -> list[Optimizer]:
    return [SGD(params, 0.25)]


def build_two(params: Any) -> list[Optimizer]:
    return [SGD(params[:1], 0.25), SGD(params[1:], 0.5)]


def build_shared(params: Any) -> Optimizer:
    inner = SGD(params, 0.25)
    outer = Wrapper(params, {"lr": 9.0}, lambda _: [inner])
    outer.param_groups = inner.param_groups
    return outer


@pytest.mark.parametrize(("build", "rates"), [
    (lambda p: SGD(p, 0.25), {"train/learning_rate": 0.25}),
    (lambda p: Plain(SGD(p, 0.25)), {"train/learning_rate": 0.25}),
    (lambda p: Plain(Wrapper(p, {"lr": 9.0}, build_one)), {}),
    (lambda p: Wrapper(p, {}, build_one), {"train/learning_rate": 0.25}),
    (lambda p: Wrapper(p, {"lr": 9.0}, build_one), {"train/learning_rate": 0.25}),
    (lambda p: Wrapper(p, {"lr": 9.0}, build_two), {}),
    (build_shared, {"train/learning_rate": 0.25}),
])  # fmt: skip
def test_the_learning_rate_of_a_wrapper(build: Callable[[Any], Any], rates: dict[str, float], tmp_path: Path) -> None:
    """That of the optimizer which updates; none if there are several, whose rates may differ."""
    tiny_run(tmp_path / "run", num_epochs=1, log_every=1, optimizer=build)
    for row in read_rows(tmp_path / "run"):
        assert {name: value for name, value in row.items() if "rate" in name} == rates


def test_a_wrapper_beside_an_optimizer() -> None:
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    objects: dict[str, Any] = {"plain": SGD(params[:1], 0.5), "wrapper": Plain(SGD(params[1:], 0.25))}
    objects["schedule"] = Plain(objects["wrapper"].held)  # holds it, too
    rates = {"train/learning_rate/plain": 0.5, "train/learning_rate/wrapper": 0.25}
    assert learning_rates(objects, find_wrapped(objects)) == rates
