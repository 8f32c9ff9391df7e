"""`samestep export`: its files load into the model without samestep."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, safe_open
from support.runs import ask, refuse
from support.snapshots import write_snapshot
from torch import nn
from torch.optim.swa_utils import AveragedModel

from samestep.snapshot.store import Store


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight


RUN, FILE = Path("run"), Path("x.safetensors")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_run(*, step: int = 5, name: str | None = None, **objects: Any) -> None:
    """Write a snapshot of these states, in a run that may exist."""
    RUN.mkdir(exist_ok=True)
    (RUN / "run.json").write_text(json.dumps({"format": 1, "numbers": {}}))
    state = {"objects": objects, "position": {"step": step, "epoch": 0}, "state": {}}
    write_snapshot(Store(RUN), state, step=step, name=name)


def export(*words: str) -> str:
    return ask("export", "run", "x.safetensors", *words)


@pytest.fixture
def models() -> dict[str, nn.Module]:
    """Return the contents of the snapshots of steps 3 and 5 of the run, by name and step."""
    found: dict[str, nn.Module] = {}
    for step, name in ((3, "best"), (5, None)):
        model = Tied()
        average = AveragedModel(model)
        average.update_parameters(model)
        with torch.no_grad():
            average.module.head.bias += 1
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        objects = {"model": model, "ema": average, "optimizer": optimizer}
        write_run(step=step, name=name, **{key: thing.state_dict() for key, thing in objects.items()})
        found |= {f"model {step}": model, f"ema {step}": average.module}
    return found


def assert_loads(expected: nn.Module) -> None:
    """Check the file, and that nothing else was written."""
    model = Tied()
    assert model.load_state_dict(load_file(FILE)).missing_keys == []
    assert model.head.weight is model.embedding.weight
    for key, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    assert {*Path().iterdir()} == {RUN, FILE}


def test_the_newest_model(models: dict[str, nn.Module]) -> None:
    assert export().startswith("x.safetensors: 10 tensors of model after step 5, ")
    assert_loads(models["model 5"])
    with safe_open(FILE, "pt") as opened:
        assert (opened.metadata()["step"], opened.metadata()["object"]) == ("5", "model")


def test_a_model_of_another_name() -> None:
    """The only module that is no average is the default; of two, one must be named."""
    net = Tied()
    states = {"mean": AveragedModel(net).state_dict(), "net": net.state_dict()}
    write_run(step=1, **states)
    write_run(step=2, **states, other=Tied().state_dict())
    assert "name the model by --object" in refuse("export", "run", "x.safetensors")
    export("--snapshot", "1")
    assert_loads(net)


@pytest.mark.parametrize(("which", "step", "name"), [("3", 3, "model"), ("best", 3, "ema"), ("5", 5, "ema")])
def test_another_one(models: dict[str, nn.Module], which: str, step: int, name: str) -> None:
    """The keys of an average are those of its model."""
    if which == "3":
        os.rename("run/snapshots/best.step-00000003", "run/snapshots/other.step-00000003")
    export("--snapshot", which, "--object", name)
    assert_loads(models[f"{name} {step}"])


def test_what_is_refused(models: dict[str, nn.Module]) -> None:
    for words, said in (
        (["--object", "teacher"], "has no teacher: it has model, ema, optimizer"),
        (["--object", "optimizer"], "optimizer has no tensors by name"),
        (["--snapshot", "4"], "there is no snapshot of step 4"),
    ):
        assert said in refuse("export", "run", "x.safetensors", *words)
    assert not FILE.exists()
    said = refuse("export", "run", "nowhere/x.safetensors")
    assert re.search("nowhere/x.safetensors cannot be written .*: name another file", said)
    FILE.write_text("mine")
    said = refuse("export", "run", "x.safetensors")
    assert "x.safetensors exists already: name another file, or remove it" in said
    assert FILE.read_text() == "mine"


class Linear(nn.Linear):
    def get_extra_state(self) -> Any:
        return np.arange(3)


def test_entries_that_are_no_tensors_are_named() -> None:
    write_run(model=Linear(2, 2).state_dict())
    assert "bytes, without _extra_state" in export()
