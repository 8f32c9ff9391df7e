"""Correct programs that resemble mistakes run without an error and without a warning."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Tiny, update
from torch import nn
from torch.optim import SGD, Adam

import samestep


class Wrapper:
    """Holds optimizers anywhere, and saves them."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], held: Any) -> None:
        self.held = held
        self.step = lambda: [each.step() for each in optimizers]
        self.state_dict = lambda: {str(i): each.state_dict() for i, each in enumerate(optimizers)}
        self.load_state_dict = lambda state: [each.load_state_dict(state[str(i)]) for i, each in enumerate(optimizers)]


def build_two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


def wrap(parameters: list[nn.Parameter], hold: Callable[[list[Any]], Any]) -> Wrapper:
    """The usual pair: one optimizer for matrices, another for the rest."""
    matrices, rest = ([p for p in parameters if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    optimizers = [SGD(matrices, 0.1, momentum=0.9), Adam(rest, 0.01)]
    return Wrapper(optimizers, hold(optimizers))


WRAPPERS: dict[str, Callable[[list[Any]], Any]] = {
    "a list": lambda optimizers: optimizers,
    "a dict": lambda optimizers: dict(zip("ab", optimizers, strict=True)),
    "a second wrapper": lambda optimizers: Wrapper(optimizers, {"inner": tuple(optimizers)}),
    "a closure": lambda optimizers: None,
}


def update_with_critic(t: Tiny) -> None:
    update(t)
    t.plain.step()


def begin_with_an_empty_update(t: Tiny) -> None:
    t.optimizer.zero_grad()
    t.optimizer.step()
    t.train()


class Bounded(nn.Linear):
    """Has a parameter that is infinite on purpose."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.least = nn.Parameter(torch.tensor([-torch.inf]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).maximum(self.least)


class Bounding(SGD):
    """Its state is infinite on purpose, and has memory that nobody reads."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if not self.state[param]:
                self.state[param]["smallest"] = torch.full_like(param, torch.inf)
                # As if torch.empty_like had returned memory with other content on each rank.
                self.state[param]["scratch"] = torch.full_like(param, float(os.environ.get("RANK", 0)))
        return super().step(closure)


CORRECT: dict[str, dict[str, Any]] = {
    **{f"optimizers in {name}": {"model": build_two_layers, "optimizer": lambda p, hold=hold: wrap(p, hold)}
       for name, hold in WRAPPERS.items()},
    "a wrapper beside an optimizer": {
        "model": build_two_layers, "optimizer": lambda p: wrap(p[:2], WRAPPERS["a list"]),
        "objects": lambda t: {"plain": SGD(t.model[1].parameters(), 0.1)}, "then": update_with_critic},
    "an update without gradients before the loop": {"do": begin_with_an_empty_update},
    "a parameter that is infinite": {"model": Bounded},
    "state that is infinite, and memory that nobody reads": {"optimizer": lambda p: Bounding(p, 0.1)},
}  # fmt: skip


def train(run_dir: Path, name: str) -> dict[str, Any]:
    """Returns the model's weights before and after."""
    arguments = CORRECT[name]
    do, then = arguments.get("do", Tiny.train), {k: v for k, v in arguments.items() if k == "then"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny = Tiny(
            run_dir,
            snapshot_every=2,
            compare_every=1,
            **{k: v for k, v in arguments.items() if k not in ("do", "then")},
        )
        before = {name: param.detach().clone() for name, param in tiny.model.named_parameters()}
        do(tiny, **then)
    return {name: (before[name], param.detach()) for name, param in tiny.model.named_parameters()}


@pytest.mark.parametrize("name", CORRECT)
def test_no_alarm(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = samestep.spawn(train, 2, (tmp_path / "two", name))
    again = samestep.spawn(train, 1, (tmp_path / "one", name))
    for key, (before, after) in found.items():
        assert torch.equal(after, again[key][1]), key
        assert not torch.equal(before, after) or key == "least", f"{key} is not trained"
    assert "silence" not in capfd.readouterr().out
