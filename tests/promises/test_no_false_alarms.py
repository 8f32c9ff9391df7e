"""Correct programs that resemble mistakes run without an error and without a warning."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tiny import Pairs, Tiny, update
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader

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


def resemble_mistakes(t: Tiny) -> None:
    """Each of these lines resembles a mistake of wrong.py."""
    stranger = nn.Linear(1, 1)
    others = SGD(stranger.parameters(), lr=0.1)

    def body(t: Tiny, x: torch.Tensor, y: torch.Tensor) -> None:
        t.optimizer.held[0].zero_grad()  # at the start of the body, as in many scripts
        if t.step.micro_batch == 0 and t.step.number == 2:
            return
        t.step.backward(F.mse_loss(t.model(x), y) + stranger(x[:, :1]).square().mean())
        t.step.log(a=1, b=torch.ones(()), c=True)

    def then(t: Tiny) -> None:
        others.zero_grad()  # drops this rank's part; the gradient below is the same on all ranks
        others.step()
        stranger(torch.ones(1, 1)).sum().backward()
        others.step()
        update(t)
        out = t.run.evaluate(lambda b: {"a": (b[0].mean(), len(b[0])), "b": b[1][:, 0].tolist()}, Pairs(5))
        assert len(out["b"]) == 5

    t.run.state |= {"best": torch.inf, "worst": torch.nan}
    t.train(body=body, then=then, after_epoch=lambda t: t.run.snapshot("best"))
    sizes = t.run.evaluate(lambda b: {"size": float(len(b[0]))}, DataLoader(Pairs(5), batch_size=4))
    assert sizes == {"size": (4 * 4 + 1 * 1) / 5}, "a DataLoader's own micro-batches"
    Adam(t.model.parameters()).step()  # after the loop, the script may change the model


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
    "lines that resemble mistakes": {
        "do": resemble_mistakes, "optimizer": lambda p: wrap(p, WRAPPERS["a list"]), "log_every": 1},
    "an update without gradients before the loop": {"do": begin_with_an_empty_update},
    "a parameter that is infinite": {"model": Bounded},
    "a run in the loop of another one": {"then": lambda t: [update(t), t.step.number == 1 and Tiny(None)]},
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
