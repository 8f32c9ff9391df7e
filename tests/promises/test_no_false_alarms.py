"""Correct programs that resemble mistakes run without an error and without a warning."""

import os
import warnings
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
    """The usual pair: one optimizer for matrices, another for the rest. Saves both."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.matrices = SGD([p for p in parameters if p.ndim > 1], 0.1, momentum=0.9)
        self.rest = Adam([p for p in parameters if p.ndim <= 1], 0.01)

    def step(self) -> None:
        self.matrices.step()
        self.rest.step()

    def state_dict(self) -> dict[str, Any]:
        return {"matrices": self.matrices.state_dict(), "rest": self.rest.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.matrices.load_state_dict(state["matrices"])
        self.rest.load_state_dict(state["rest"])


def build_two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


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
        t.optimizer.matrices.zero_grad()  # at the start of the body, as in many scripts
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
    "two optimizers in an object": {"model": build_two_layers, "optimizer": Wrapper},
    "a wrapper beside an optimizer": {
        "model": build_two_layers, "optimizer": lambda p: Wrapper(p[:2]),
        "objects": lambda t: {"plain": SGD(t.model[1].parameters(), 0.1)}, "then": update_with_critic},
    "lines that resemble mistakes": {
        "do": resemble_mistakes, "optimizer": Wrapper, "log_every": 1},
    "an update without gradients before the loop": {"do": begin_with_an_empty_update},
    "a parameter that is infinite": {"model": Bounded},
    "a run in the loop of another one": {"then": lambda t: [update(t), t.step.number == 1 and Tiny(None)]},
    "state that is infinite, and memory that nobody reads": {"optimizer": lambda p: Bounding(p, 0.1)},
}  # fmt: skip


def train(run_dir: Path, name: str) -> dict[str, Any]:
    """Returns the model's weights before and after."""
    arguments = dict(CORRECT[name])
    then = arguments.pop("then", update)
    do = arguments.pop("do", lambda tiny: tiny.train(then=then))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny = Tiny(run_dir, snapshot_every=2, compare_every=1, **arguments)
        before = {name: param.detach().clone() for name, param in tiny.model.named_parameters()}
        do(tiny)
    return {name: (before[name], param.detach()) for name, param in tiny.model.named_parameters()}


@pytest.mark.parametrize("name", CORRECT)
def test_no_alarm(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = samestep.spawn(train, 2, (tmp_path / "two", name))
    again = samestep.spawn(train, 1, (tmp_path / "one", name))
    for key, (before, after) in found.items():
        assert torch.equal(after, again[key][1]), key
        assert not torch.equal(before, after) or key == "least", f"{key} is not trained"
    assert "silence" not in capfd.readouterr().out
