"""A snapshot holds all that torch puts into a state_dict. (test_serialization.py has states of any content.)"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from states import assert_same
from support.snapshots import read_snapshot, write_snapshot
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

from samestep.snapshot.store import Store

Optimizer = torch.optim.Optimizer


def assert_kept(directory: Path, state: Any) -> None:
    """A snapshot of a state gives it back."""
    store = Store(directory)
    write_snapshot(store, {"objects": state}, step=1)
    found = store.find("latest")
    assert found is not None
    assert_same(read_snapshot(store, found)["objects"], state)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    name: lambda params, make=make: make(params, lr=0.01)
    for name, make in vars(torch.optim).items()
    if isinstance(make, type) and issubclass(make, Optimizer) and make is not Optimizer
    if name not in ("SparseAdam", "Muon")  # with sparse gradients, or for matrices only
}
OPTIMIZERS |= {
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adam amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True, betas=(0.8, 0.9)),
    "AdamW tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "RMSprop centered": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.9),
    "Rprop": lambda params: torch.optim.Rprop(params, etas=(0.4, 1.3)),
    "ASGD": lambda params: torch.optim.ASGD(params, t0=2),
    "LBFGS": lambda params: torch.optim.LBFGS(params, max_iter=4, line_search_fn="strong_wolfe"),
    "Muon": lambda params: torch.optim.Muon([param for param in params if param.ndim == 2]),
    "two groups": lambda params: two_groups(list(params)),
}


def two_groups(params: list[nn.Parameter]) -> Optimizer:
    groups = [{"params": params[:1], "lr": 0.1, "name": "head"}, {"params": params[1:], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = OPTIMIZERS[name](model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    for _ in range(3):
        optimizer.step(closure)  # type: ignore[arg-type]
    assert_kept(tmp_path, optimizer.state_dict())


def test_an_optimizer_of_sparse_gradients(tmp_path: Path) -> None:
    embedding = nn.Embedding(9, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(list(embedding.parameters()))
    embedding(torch.tensor([1, 4, 4])).square().sum().backward()
    optimizer.step()
    assert_kept(tmp_path, optimizer.state_dict())


class Decay:
    """A callable with a state, as LambdaLR saves it."""

    def __init__(self) -> None:
        self.factor, self.calls = 0.9, {1: (2, 3.5)}

    def __call__(self, epoch: int) -> float:
        return float(self.factor**epoch)


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda epoch: 0.9**epoch, Decay()]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, Decay()),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, T_mult=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.9),
    "CyclicLR own scale": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, scale_fn=Decay()),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, three_phase=True),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=4),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 8)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.MultiStepLR(o, [4])]
    ),
}


def test_no_schedule_of_torch_is_left_out() -> None:
    names = {name for name in lr_scheduler.__all__ if name not in ("LRScheduler", "_LRScheduler")}
    assert names <= SCHEDULES.keys()


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)], lr=0.1, momentum=0.9)
    schedule = SCHEDULES[name](optimizer)
    for _ in range(3):
        optimizer.step()
        schedule.step(*([0.5] if name == "ReduceLROnPlateau" else []))
    assert_kept(tmp_path, schedule.state_dict())


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 3, 1)),
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
        lambda: nn.TransformerEncoderLayer(4, 2),
        lambda: nn.Linear(3, 3, dtype=torch.bfloat16),
        lambda: nn.Linear(3, 3, dtype=torch.complex64),
        lambda: nn.ParameterDict({"a b/c": torch.ones(2)}),
        lambda: nn.SyncBatchNorm(3),
        lambda: AveragedModel(nn.BatchNorm1d(3), use_buffers=True),
        lambda: nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
        lambda: torch.amp.GradScaler("cpu"),
    ],
)
def test_modules(build: Callable[[], Any], tmp_path: Path) -> None:
    assert_kept(tmp_path, build().state_dict())
