"""Snapshots hold states by the names of parameters: neither their order in an optimizer nor `torch.compile` matters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Tiny, update
from torch import nn
from torch.optim.swa_utils import AveragedModel

import samestep
from samestep.errors import RunDirectoryError
from samestep.snapshot.store import Store
from samestep.train.metrics import learning_rates
from samestep.train.objects import Objects, list_params


class Both(nn.Module):
    """A model of which a part may be compiled."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.body: Any = nn.Sequential(nn.Linear(4, 30), *[nn.Linear(30, 30) for _ in range(2)], nn.BatchNorm1d(30))
        self.head = nn.Linear(30, 1)
        if compiled:
            self.body = torch.compile(self.body, backend="eager")

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x))


def train(run_dir: Path | None, num_steps: int, changes: str = "") -> dict[str, Any]:
    """Train, and return the final values by the names of the plain model. `changes`: "order", "ranks", "compile"."""

    def build_model() -> nn.Module:
        whole: Any = Both("compile" in changes)
        return torch.compile(whole, backend="eager") if "compile" in changes else whole

    def build_optimizer(params: list[nn.Parameter]) -> Any:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if "order" in changes or ("ranks" in changes and rank % 2):
            params.reverse()
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    tiny: Any = Tiny(
        run_dir, model=build_model, optimizer=build_optimizer, snapshot_every=1, compare_every=1,
        objects=lambda t: {"ema": AveragedModel(t.model, device="cpu")},
    )  # fmt: skip

    def then(t: Any) -> None:
        t.run.clip_grad_norm_(list_params(t.optimizer), 0.01)
        update(t)
        t.ema.update_parameters(t.model)

    tiny.train(num_steps=num_steps, then=then)
    states = {**tiny.ema.state_dict(), **tiny.model.state_dict()}
    return {key.replace("_orig_mod.", ""): value.tolist() for key, value in states.items()}


@pytest.mark.parametrize("changes", ["order", "compile"])
def test_a_start_with_another_order_or_compiled(tmp_path: Path, changes: str) -> None:
    """In both directions. The snapshots are the same, and so are the momenta and the average."""

    def train_all() -> None:
        alone = train(tmp_path / "alone", 4)
        for number, steps in enumerate((("", changes), (changes, ""))):
            train(tmp_path / str(number), 2, steps[0])
            assert train(tmp_path / str(number), 4, steps[1]) == alone

    samestep.spawn(train_all)
    saved = [Store(tmp_path / each).find("latest") for each in ("alone", "0", "1")]
    assert len({each.manifest["digest"] for each in saved}) == 1
    assert b"_orig_mod" not in b"".join(file.read_bytes() for file in saved[-1].path.iterdir())


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_ranks_with_different_orders(tmp_path: Path, shard: str) -> None:
    alone = samestep.spawn(train, 1, args=(tmp_path / "alone", 4))
    for steps in (2, 4):
        found = samestep.spawn(train, 2, args=(tmp_path / "ranks", steps, "ranks"), env={"SAMESTEP_SHARD": shard})
    assert found == alone


def test_a_group_of_other_parameters() -> None:
    model = nn.Linear(2, 1)

    def divide(*params: nn.Parameter) -> Objects:
        optimizer = torch.optim.SGD([{"params": [param]} for param in params], lr=0.1)
        return Objects({"model": model, "optimizer": optimizer})

    saved = divide(model.weight, model.bias).save()
    with pytest.raises(RunDirectoryError, match=r"groups of optimizer are not those in the snapshot"):
        divide(model.bias, model.weight).load(saved)


def test_learning_rates_have_the_names_of_their_optimizers() -> None:
    first, second = (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr) for lr in (0.5, 0.25))
    assert learning_rates(Objects({"one": first})) == {"train/learning_rate": 0.5}
    both = {"train/learning_rate/one": 0.5, "train/learning_rate/other": 0.25}
    assert learning_rates(Objects({"one": first, "other": second})) == both
