"""`run.restore` loads the models of a snapshot, wherever the run directory is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from promises.trial import enter_node
from support.tiny import Tiny, tiny_run, update
from torch import nn
from torch.optim.swa_utils import AveragedModel

import samestep
from samestep.torch_internals import gather_whole


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


def train(run_dir: Path | str, place: Path | None = None, has_loop: bool = True) -> list[Any]:
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


@pytest.mark.parametrize(("shard", "where"), [
    ("none", "a directory"), ("none", "a URL"), ("none", "nodes that share nothing"), ("optimizer", "a directory"),
    ("fsdp2", "a directory"),
])  # fmt: skip
def test_the_best_weights(tmp_path: Path, shard: str, where: str) -> None:
    """After the loop, and in later starts without any steps left, at other numbers of ranks and on other machines."""
    run_dir = f"file://{tmp_path}/store" if where == "a URL" else "run" if "nodes" in where else tmp_path / "run"
    place = tmp_path if "nodes" in where else None
    alone = samestep.spawn(train, 1, (tmp_path / "alone",))
    for machine, (num_ranks, has_loop) in enumerate(((3, True), (2, False))):
        env = {"SAMESTEP_SHARD": shard, "SAMESTEP_LOCAL_DIR": str(tmp_path / f"machine-{machine}")}
        assert samestep.spawn(train, num_ranks, (run_dir, place, has_loop), env=env) == alone
    end, best, latest = alone
    assert best[0] != end[0]
    assert best[1] != end[1]
    assert (best[2], end[2]) == (3, 6)
    assert latest == end


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
