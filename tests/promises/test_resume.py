"""A run that was killed at any moment and by any cause resumes with the same command, at any number of ranks, and ends
with the same bits.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from promises.trial import Outcome, Trial, read_tree, resume_is_from
from promises.wrong import learn_well
from support.runs import ask
from support.tiny import Tiny, learn, tiny_run, update
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

import samestep
from samestep.watch.trackers.continuation import ServiceLog

Undisturbed = Callable[..., Outcome]
POINTS = "points"


class Points:
    """A tracker with an id. Its service keeps the id and the row of each call in a file."""

    def start(self, info: samestep.TrackerInfo) -> None:
        assert info.dir is not None
        self.kept = ServiceLog(info, POINTS)
        self.kept.begin(self.kept.run_id or str(info.resumed_step))
        self.file = open(info.dir / f"{POINTS}.jsonl", "ab", buffering=0)  # noqa: SIM115

    def log(self, values: Mapping[str, Any], step: int) -> None:
        if new := self.kept.drop_known(values, step):
            self.file.write(json.dumps([self.kept.run_id, {"step": step, **new}]).encode() + b"\n")
            self.kept.keep(new, step)

    def finish(self, status: str) -> None:
        self.file.close()


# --- kills under the launcher -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "flags", "arguments", "code", "said"), [
    ("exit rank 0 at step 10 in before schedule", ["--snapshot-every", "2epochs"], [], 3, "ended with exit code 3"),
    # For the death of a DataLoader worker, torch raises one of several errors.
    ("kill rank 1 at step 9 in worker", [], ["--num-workers", "2"], 1, "samestep: rank"),
])  # fmt: skip
def test_killed_under_the_launcher(
    trial: Trial, undisturbed: Undisturbed, fault: str, flags: list[str], arguments: list[str], code: int, said: str
) -> None:
    """The user runs the command again. (`--max-restarts`, which does it automatically, has its own tests.)"""
    assert said in trial.run("launch", 2, fault, *flags, arguments=arguments, code=code).output
    trial.assert_struck(fault)
    assert trial.num_ends == 0
    trial.run("launch", 3, fault, *flags, arguments=arguments)
    assert trial.num_ends == 1
    assert trial.outcome() == undisturbed()


# --- several kills, and other loops -----------------------------------------------------------------------------------


def test_a_loop_over_steps_with_a_tracker(trial: Trial, undisturbed: Undisturbed) -> None:
    """The tracker keeps its id through the crash, and gets every row once."""
    arguments = {"num_steps": 17, "snapshot_every": 4}
    trial.spawn_to_fail(2, "kill rank 1 at step 7 in before schedule", trackers=[Points()], **arguments)
    trial.spawn(3, trackers=[Points()], **arguments)
    outcome = trial.outcome()
    assert outcome == undisturbed(**arguments)
    lines = (trial.dir / f"{POINTS}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in outcome.metrics.splitlines()]
    wanted = [json.dumps(["0", {name: row[name] for name in row if name != "epoch"}]) for row in rows]
    assert sorted(set(lines), key=lines.index) == wanted
    assert len(lines) <= len(rows) + 1, "SIGKILL between a row and its record repeats one row"


# --- the run directory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "keep", "fault", "saved", "resumed", "at_end"), [
    (3, 3, "kill rank 1 at step 13 in forward", ["5", "best 5", "6", "9", "best 10", "12"], 12, ["9", "12", "15"]),
    ("3", 1, "kill rank 0 at step 10 in after schedule", ["best 5", "9"], 9, ["15"]),
    ("1epochs", 3, "kill rank 0 at step 10 in before schedule", ["best 5", "5"], 5, ["5", "10", "15"]),
    ("never", 3, "kill rank 1 at step 11 in update", ["best 10"], 10, []),
])  # fmt: skip
def test_what_is_saved_and_kept(
    trial: Trial, undisturbed: Undisturbed, capfd: pytest.CaptureFixture[str], every: int | str, keep: int, fault: str,
    saved: list[str], resumed: int, at_end: list[str],
) -> None:  # fmt: skip
    trial.spawn_to_fail(2, fault, snapshot_every=every, keep_last=keep, settled=True)
    trial.assert_struck(fault)
    numbered = [f"step-{int(name):08d}" for name in saved if name.isdecimal()][-keep:]
    there = trial.snapshots
    assert [name for name in there if name.startswith("step-")] == numbered
    assert any("best" in name for name in there) == any("best" in name for name in saved)
    capfd.readouterr()
    trial.spawn(2, fault, snapshot_every=every, keep_last=keep)
    assert resume_is_from(capfd.readouterr().out) == resumed
    assert [name for name in trial.snapshots if "best" not in name] == [f"step-{int(name):08d}" for name in at_end]
    if every != "never":
        assert trial.outcome() == undisturbed()
    assert (trial.dir / "metrics.jsonl").read_bytes() == undisturbed().metrics


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
    trial.spawn_to_fail(2, fault, snapshot_every=3, settled=True)
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


def test_killed_while_going_back(trial: Trial, undisturbed: Undisturbed) -> None:
    """A crash while snapshots are moved leaves a directory from which the run can resume."""
    trial.spawn(2, snapshot_every=3, keep_last=9)
    fault = "kill rank 0 at step 0 in rewinding"
    trial.spawn_to_fail(2, fault, snapshot_every=3, resume=3)
    trial.assert_struck(fault)
    assert "step-00000009" in trial.snapshots, "the kill came between two moves"
    trial.spawn(2, snapshot_every=3, resume="latest")
    assert trial.outcome() == undisturbed()


@pytest.mark.parametrize(("resume", "said"), [("never", "resume is never"), (7, "step 7"), ("bset", "bset")])
def test_resume_refused(trial: Trial, resume: str | int, said: str) -> None:
    trial.spawn(1, epochs=1)
    before = read_tree(trial.dir)
    with pytest.raises(samestep.Error, match=said):
        trial.spawn(2, resume=resume)
    after = read_tree(trial.dir)
    assert before.pop("lock") != after.pop("lock")  # names the last process
    assert before == after


# --- what a script changes --------------------------------------------------------------------------------------------


def test_an_optimizer_without_a_setting_of_torch(tmp_path: Path) -> None:
    """torch adds its own settings to an optimizer's defaults at each load. The second loop loads a second time."""

    def step(t: Tiny) -> None:
        def closure() -> Tensor:
            for x, y in t.step:
                learn(t, x, y)
            return t.step.loss  # type: ignore[no-any-return]

        t.optimizer.step(closure)

    def build(params: Any) -> Optimizer:
        optimizer: Optimizer = torch.optim.Muon(params)
        optimizer.load_state_dict(torch.optim.Muon(params).state_dict())
        return optimizer

    def train(name: str, num_steps: int) -> list[list[float]]:
        tiny = Tiny(tmp_path / name, model=lambda: nn.Linear(4, 1, bias=False), optimizer=build)
        tiny.train(1, then=step).train(num_steps=num_steps, then=step)
        return [param.tolist() for param in tiny.model.parameters()]

    samestep.spawn(train, 1, ("resumed", 2))
    assert samestep.spawn(train, 2, ("resumed", 4)) == samestep.spawn(train, 1, ("whole", 4))


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


@pytest.mark.parametrize("given", [("fold0", "fold1"), ("fold0", None)])
def test_several_runs_and_one_directory_from_outside(tmp_path: Path, given: tuple[str, str | None]) -> None:
    """The second run would find the first one's end: nothing to train, and a score of other data."""

    def train() -> None:
        for name in given:
            tiny_run(name, snapshot_every=2, num_epochs=1)

    env = {"SAMESTEP_RUN_DIR": str(tmp_path / "run")}
    with pytest.raises(samestep.Error, match=r"creates a run in fold0 and one in (fold1|None).* leave it out"):
        samestep.spawn(train, 2, env=env)


def test_an_optimizer_whose_state_is_wider_than_its_weights(tmp_path: Path) -> None:
    """float32 copies of bfloat16 weights, which torch would restore in the weights' dtype."""

    class Master(Optimizer):
        def __init__(self, params: object) -> None:
            super().__init__(params, {"lr": 1e-3})

        @torch.no_grad()
        def step(self) -> None:
            for param in self.param_groups[0]["params"]:
                state = self.state[param]
                if not state:
                    state["copy"], state["more"] = param.float(), {"sums": [torch.zeros((), dtype=torch.float64)]}
                state["copy"] -= 1e-3 * param.grad.float()
                state["more"]["sums"][0] += param.grad.double().sum()
                param.copy_(state["copy"] + 1e-6 * state["more"]["sums"][0])

    def train(num_steps: int, name: str) -> tuple[list[float], list[str]]:
        tiny = Tiny(tmp_path / name, model=lambda: nn.Linear(4, 1).bfloat16(), optimizer=Master)
        tiny.train(num_steps=num_steps, body=lambda t, x, y: learn(t, x.bfloat16(), y.bfloat16()))
        state = tiny.optimizer.state[tiny.model.weight]
        return state["copy"].flatten().tolist(), [str(state["copy"].dtype), str(state["more"]["sums"][0].dtype)]

    samestep.spawn(train, 1, (3, "resumed"))
    resumed = samestep.spawn(train, 1, (6, "resumed"))
    assert resumed == samestep.spawn(train, 1, (6, "alone"))
    assert resumed[1] == ["torch.float32", "torch.float64"]


def test_nothing_left_to_do(trial: Trial, undisturbed: Undisturbed, capfd: pytest.CaptureFixture[str]) -> None:
    trial.spawn(2)
    capfd.readouterr()
    trial.spawn(2)
    printed = capfd.readouterr().out
    status = json.loads((trial.dir / "status.json").read_text())
    assert status["measured"]["samples_per_s"] > 0, "as the first start measured it"
    said = (
        "nothing left to do in this loop: 15 of 15 steps are done, and the script continues after it; to train it "
        "longer, ask for more epochs, or begin anew with env="
    )
    assert said in printed
    assert trial.outcome() == undisturbed()
    assert trial.num_ends == 2
