"""State that the steps change and no snapshot holds is named once. Harmless state is not named."""

import copy
import random
import re
import warnings
from pathlib import Path
from typing import Any

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
    "a copy that is made after each epoch": ("copied", "pass it to run.prepare"),
    "a copy that is made in some steps": ("copied", "pass it to run.prepare"),
    "a count": ("counter", "pass it to run.prepare"),
}
SILENT = (
    "nothing", "all is prepared", "a teacher", "a wrapper", "a trainer", "a generator in a prepared object",
    "schedules in sequence", "schedules in a chain", "a copy that is made before each epoch",
    "a copy that is made before each step", "a copy of a part", "a metric", "a metric that is reset at the end",
    "a schedule in a wrapper",
)  # fmt: skip


class Count:
    """Counts steps."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Metric(Count):
    """A count that can begin anew."""

    def reset(self) -> None:
        self.count = 0


class Trainer:
    """A class of the script's own that holds what is prepared, and can be saved."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.count = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Noise:
    """Holds a generator, which its state contains."""

    def __init__(self) -> None:
        self.source = random.Random(1)

    def state_dict(self) -> dict[str, Any]:
        return {"source": self.source.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.setstate(state["source"])


class Holder:
    """Holds a schedule, which its state contains."""

    def __init__(self, schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
        self.schedule = schedule
        self.state_dict, self.load_state_dict = schedule.state_dict, schedule.load_state_dict


class Registry(dict[str, Any]):
    """Loads everything in items()."""

    def items(self) -> Any:
        raise RuntimeError("items() was called")

    values = __iter__ = items


def train(run_dir: Path, case: str, ignored: str = "nothing") -> None:
    warnings.filterwarnings("ignore", ignored)
    registry = Registry(a=1)
    run = samestep.Run(run_dir, batch_size=8, micro_batch_size=2)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    in_step = in_epoch = before_step = before_epoch = lambda step: None
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
    if case == "a generator in a prepared object":
        objects["noise"] = noise = Noise()
        in_step = lambda step: noise.source.random()  # noqa: E731
    if case == "a teacher":
        teacher = nn.Linear(4, 1)
        in_step = lambda step: teacher(torch.ones(4))  # noqa: E731
    if case == "a wrapper":
        wrapper = nn.Sequential(model, nn.Tanh())
        in_step = lambda step: wrapper  # noqa: E731
    if case == "a trainer":
        trainer = Trainer(model, optimizer)
        in_step = lambda step: setattr(trainer, "count", step)  # noqa: E731
    if case == "a schedule in a wrapper":
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        objects["wrapper"] = wrapper = Holder(schedule)
        del schedule
        in_step = lambda step: wrapper.schedule.step()  # noqa: E731
    if case.startswith("schedules"):
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        both = [warmup, decay]
        if case == "schedules in sequence":
            objects["schedule"] = schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, both, milestones=[2])
        else:
            objects["schedule"] = schedule = torch.optim.lr_scheduler.ChainedScheduler(both, optimizer)
        in_step = lambda step: schedule.step()  # noqa: E731
    if case.startswith("a copy"):
        part = model[1] if case == "a copy of a part" else model
        copied = copy.deepcopy(part)
        renew = lambda step: copied.load_state_dict(part.state_dict())  # noqa: E731
        before_step = renew if case.endswith(("before each step", "part")) else before_step
        before_epoch = renew if case.endswith("before each epoch") else before_epoch
        in_step = (lambda step: step % 3 == 2 and renew(step)) if case.endswith("some steps") else in_step
        in_epoch = renew if case.endswith("after each epoch") else in_epoch
    if case == "a count":
        counter = Count()
        in_step = lambda step: counter.add()  # noqa: E731
    if case.startswith("a metric"):
        metric = Metric()
        in_step = lambda step: metric.add()  # noqa: E731
        if case.endswith("end"):
            in_epoch = lambda epoch: metric.reset()  # noqa: E731
        else:
            before_epoch = lambda epoch: metric.reset()  # noqa: E731
    run.prepare(**objects)
    del registry
    for epoch in run.epochs(Pairs(), 3):
        before_epoch(epoch.number)
        for step in epoch:
            before_step(step.number)
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
    assert capfd.readouterr().out.count("not in any snapshot, but") == 1


def test_a_filter_of_warnings_hides_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The message names the filter."""
    samestep.spawn(train, 1, (tmp_path / "shown", "an average"))
    found = re.search('PYTHONWARNINGS="ignore:(.*)"', capfd.readouterr().out)
    assert found is not None
    samestep.spawn(train, 1, (tmp_path / "hidden", "an average", found[1]))
    assert found[1] not in capfd.readouterr().out
