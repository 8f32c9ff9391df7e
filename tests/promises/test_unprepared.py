"""State that the steps change and no snapshot holds is named once. Harmless state is not named."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import Pairs
from torch import nn
from torch.optim.swa_utils import AveragedModel

import samestep

NAMED = {
    "an average": ("ema", "pass it to run.prepare"),
    "a schedule": ("schedule", "pass it to run.prepare"),
    "a schedule of epochs": ("schedule", "pass it to run.prepare"),
    "a scaler": ("scaler", "leave it out"),
    "a generator of torch": ("noise", "draw from torch, numpy.random or random themselves"),
    "a generator of numpy": ("noise", "draw from torch, numpy.random or random themselves"),
    "a generator in an attribute": ("holder.noise", "draw from torch, numpy.random or random themselves"),
}
SILENT = ("nothing", "all is prepared", "a teacher", "a wrapper", "a trainer", "a generator that is seeded")


class Trainer:
    """A class of the script's own that holds what is prepared, and can be saved."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.count = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def train(run_dir: Path, case: str) -> None:
    run = samestep.Run(run_dir, batch_size=8, micro_batch_size=2)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    in_step = in_epoch = lambda step: None
    if case in ("an average", "all is prepared"):
        ema = AveragedModel(model)
        in_step = lambda step: ema.update_parameters(model)  # noqa: E731
    if case in ("a schedule", "a schedule of epochs", "all is prepared"):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if case == "a schedule":
            in_step = lambda step: schedule.step()  # noqa: E731
        else:
            in_epoch = lambda step: schedule.step()  # noqa: E731
    if case == "all is prepared":
        objects |= {"ema": ema, "schedule": schedule}
    if case == "a scaler":
        scaler = torch.amp.GradScaler("cpu")
        in_step = lambda step: [scaler.scale(torch.ones(())), scaler.update(float(2 + step))]  # noqa: E731
    if case == "a generator of torch":
        noise = torch.Generator()
        in_step = lambda step: torch.rand(1, generator=noise)  # noqa: E731
    if case == "a generator of numpy":
        noise = np.random.default_rng(0)
        in_step = lambda step: noise.random()  # noqa: E731
    if case == "a generator in an attribute":
        holder = nn.Identity()
        holder.noise = random.Random(0)
        in_step = lambda step: holder.noise.random()  # noqa: E731
    if case == "a generator that is seeded":
        noise = torch.Generator()
        in_step = lambda step: torch.rand(1, generator=noise.manual_seed(step))  # noqa: E731
    if case == "a teacher":
        teacher = nn.Linear(4, 1)
        in_step = lambda step: teacher(torch.ones(4))  # noqa: E731
    if case == "a wrapper":
        wrapper = nn.Sequential(model, nn.Tanh())
        in_step = lambda step: wrapper  # noqa: E731
    if case == "a trainer":
        trainer = Trainer(model, optimizer)
        in_step = lambda step: setattr(trainer, "count", step)  # noqa: E731
    run.prepare(**objects)
    for epoch in run.epochs(Pairs(), 3):
        for step in epoch:
            for x, y in step:
                step.backward((model(x) - y).square().mean())
            optimizer.step()
            in_step(step.number)
        in_epoch(epoch.number)


@pytest.mark.parametrize("case", [*NAMED, *SILENT])
def test_what_is_not_prepared(tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str) -> None:
    samestep.spawn(train, 1, (tmp_path / "run", case))
    said = [line for line in capfd.readouterr().out.splitlines() if "not in any snapshot" in line]
    if case in SILENT:
        assert said == []
        return
    name, cure = NAMED[case]
    assert len(said) == 1, "once"
    assert f"changed by the steps: {name} (" in said[0]
    assert cure in said[0]


def test_only_one_rank_prints_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    samestep.spawn(train, 2, (tmp_path / "run", "an average"))
    assert capfd.readouterr().out.count("not in any snapshot") == 1
