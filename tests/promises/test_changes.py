"""A script that has changed since its run began: its settings, data, loops and config. Each change is noticed, and
refused, or made if the script says so.
"""

import itertools
import json
import math
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runs import ask, read_rows
from support.tiny import Pairs, Tiny, tiny_run, update
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules
from torch.utils.data import Dataset

import samestep
from samestep.data.spec import DataSpec
from samestep.engine.passes import MixedPrecision
from samestep.train.objects import Objects
from samestep.train.opening import compare_run, read_samples
from samestep.train.prepared import SnapshotContents

# --- settings of optimizers and schedules -----------------------------------------------------------------------------

NOTHING: dict[str, Any] = {}


def train(run_dir: Path, num_epochs: int, lr: float, length: int, prepare: dict[str, Any] = NOTHING) -> list[float]:
    """The learning rate in each step of this start, with a schedule that steps once per epoch, and the last weights."""
    rates: list[float] = []
    tiny = Tiny(
        run_dir, batch_size=4, config={"lr": lr}, optimizer=lambda params: SGD(params, lr, momentum=0.9),
        model=lambda: nn.Linear(1, 1),
        objects=lambda t: {"schedule": schedules.CosineAnnealingLR(t.optimizer, length), **prepare},
    )  # fmt: skip
    tiny.train(
        num_epochs, data=torch.ones(8, 1), after_epoch=lambda t: t.schedule.step(),
        then=lambda t: [update(t), rates.append(t.optimizer.param_groups[0]["lr"])],
    )  # fmt: skip
    return rates + [param.item() for param in tiny.model.parameters()]


def test_a_changed_learning_rate_is_reported_and_overridden(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    samestep.spawn(train, 1, (run_dir, 2, 0.1, 8))
    samestep.spawn(train, 2, (run_dir, 3, 0.1, 8))
    assert "settings of its first start" not in capfd.readouterr().out, "the schedule has changed the learning rate"
    kept = samestep.spawn(train, 1, (run_dir, 4, 0.01, 8))
    assert kept[:-2] == [schedule_at(3, 0.1, 8)] * 2
    words = r"settings of its first start, not with the script's \(optimizer.lr 0.1 -> 0.01\): .* override=True .*"
    assert re.search(rf"{words}, or start with \S", capfd.readouterr().out)
    assert re.search(r"^  optimizer.lr +0.1 +0.01$", ask("inspect", run_dir), re.M)
    changed = samestep.spawn(train, 2, (run_dir, 5, 0.01, 16, {"override": True}))
    assert changed[:-2] == [schedule_at(4, 0.01, 16)] * 2
    assert "settings (override: optimizer.lr 0.1 -> 0.01, schedule.T_max 8 -> 16)" in capfd.readouterr().out
    samestep.spawn(train, 1, (run_dir, 6, 0.01, 16))
    assert "settings of its first start" not in capfd.readouterr().out, "the run has these settings now"
    # From a snapshot before the override, the run has its first settings. The environment can give the override, too.
    env = {"SAMESTEP_RESUME": "8", "SAMESTEP_OVERRIDE": "1"}
    assert samestep.spawn(train, 2, (run_dir, 5, 0.01, 16), env=env) == changed, "and with the same bits"
    changes = [row["changed"] for row in json.loads((run_dir / "run.json").read_text())["changes"]]
    assert sum("schedule.T_max" in change for change in changes) == 1


def schedule_at(step: int, lr: float, length: int) -> Any:
    return pytest.approx(lr * (1 + math.cos(math.pi * step / length)) / 2)


def build(change: str, settings: Callable[..., tuple[Optimizer, dict[str, Any]]]) -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer, others = settings(model, change == "new")
    return {"model": model, "optimizer": optimizer, **others}


def plain(model: nn.Module, new: bool) -> Any:
    params = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.2 if new else 0.1}]
    return AdamW(params, lr=torch.tensor(0.5 if new else 0.25), betas=(0.8 if new else 0.9, 0.99)), {}


def in_sequence(model: nn.Module, new: bool) -> Any:
    optimizer = SGD(model.parameters(), 0.2 if new else 0.1)
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=2), schedules.CosineAnnealingLR(optimizer, 20 + 20 * new)]
    return optimizer, {"schedule": schedules.SequentialLR(optimizer, parts, [2])}


def another_kind(model: nn.Module, new: bool) -> Any:
    optimizer = SGD(model.parameters(), 0.1)
    kind = schedules.ExponentialLR if new else schedules.StepLR
    return optimizer, {"schedule": kind(optimizer, 0.5 if new else 2)}


CHANGED = {
    plain: {"optimizer.lr", "optimizer.betas", "optimizer.weight_decay"},
    in_sequence: {"optimizer.lr", "schedule[1].T_max"},
    another_kind: {"schedule"},
}


@pytest.mark.parametrize("settings", CHANGED, ids=lambda settings: settings.__name__)
def test_overridden_settings_are_those_of_a_run_begun_with_them(settings: Any) -> None:
    """With constant gradients, the result depends on the settings only: as if the run had always had them."""

    def take_steps(objects: dict[str, Any], num_steps: int) -> list[Any]:
        for _ in range(num_steps):
            for param in objects["model"].parameters():
                param.grad = torch.ones_like(param)
            objects["optimizer"].step()
            if "schedule" in objects:
                objects["schedule"].step()
        return [{key: v for key, v in group.items() if key != "params"} for group in objects["optimizer"].param_groups]

    old = build("old", settings)
    contents = open_contents(old)
    begun_with = json.loads(json.dumps(contents.options.in_force))
    take_steps(old, 5)
    saved = contents.build({}, {}, Objects(old).save())
    objects = build("new", settings)
    for same, expected in ((build("old", settings), NOTHING), (objects, CHANGED[settings])):
        contents = open_contents(same)
        contents.restore(saved, begun_with, overrides=True)
        assert all(name in contents.options.overridden for name in expected)
        assert bool(contents.options.overridden) == bool(expected)
    torch.testing.assert_close(objects["optimizer"].state_dict()["state"], old["optimizer"].state_dict()["state"])
    assert torch.equal(objects["model"].weight, old["model"].weight)
    assert take_steps(objects, 4) == take_steps(build("new", settings), 9)


def open_contents(objects: dict[str, Any]) -> SnapshotContents:
    return SnapshotContents(Objects(objects), MixedPrecision("fp32", torch.device("cpu")), print)


def test_a_plateau_keeps_its_state() -> None:
    def build(lr: float) -> dict[str, Any]:
        model = nn.Linear(1, 1)
        optimizer = SGD(model.parameters(), lr)
        return {"model": model, "optimizer": optimizer, "plateau": schedules.ReduceLROnPlateau(optimizer, patience=0)}

    old = build(0.5)
    contents = open_contents(old)
    for loss in (1.0, 2.0):
        old["plateau"].step(loss)
    objects = build(0.25)
    saved = contents.build({}, {}, Objects(old).save())
    open_contents(objects).restore(saved, contents.options.in_force, overrides=True)
    assert (objects["plateau"].best, objects["plateau"].last_epoch) == (1.0, 2)
    assert objects["optimizer"].param_groups[0]["lr"] == 0.25


# --- config -----------------------------------------------------------------------------------------------------------


def test_a_changed_config(tmp_path: Path) -> None:
    """It is reported, and recorded with the step from which it applies. Earlier steps keep their config."""

    def train(num_epochs: int, lr: float) -> None:
        tiny_run(tmp_path / "run", config={"lr": lr}, num_epochs=num_epochs)

    def find_changes() -> list[tuple[int, str]]:
        changes = json.loads((tmp_path / "run" / "run.json").read_text())["changes"]
        return [(change["after_step"], change["changed"]) for change in changes]

    samestep.spawn(train, 1, (1, 0.1))
    assert find_changes() == []
    samestep.spawn(train, 1, (2, 0.2))
    samestep.spawn(train, 1, (2, 0.3))
    assert find_changes() == [(4, "lr 0.1 -> 0.2"), (8, "lr 0.2 -> 0.3")]
    assert re.search(r"^  4 +lr 0.1 -> 0.2$", ask("inspect", tmp_path / "run"), re.M)
    samestep.spawn(train, 1, (2, 0.2), env={"SAMESTEP_RESUME": "4"})
    assert find_changes() == [(4, "lr 0.1 -> 0.2"), (4, "lr 0.3 -> 0.2")]


# --- loops (the simulated runs kill and stop them: phases.py) ---------------------------------------------------------


def train_two_loops(run_dir: Path, num_epochs: int = 2, length: int = 22, dies_at: int = -1) -> int:
    """Train in two loops on other data. Return the number of steps done."""

    def then(t: Tiny) -> None:
        update(t)
        if t.step.number == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    tiny = Tiny(run_dir, snapshot_every=2, keep_last=99, log_every="2epochs")
    tiny.train(num_epochs, data=Pairs(30), then=then)
    return int(tiny.train(3, data=Pairs(length), then=then).run.steps_done)


def test_a_loop_that_has_changed(tmp_path: Path) -> None:
    """The length of a completed loop cannot change, and neither can the data of the current loop."""
    run_dir = tmp_path / "run"
    with pytest.raises(RuntimeError, match="SIGKILL"):
        samestep.spawn(train_two_loops, 1, (run_dir, 2, 22, 13))
    with pytest.raises(samestep.Error, match=r"loop 2 of the run .* was a different one \(data_length 22 there, 24"):
        samestep.spawn(train_two_loops, 1, (run_dir, 2, 24))
    assert samestep.spawn(train_two_loops, 1, (run_dir, 3, 22)) == 17
    assert samestep.spawn(train_two_loops, 1, (run_dir, 3, 24), env={"SAMESTEP_RESUME": "8"}) == 21
    assert "audit passed" in ask("inspect", run_dir, "--samples")
    assert [row["step"] for row in read_rows(run_dir)] == [8, 15, 21], "after every second epoch"


# --- data -------------------------------------------------------------------------------------------------------------


class Samples(Dataset[Any]):
    """Data sets: some are the same in every start, and others cannot be compared."""

    def __init__(self, kind: str, start: int) -> None:
        self.kind, self.start, self.count, self.reads = kind, start, itertools.count(), list[int]()

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        x = torch.full((2,), float(index))
        values = {
            "other numbers": x + self.start,
            "other numbers in an array": np.ones(3) * self.start,
            "another middle": x + (self.start if index == 2 else 0),
            "augmented": x + torch.randn(2) + float(np.random.rand()),
            "a path": {"x": x, "path": f"/tmp/job-{self.start}/{index}"},
            "a count": x + next(self.count) + 100 * self.start,
            "the time": (x, time.time()),
            "bfloat16": (x + self.start).bfloat16(),
            "another dtype": torch.full((2,), index, dtype=torch.int32 if self.start else torch.int64),
            "an object": object(),
        }
        if self.kind == "unreadable":
            raise KeyError(index)
        return values[self.kind]


OTHER = {"other numbers": 0, "other numbers in an array": 0, "another middle": 2, "bfloat16": 0, "another dtype": 0}
SAME = ["augmented", "a path", "a count", "the time", "an object", "unreadable"]


@pytest.mark.parametrize("kind", [*OTHER, *SAME])
def test_what_counts_as_other_data(kind: str) -> None:
    machine = {"torch": "1"}

    def compare(start: int, record: dict[str, Any], machine: Any = machine, *, overrides: bool = False) -> list[str]:
        spec = DataSpec(Samples(kind, start), collate_fn=lambda samples: samples)
        hashes = read_samples(spec, 3)
        assert spec.dataset.reads == [0, 0, 2, 2, 4, 4]
        return compare_run(hashes, spec, record, machine, overrides=overrides)

    hashes = compare(0, {})
    record = {"machine": machine, "samples": hashes}
    assert compare(0, record) == hashes
    if kind in OTHER:
        with pytest.raises(samestep.Error, match=rf"\(sample {OTHER[kind]} differs\)"):
            compare(1, record)
        assert compare(1, record, overrides=True) == compare(1, record, {"torch": "2"}) != hashes
    else:
        assert compare(1, record) == hashes
