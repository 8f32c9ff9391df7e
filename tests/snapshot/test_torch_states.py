"""State_dicts of torch are saved in a snapshot, and training continues from them with the same bits."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from states import assert_same
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from samestep.snapshot.serialization import digest
from samestep.snapshot.store import Store

Optimizer = torch.optim.Optimizer


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The same bits need the same number of threads, and small tensors are faster on one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def through_disk(store: Store, state: Any) -> Any:
    store.write({"objects": state}, step=1, meta={})
    found = store.find("latest")
    assert found is not None
    restored = store.read(found)["objects"]
    assert_same(restored, state)
    assert found.manifest["digest"] == digest({"objects": restored})
    return restored


class Net(nn.Module):
    """Convolutions, BatchNorm, an embedding tied to the output, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.conv(self.embedding(tokens).transpose(1, 2)))
        return self.head(hidden.mean(2)).float() * self.scale.float()


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 12, (4, 5), generator=generator)

        def closure(tokens: torch.Tensor = tokens) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens), tokens[:, 0])
            loss.backward()
            return loss

        optimizer.step(closure)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    name: lambda params, make=make: make(params, lr=0.01)
    for name, make in vars(torch.optim).items()
    if isinstance(make, type) and issubclass(make, Optimizer) and make is not Optimizer
    if name not in ("SparseAdam", "Muon")  # with sparse gradients, or for matrices only: see below
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
def test_optimizers_continue(name: str, store: Store) -> None:
    build = OPTIMIZERS[name]
    model = Net()
    optimizer = build(model.parameters())
    train(model, optimizer, range(3))
    restored = through_disk(store, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = Net()
    other.load_state_dict(restored["model"])
    other_optimizer = build(other.parameters())
    other_optimizer.load_state_dict(restored["optimizer"])
    for _ in range(2):
        train(model, optimizer, range(3, 5))
        train(other, other_optimizer, range(3, 5))
    assert digest([other.state_dict(), other_optimizer.state_dict()]) == digest(
        [model.state_dict(), optimizer.state_dict()]
    )


def test_the_optimizer_of_sparse_gradients_continues(store: Store) -> None:
    embedding, other = nn.Embedding(9, 4, sparse=True), nn.Embedding(9, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(list(embedding.parameters()))

    def update(module: nn.Embedding, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        module(torch.tensor([1, 4, 4])).square().sum().backward()
        optimizer.step()

    update(embedding, optimizer)
    restored = through_disk(store, {"e": embedding.state_dict(), "o": optimizer.state_dict()})
    other.load_state_dict(restored["e"])
    other_optimizer = torch.optim.SparseAdam(list(other.parameters()))
    other_optimizer.load_state_dict(restored["o"])
    update(embedding, optimizer)
    update(other, other_optimizer)
    assert digest([other.state_dict(), other_optimizer.state_dict()]) == digest(
        [embedding.state_dict(), optimizer.state_dict()]
    )


def test_channels_last_continues_in_the_same_layout(store: Store) -> None:
    def build() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 2))
        model = model.to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), foreach=True)

    def update(model: nn.Module, optimizer: Optimizer) -> None:
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
        optimizer.zero_grad()
        model(x.to(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()

    (model, optimizer), (other, other_optimizer) = build(), build()
    update(model, optimizer)
    restored = through_disk(store, {"m": model.state_dict(), "o": optimizer.state_dict()})
    other.load_state_dict(restored["m"])
    other_optimizer.load_state_dict(restored["o"])
    for one, two in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert one["exp_avg"].stride() == two["exp_avg"].stride()
    update(model, optimizer)
    update(other, other_optimizer)
    assert digest(other.state_dict()) == digest(model.state_dict())


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
@pytest.mark.parametrize("num_steps", [0, 3])
def test_schedules_continue(name: str, num_steps: int, store: Store) -> None:
    def build() -> tuple[Optimizer, Any]:
        params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        optimizer = torch.optim.SGD([{"params": [param]} for param in params], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULES[name](optimizer)

    def advance(optimizer: Optimizer, schedule: Any, steps: range) -> Iterator[list[float]]:
        for step in steps:
            optimizer.step()
            schedule.step(*([0.5 + 0.1 * step] if name == "ReduceLROnPlateau" else []))
            yield [group["lr"] for group in optimizer.param_groups]

    optimizer, schedule = build()
    list(advance(optimizer, schedule, range(num_steps)))
    restored = through_disk(store, {"o": optimizer.state_dict(), "s": schedule.state_dict()})
    other_optimizer, other = build()
    other_optimizer.load_state_dict(restored["o"])
    other.load_state_dict(copy.deepcopy(restored["s"]))
    steps = range(num_steps, num_steps + 8)
    assert list(advance(other_optimizer, other, steps)) == list(advance(optimizer, schedule, steps))
    assert digest(other.state_dict()) == digest(schedule.state_dict())


def test_averaged_models_and_scalers_continue(store: Store) -> None:
    model = Net()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.randint(0, 12, (4, 5))).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        ema.update_parameters(model)
    objects = {"model": model, "ema": ema, "scaler": scaler}
    restored = through_disk(store, {name: thing.state_dict() for name, thing in objects.items()})
    fresh = Net()
    others = {"model": fresh, "ema": AveragedModel(fresh, use_buffers=True), "scaler": torch.amp.GradScaler("cpu")}
    for name, thing in others.items():
        thing.load_state_dict(restored[name])
        assert digest(thing.state_dict()) == digest(objects[name].state_dict())


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
    ],
)
def test_modules_take_their_state_back(build: Callable[[], nn.Module], store: Store) -> None:
    module, other = build(), build()
    other.load_state_dict(through_disk(store, {"m": module.state_dict()})["m"])
    assert digest(other.state_dict()) == digest(module.state_dict())
