"""A run that was killed at any moment and by any cause resumes with the same command, at any number of ranks, and ends
with the same bits. `run.restore` loads the models of a snapshot, wherever the run directory is. `--continue-from`
continues another run in a new directory, with other numbers.
"""

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from promises.trial import Trial, Undisturbed, enter_node, fail, resume_is_from
from promises.wrong import learn_well
from support.runs import ask
from support.selection import one_in
from support.tiny import Stream, Tiny, tiny_run, update
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.swa_utils import AveragedModel

import samestep
from samestep.snapshot.store import Store
from samestep.torch_internals import gather_whole
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
    assert newer == {path.name.rpartition("-")[0] for path in trial.dir.glob("abandoned/*")}
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
    optimizer = torch.optim.Muon(nn.Linear(4, 1, bias=False).parameters())
    saved = {"optimizer": optimizer.state_dict()}
    for _ in range(2):
        Objects({"optimizer": optimizer}).load(saved)


# --- run.restore ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """With everything that a state can hold: weights, buffers and Python objects."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.calls = nn.Linear(2, 1), nn.BatchNorm1d(1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) + self.layer.weight.sum()

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def train_and_restore(run_dir: Path | str, place: Path | None = None, has_loop: bool = True) -> list[Any]:
    """Return the scores of the model and of its average, and the model's extra state: at the end, and as restored.

    Args:
        place: where each rank has its own directory, as on nodes that share nothing.
    """
    if place is not None:
        enter_node([place / f"node-{rank}" for rank in range(3)])
    tiny: Any = Tiny(
        run_dir, model=Net, optimizer=lambda params: torch.optim.Adam(params, 0.1),
        objects=lambda t: {"average": AveragedModel(t.model)},
    )  # fmt: skip
    run, model = tiny.run, tiny.model
    data = torch.arange(32.0).view(16, 2).sin()

    def score() -> list[Any]:
        scores = run.evaluate(lambda x: {"model": model(x).mean(), "average": tiny.average(x).mean()}, data)
        return [*(value.hex() for value in scores.values()), model.calls]

    def then(t: Tiny) -> None:
        update(t)
        tiny.average.update_parameters(model)
        model.calls += 1
        if t.step.number == 2:
            run.snapshot("best")

    if has_loop:
        tiny.train(num_steps=6, data=data, then=then, body=lambda t, x: t.step.backward(model(x).square().mean()))
    moments = [state["exp_avg"] for state in tiny.optimizer.state.values()]
    before = [gather_whole(moment).tolist() for moment in moments]
    found = [score()]
    for which in ("best", "latest"):
        model(data)  # gathers parameters
        run.restore(which)
        found += [score()]
    assert before == [gather_whole(moment).tolist() for moment in moments], "an optimizer is not restored"
    return found


@pytest.mark.parametrize(("shard", "where"), one_in(2, [
    ("none", "a directory"), ("none", "a URL"), ("none", "nodes that share nothing"), ("optimizer", "a directory"),
    ("fsdp2", "a directory"),
]))  # fmt: skip
def test_the_best_weights(tmp_path: Path, shard: str, where: str) -> None:
    """After the loop, and in later starts without any steps left, at other numbers of ranks and on other machines."""
    run_dir = f"file://{tmp_path}/store" if where == "a URL" else "run" if "nodes" in where else tmp_path / "run"
    place = tmp_path if "nodes" in where else None
    alone = samestep.spawn(train_and_restore, 1, (tmp_path / "alone",))
    for machine, (num_ranks, has_loop) in enumerate(((3, True), (2, False))):
        env = {"SAMESTEP_SHARD": shard, "SAMESTEP_LOCAL_DIR": str(tmp_path / f"machine-{machine}")}
        assert samestep.spawn(train_and_restore, num_ranks, (run_dir, place, has_loop), env=env) == alone
    end, best, latest = alone
    assert best[0] != end[0]
    assert best[1] != end[1]
    assert (best[2], end[2]) == (3, 6)
    assert latest == end


def test_what_cannot_be_restored(tmp_path: Path) -> None:
    run = Tiny(tmp_path / "run").train(num_steps=2).run
    for which, said in (("best", "no snapshot named best .* there is step 2"), (7, "no snapshot of step 7 .* step 2")):
        with pytest.raises(samestep.Error, match=said):
            run.restore(which)


def test_a_loop_after_restore(tmp_path: Path) -> None:
    """It would train_and_restore other weights than those of the newest snapshot."""

    def refuse() -> None:  # in a rank, because a run without a loop keeps its signal handlers until the process ends
        tiny_run(tmp_path / "run", num_steps=1)
        run = Tiny(tmp_path / "run").run
        run.restore("latest")
        with pytest.raises(samestep.Error, match=r"run\.restore was called before the loop"):
            run.steps(torch.ones(8, 4), 2)

    samestep.spawn(refuse, 1)


# --- --continue-from --------------------------------------------------------------------------------------------------

EVERY = {"snapshot_every": 2, "keep_last": 9}
CONTINUE_FROM = "SAMESTEP_CONTINUE_FROM"


def train_on(run_dir: Path, num_epochs: int = 4, num_ranks: int = 1, **arguments: Any) -> str:
    """Train a tiny model on steps of 8 samples in epochs of 4 steps, and return the digest of the last snapshot."""
    samestep.spawn(tiny_run, num_ranks, (run_dir,), {"num_epochs": num_epochs, **EVERY, **arguments})
    return ask("inspect", run_dir, "--digest")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two of four epochs, that the next runs continue."""
    run_dir = tmp_path / "source"
    train_on(run_dir, 2)
    monkeypatch.setenv(CONTINUE_FROM, str(run_dir))
    return run_dir


def test_with_the_same_numbers_the_bits_are_those_of_one_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    continued = train_on(tmp_path / "new")
    monkeypatch.delenv(CONTINUE_FROM)
    assert train_on(tmp_path / "whole") == continued
    assert ask("diff", tmp_path / "whole", tmp_path / "new").startswith("identical in all 16 common steps")


@pytest.mark.parametrize(
    ("sizes", "num_steps"), one_in(2, [({"batch_size": 16}, 12), ({"micro_batch_size": 4}, 16)]), ids=str
)
def test_with_other_sizes_any_number_of_ranks_gives_the_same_bits(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], num_steps: int
) -> None:
    """Also if it is stopped and resumed, or continued with the first sizes; each epoch uses each sample once."""
    once = train_on(tmp_path / "once", **sizes)
    train_on(tmp_path / "twice", num_ranks=2, max_steps=10, **sizes)
    monkeypatch.delenv(CONTINUE_FROM)
    assert train_on(tmp_path / "twice", **sizes) == once
    assert once != train_on(source)
    shown = ask("inspect", tmp_path / "twice")
    (name,) = sizes
    assert re.search(rf"^  8 +{name} .* -> {sizes[name]}$", shown, re.M)
    assert re.search(rf"^  run +{source}$", shown, re.M)
    samples = ask("inspect", tmp_path / "twice", "--samples")
    assert "audit passed" in samples
    assert samples.count(" epoch 3 ") == (num_steps - 8) // 2
    monkeypatch.setenv(CONTINUE_FROM, str(tmp_path / "twice"))
    train_on(tmp_path / "back", num_epochs=5)
    assert "audit passed" in ask("inspect", tmp_path / "back", "--samples")


def test_a_loop_over_steps_continues_with_the_next_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a further loop of a script would. The number of steps counts those of the first run."""
    train_on(tmp_path / "steps", num_steps=6)
    monkeypatch.setenv(CONTINUE_FROM, str(tmp_path / "steps"))
    train_on(tmp_path / "new", num_steps=10, batch_size=16)
    samples = ask("inspect", tmp_path / "new", "--samples")
    assert re.findall(r"^(\d+) epoch (\d)", samples, re.M) == [("6", "2"), ("7", "2"), ("8", "3"), ("9", "3")]


def test_a_start_that_was_interrupted_copies_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(samestep.Error, match="No space left"):
        patch.setattr(Store, "prepare", fail)
        tiny_run(tmp_path / "new", num_epochs=4, **EVERY)
    monkeypatch.delenv(CONTINUE_FROM)
    assert train_on(tmp_path / "new") == train_on(source)


def test_a_stream_keeps_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its position is that of its lanes, which were read with the seed."""
    stream = {"data": Stream(), "num_steps": 3}
    assert samestep.spawn(tiny_run, 1, (tmp_path / "stream",), stream) == 3
    monkeypatch.setenv(CONTINUE_FROM, str(tmp_path / "stream"))
    for numbers in ({"seed": 1}, {"micro_batch_size": 4}, {"batch_size": 16}):
        with pytest.raises(samestep.Error, match="keep its batch_size, micro_batch_size and seed"):
            samestep.spawn(tiny_run, 1, (tmp_path / "new",), stream | numbers)
    assert samestep.spawn(tiny_run, 1, (tmp_path / "new",), stream | {"num_steps": 5}) == 5


def test_what_cannot_be_continued(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written then."""
    for sizes, wrong, which in (
        ({"batch_size": 16}, r"step 6 of .* is inside an epoch.*: use --continue-from .*source@8$", "@6"),
        ({}, "there is no snapshot named best", "@best"),
        ({"precision": "fp16"}, "has no loss scale", ""),
    ):
        monkeypatch.setenv(CONTINUE_FROM, f"{source}{which}")
        with pytest.raises(samestep.Error, match=wrong):
            train_on(tmp_path / "new", **sizes)
        assert not (tmp_path / "new" / "run.json").exists()
    monkeypatch.setenv(CONTINUE_FROM, str(tmp_path / "other"))
    with pytest.raises(samestep.Error, match="holds a run that does not continue"):
        train_on(source)
