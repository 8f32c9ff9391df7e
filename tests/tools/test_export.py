"""`samestep export`: its files load into the model without samestep."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, safe_open
from support.snapshots import write_snapshot
from torch import nn
from torch.optim.swa_utils import AveragedModel

from samestep.cli import main
from samestep.errors import Error
from samestep.snapshot.store import Store
from samestep.tools.export import run_export


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight


def write_run(run: Path, *, step: int = 5, name: str | None = None, **objects: Any) -> None:
    """Write a snapshot of these states, in a run that may exist."""
    run.mkdir(exist_ok=True)
    (run / "run.json").write_text(json.dumps({"format": 1, "numbers": {}}))
    state = {"objects": objects, "position": {"step": step, "epoch": 0}, "state": {}}
    write_snapshot(Store(run), state, step=step, name=name)


@pytest.fixture
def models(tmp_path: Path) -> dict[str, nn.Module]:
    """Return the contents of the snapshots of steps 3 and 5 of the run in `tmp_path / "run"`, by name and step."""
    found: dict[str, nn.Module] = {}
    for step, name in ((3, "best"), (5, None)):
        model = Tied()
        average = AveragedModel(model)
        average.update_parameters(model)
        with torch.no_grad():
            average.module.head.bias += 1
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        objects = {"model": model, "ema": average, "optimizer": optimizer}
        states = {key: thing.state_dict() for key, thing in objects.items()}
        write_run(tmp_path / "run", step=step, name=name, **states)
        found |= {f"model {step}": model, f"ema {step}": average.module}
    return found


def assert_loads(file: Path, expected: nn.Module) -> None:
    model = Tied()
    assert model.load_state_dict(load_file(file)).missing_keys == []
    assert model.head.weight is model.embedding.weight
    for key, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def find_files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_file())


def test_the_newest_model(tmp_path: Path, models: dict[str, nn.Module], capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.v1.safetensors"
    assert main(["export", str(tmp_path / "run"), str(file)]) == 0
    assert_loads(file, models["model 5"])
    assert capsys.readouterr().out.startswith(f"{file}: 10 tensors of model after step 5, ")
    with safe_open(file, "pt") as opened:
        assert (opened.metadata()["step"], opened.metadata()["object"]) == ("5", "model")
    assert find_files(tmp_path) == [file.name]


def test_a_model_of_another_name(tmp_path: Path) -> None:
    """The only module that is no average is the default; of two, one must be named."""
    net = Tied()
    states = {"mean": AveragedModel(net).state_dict(), "net": net.state_dict()}
    write_run(tmp_path / "run", step=1, **states)
    write_run(tmp_path / "run", step=2, **states, other=Tied().state_dict())
    with pytest.raises(Error, match="name the model by --object"):
        run_export([str(tmp_path / "run"), str(tmp_path / "x.safetensors")])
    assert run_export([str(tmp_path / "run"), str(tmp_path / "x.safetensors"), "--snapshot", "1"]) == 0
    assert_loads(tmp_path / "x.safetensors", net)


@pytest.mark.parametrize(("which", "step", "name"), [("3", 3, "model"), ("best", 3, "ema"), ("5", 5, "ema")])
def test_another_one(tmp_path: Path, models: dict[str, nn.Module], which: str, step: int, name: str) -> None:
    """The keys of an average are those of its model."""
    if which == "3":
        os.rename(tmp_path / "run/snapshots/best.step-00000003", tmp_path / "run/snapshots/other.step-00000003")
    file = tmp_path / "x.safetensors"
    assert run_export([str(tmp_path / "run"), str(file), "--snapshot", which, "--object", name]) == 0
    assert_loads(file, models[f"{name} {step}"])
    assert find_files(tmp_path) == ["x.safetensors"], "only the requested object"


def test_nothing_is_overwritten(tmp_path: Path, models: dict[str, nn.Module]) -> None:
    mine = "x.safetensors"
    (tmp_path / mine).write_text("mine")
    with pytest.raises(Error, match=rf"/{mine} exists already: name another file, or remove it"):
        run_export([str(tmp_path / "run"), str(tmp_path / "x.safetensors")])
    assert (tmp_path / mine).read_text() == "mine"
    assert find_files(tmp_path) == [mine]


def test_a_damaged_snapshot_is_skipped(
    tmp_path: Path, models: dict[str, nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(tmp_path / "run/snapshots/step-00000005/tensors-00000.safetensors", 100)
    assert run_export([str(tmp_path / "run"), str(tmp_path / "x.safetensors")]) == 0
    assert "step-00000005: tensors-00000.safetensors has 100 bytes" in capsys.readouterr().err
    assert_loads(tmp_path / "x.safetensors", models["model 3"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--object", "teacher"], "holds no teacher: it holds model, ema, optimizer"),
        (["--object", "optimizer"], "optimizer has no tensors by name"),
        (["--snapshot", "4"], "there is no snapshot of step 4"),
    ],
)
def test_what_is_not_there(tmp_path: Path, models: dict[str, nn.Module], arguments: list[str], said: str) -> None:
    with pytest.raises(Error, match=said):
        run_export([str(tmp_path / "run"), str(tmp_path / "x.safetensors"), *arguments])
    assert not (tmp_path / "x.safetensors").exists()


class Linear(nn.Linear):
    def get_extra_state(self) -> Any:
        return np.arange(3)


def test_entries_that_are_no_tensors_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", model=Linear(2, 2).state_dict())
    assert run_export([str(tmp_path / "run"), str(tmp_path / "x.safetensors")]) == 0
    assert "bytes, without _extra_state" in capsys.readouterr().out


def test_an_output_that_cannot_be_written(tmp_path: Path, models: dict[str, nn.Module]) -> None:
    with pytest.raises(Error, match=r"nowhere/x.safetensors cannot be written .*: name another file"):
        run_export([str(tmp_path / "run"), str(tmp_path / "nowhere" / "x.safetensors")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(Error, match=r"it has no run\.json"):
        run_export([str(tmp_path / "empty"), str(tmp_path / "x.safetensors")])
