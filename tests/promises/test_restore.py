"""`run.restore` loads the models of a snapshot, wherever the run directory is."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Tiny, tiny_run, update
from torch import nn
from torch.optim.swa_utils import AveragedModel

import samestep

Result = dict[str, Any]


class Net(nn.Module):
    """With everything that a state can hold: weights, buffers and Python objects."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.calls = nn.Linear(2, 1), nn.BatchNorm1d(1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def train(run_dir: Path | str, place: Path | None, names: tuple[str, ...] = (), has_loop: bool = True) -> Result:
    """The model as it was at "best", at the end, and as restored. With `place`, each rank has its own directory."""
    if place is not None:
        node = place / os.environ["RANK"]
        node.mkdir(exist_ok=True)
        os.chdir(node)
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    tiny: Any = Tiny(
        run_dir, batch_size=4, model=Net, optimizer=lambda params: torch.optim.Adam(params, 0.1),
        objects=lambda t: {"average": AveragedModel(t.model)},
    )  # fmt: skip
    run, model, optimizer, average = tiny.run, tiny.model, tiny.optimizer, tiny.average

    def read() -> list[Any]:
        return [*(value.tolist() for value in model.state_dict().values() if torch.is_tensor(value)), model.calls]

    def after_epoch(t: Tiny) -> None:
        model.calls += 1
        if t.epoch.number == 0:
            run.snapshot("best")
            run.state["best"] = read()

    if has_loop:
        tiny.train(
            3, data=torch.randn(8, 2), after_epoch=after_epoch,
            then=lambda t: [update(t), average.update_parameters(model)],
            body=lambda t, x: t.step.backward(model(x).square().mean() + model.layer.weight.sum()),
        )  # fmt: skip
    end, state = read(), {key: value["exp_avg"].tolist() for key, value in optimizer.state_dict()["state"].items()}
    average_at_end = [value.tolist() for value in average.parameters()]
    run.restore("best", *names)
    assert state == {key: value["exp_avg"].tolist() for key, value in optimizer.state_dict()["state"].items()}
    is_average_kept = average_at_end == [value.tolist() for value in average.parameters()]
    score = run.evaluate(lambda x: {"mean": model(x).mean()}, torch.ones(5, 2))
    result = {"best": run.state["best"], "end": end, "restored": read(), "average kept": is_average_kept, **score}
    gathered = run._context.group.gather(result)
    assert all(each == gathered[0] for each in gathered), "all ranks have the same"
    if has_loop and place is None and "://" not in str(run_dir):
        run.restore(run.steps_done)
        assert read() == end
    return result


@pytest.mark.parametrize("where", ["a directory", "a URL", "nodes that share nothing"])
def test_the_best_weights(tmp_path: Path, where: str) -> None:
    """After the loop, and in later starts without any steps left, at other numbers of ranks and on other machines."""
    run_dir = f"file://{tmp_path}/store" if where == "a URL" else "run" if "nodes" in where else tmp_path / "run"
    results = []
    for machine, num_ranks in enumerate((2, 1 if where == "a directory" else 2)):
        env = {"SAMESTEP_LOCAL_DIR": str(tmp_path / f"machine-{machine}")}
        arguments = (run_dir, tmp_path if "nodes" in where else None)
        results.append(samestep.spawn(train, num_ranks, arguments, env=env))
    assert results[0] == results[1]
    assert results[0]["restored"] == results[0]["best"] != results[0]["end"]
    assert not results[0]["average kept"]
    if where == "a directory":
        model_alone = samestep.spawn(train, 1, (run_dir, None, ("model",)))
        assert model_alone == results[0] | {"average kept": True}
        evaluated = samestep.spawn(train, 2, (run_dir, None, (), False))
        assert evaluated == results[0]


def test_what_cannot_be_restored(tmp_path: Path) -> None:
    run = samestep.Run(tmp_path / "run", batch_size=4)
    with pytest.raises(samestep.Error, match=r"call run\.prepare.* before run\.restore"):
        run.restore("best")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    with pytest.raises(samestep.Error, match=r"there is no snapshot in .*run yet"):
        run.restore("latest")
    for step in run.steps(torch.ones(8, 1), 2):
        for x in step:
            step.backward(model(x).mean())
        optimizer.step()
        with pytest.raises(samestep.Error, match=r"run\.restore in the loop would change what is trained"):
            run.restore("best")
    for which, said in (("best", "no snapshot named best .* there is step 2"), (7, "no snapshot of step 7 .* step 2")):
        with pytest.raises(samestep.Error, match=said):
            run.restore(which)
    with pytest.raises(samestep.Error, match=re.escape("got 'optimizer', but the models of run.prepare are model")):
        run.restore("latest", "optimizer")


def test_a_loop_after_restore(tmp_path: Path) -> None:
    """It would train other weights than those of the newest snapshot."""

    def refuse() -> None:  # in a rank, because a run without a loop keeps its signal handlers until the process ends
        tiny_run(tmp_path / "run", num_steps=1)
        run = Tiny(tmp_path / "run").run
        run.restore("latest")
        with pytest.raises(samestep.Error, match=r"run\.restore was called before the loop"):
            run.steps(torch.ones(8, 4), 2)
        with pytest.raises(samestep.Error, match="this run has no directory"):
            Tiny().run.restore("best")

    samestep.spawn(refuse, 1)


class Calling(Net):
    """Computes with its parameters in `forward` only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) + self.layer.weight.sum()


def train_and_restore(run_dir: Path, has_loop: bool = True) -> list[Any]:
    """Return scores of the model and of its average at the end, and restored, with what the state has besides."""
    tiny: Any = Tiny(
        run_dir, model=Calling, optimizer=lambda params: torch.optim.Adam(params, 0.1),
        objects=lambda t: {"average": AveragedModel(t.model)},
    )  # fmt: skip
    run, model = tiny.run, tiny.model
    data = torch.arange(32.0).view(16, 2).sin()

    def score() -> list[Any]:
        scores = run.evaluate(lambda x: {"model": model(x).mean(), "average": tiny.average(x).mean()}, data)
        return [value.hex() for value in scores.values()]

    def then(t: Tiny) -> None:
        update(t)
        tiny.average.update_parameters(model)
        if t.step.number == 2:
            run.snapshot("best")

    if has_loop:
        tiny.train(num_steps=6, data=data, then=then, body=lambda t, x: t.step.backward(model(x).square().mean()))
    found = [score()]
    for which, *names in (["best", "model"], ["best"], ["latest"]):
        model(data)  # gathers parameters
        run.restore(which, *names)
        found += [[*score(), model.norm.running_mean.tolist()]]
    return found


@pytest.mark.parametrize("shard", ["fsdp2", "optimizer"])
def test_sharded_models(shard: str, tmp_path: Path) -> None:
    """In the run, and in a later start without any steps left."""
    alone = samestep.spawn(train_and_restore, 1, (tmp_path / "alone",))
    env = {"SAMESTEP_SHARD": shard}
    assert samestep.spawn(train_and_restore, 3, (tmp_path / "run",), env=env) == alone
    assert samestep.spawn(train_and_restore, 2, (tmp_path / "run", False), env=env) == alone
    end, *restored = alone
    assert restored[0][:2] not in (end, restored[1][:2])
    assert restored[2][:2] == end


def restore_grown(run_dir: Path) -> None:
    tiny = Tiny(run_dir, model=Calling).train(num_steps=1, data=torch.ones(8, 2))
    tiny.model.register_buffer("extra", torch.zeros(2))
    with pytest.raises(samestep.RunDirectoryError, match=r"does not take its state .*Missing key.*extra"):
        tiny.run.restore("latest")


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    """Every rank says so."""
    samestep.spawn(restore_grown, 2, (tmp_path / "run",), env={"SAMESTEP_SHARD": "fsdp2"})
