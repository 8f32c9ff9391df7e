"""A run that was killed at any moment and by any cause resumes with the same command, at any number of ranks, and ends
with the same bits.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from promises.trial import Trial, Undisturbed, fail, resume_is_from
from promises.wrong import learn_well
from support.runs import ask
from support.tiny import Tiny, tiny_run, update
from torch import nn
from torch.optim import Adam, Optimizer

import samestep
from samestep.train.objects import Objects

# --- kills ------------------------------------------------------------------------------------------------------------


def test_a_killed_loader_worker(trial: Trial, undisturbed: Undisturbed) -> None:
    """The user runs the command again. torch raises one of several errors. (The simulated runs kill ranks.)"""
    fault = "kill rank 1 at step 9 in worker"
    assert "samestep: rank" in trial.run("launch", 2, fault, num_workers=2, code=1).output
    trial.assert_struck(fault)
    trial.run("launch", 3, fault, num_workers=2)
    assert trial.num_ends == 1
    assert trial.outcome() == undisturbed()


# --- the run directory ------------------------------------------------------------------------------------------------


def test_a_script_that_changes_its_working_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run stays in the directory that its relative path meant, and messages name that path."""
    (tmp_path / "elsewhere").mkdir()

    def train(num_epochs: int) -> Path:
        os.chdir(tmp_path)
        tiny = Tiny("mine", snapshot_every=2)
        os.chdir("elsewhere")
        tiny.train(num_epochs, then=lambda t: [update(t), os.chdir("/")], sampler=lambda epoch: range(32))
        return tiny.run.dir  # type: ignore[no-any-return]

    for num_epochs in (1, 2):
        assert samestep.spawn(train, 2, (num_epochs,)) == tmp_path / "mine"
    printed = capfd.readouterr().out
    assert resume_is_from(printed) == 4
    assert re.search(r"written to +mine\n", printed), printed
    assert "could not" not in printed
    assert not list((tmp_path / "elsewhere").iterdir())
    ask("inspect", tmp_path / "mine", "--samples")


def test_a_backup_of_another_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run does not resume from it. A message names the snapshot."""
    for name, seed in (("run", 0), ("other", 1)):
        samestep.spawn(learn_well, 1, (tmp_path / name,), {"seed": seed})
    there = tmp_path / "run" / "snapshots"
    shutil.rmtree(there / "step-00000008")
    shutil.copytree(tmp_path / "other" / "snapshots" / "step-00000008", there / "step-00000008")
    capfd.readouterr()
    assert samestep.spawn(learn_well, 1, (tmp_path / "run",)) == 8
    printed = capfd.readouterr().out
    assert "cannot be used: snapshots/step-00000008: it is of another run (seed 1 there, 0 here)" in printed
    assert resume_is_from(printed) == 6


# --- where a run resumes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [6, "best"])
def test_resume_from_an_older_snapshot(
    trial: Trial, undisturbed: Undisturbed, capfd: pytest.CaptureFixture[str], which: int | str
) -> None:
    """Newer snapshots are moved, not lost, and the end is the same."""
    fault = "kill rank 0 at step 13 in forward"
    fail(trial.spawn, 2, fault, snapshot_every=3, settled=True)
    there = set(trial.snapshots)
    assert there == {"step-00000006", "step-00000009", "step-00000012", "best.step-00000010"}
    capfd.readouterr()
    trial.spawn(3, fault, snapshot_every=3, resume=which)
    printed = capfd.readouterr().out
    step = 10 if which == "best" else 6
    assert resume_is_from(printed) == step
    newer = {name for name in there if int(name.partition("step-")[2]) > step}
    moved = {path.name.rpartition("-")[0] for path in trial.dir.glob("abandoned/*")}
    assert moved == newer
    assert ("abandoned" in printed) == bool(newer)
    assert trial.outcome() == undisturbed()


# --- what a script changes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_weights_that_the_script_changes_before_the_loop(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], shard: Any
) -> None:
    """After `run.prepare`. A run that resumes has changed them already: it continues with those that it has saved."""

    def train(name: str, num_steps: int) -> list[list[float]]:
        tiny = Tiny(tmp_path / name, optimizer=lambda params: Adam(params, 0.1), shard=shard)
        with torch.no_grad():
            tiny.model.weight.mul_(1.5)
        tiny.train(num_steps=num_steps)
        return [param.tolist() for param in tiny.model.parameters()]

    whole = samestep.spawn(train, 2, ("whole", 4))
    samestep.spawn(train, 2, ("resumed", 2))
    assert "restored again" not in capfd.readouterr().out
    assert samestep.spawn(train, 2, ("resumed", 4)) == whole
    said = "the script has changed model.weight since run.prepare: the state of step 2 is restored again"
    assert capfd.readouterr().out.count(said) == 1


@pytest.mark.parametrize("given", [("fold0", "fold1"), ("fold0", None)])
def test_several_runs_and_one_directory_from_outside(tmp_path: Path, given: tuple[str, str | None]) -> None:
    """The second run would find the first one's end: nothing to train, and a score of other data."""

    def train() -> None:
        for name in given:
            tiny_run(name, snapshot_every=2, num_epochs=1)

    env = {"SAMESTEP_RUN_DIR": str(tmp_path / "run")}
    with pytest.raises(samestep.Error, match=r"creates a run in fold0 and one in (fold1|None).* leave it out"):
        samestep.spawn(train, 2, env=env)


class Master(Optimizer):
    """Keeps float32 copies of bfloat16 weights, and sums in float64."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 1e-3})

    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param] = {"copy": param.float() + 1e-5, "more": {"sums": [param.double().sum()]}}


def test_an_optimizer_whose_state_is_wider_than_its_weights() -> None:
    """torch would restore it in the weights' dtype."""
    model = nn.Linear(4, 1).bfloat16()
    old, new = Master(model.parameters()), Master(model.parameters())
    old.step()
    Objects({"model": model, "optimizer": new}).load(Objects({"model": model, "optimizer": old}).save())
    torch.testing.assert_close(new.state_dict(), old.state_dict(), rtol=0, atol=0)


def test_an_optimizer_without_a_setting_of_torch() -> None:
    """torch adds its own settings to an optimizer's defaults at each load. The second loop loads a second time."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.Muon(model.parameters())
    saved = {"optimizer": optimizer.state_dict()}
    for _ in range(2):
        Objects({"optimizer": optimizer}).load(saved)
