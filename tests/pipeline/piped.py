"""Models for pipelines, and a run that trains one of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import samestep
from samestep.snapshot.serialization import digest

NUM_SAMPLES, BATCH_SIZE, MICRO_BATCH_SIZE = 26, 16, 2  # 8 micro-batches, and 5 in the last step of an epoch


class Block(nn.Module):
    """A residual block with dropout and a frozen parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width))
        self.scale = nn.Parameter(torch.empty(width), requires_grad=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return x + factor * self.scale * self.inner(x)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.blocks = nn.ModuleList(Block(12) for _ in range(4))
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


class Stochastic(Mlp):
    """The model draws a number for each block, and passes it on."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, factor=random.random() + np.random.rand())
        return self.last(x)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """A transformer block, which gets what it adds to as a second tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.outer = Block(width)

    def forward(self, x: Tensor, *, start: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        x = x + self.inner(y, y, y, need_weights=False)[0] + 0.1 * start
        return self.outer(x), start


class Gpt(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        self.places = nn.Parameter(torch.empty(6, width))
        self.blocks = nn.ModuleList(Attention(width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.places, std=0.1)

    def forward(self, texts: Tensor) -> Tensor:
        x = start = F.dropout(self.tokens(texts) + self.places, 0.1, self.training)
        for block in self.blocks:
            x, start = block(x, start=start)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class TiedGpt(Gpt):
    """Weights that distant stages, neighbouring stages, and modules of one stage share."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tokens.weight
        self.blocks[2].outer.inner[0].weight = self.blocks[1].outer.inner[0].weight
        self.blocks[3].outer.inner[3].bias = self.blocks[3].norm.bias


class Stage(nn.Module):
    """A residual block of convolutions with BatchNorm, half as large as its input."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, 2, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.side = nn.Conv2d(before, after, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.side(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.layer1, self.layer2, self.layer3 = Stage(4, 6), Stage(6, 8), Stage(8, 8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def build_data(shape: Sequence[int]) -> TensorDataset:
    """Random inputs, and one of five classes; without a shape, texts, whose next tokens are the targets."""
    generator = torch.Generator().manual_seed(0)
    if shape:
        x = torch.randn(NUM_SAMPLES, *shape, generator=generator)
        return TensorDataset(x, torch.randint(5, (NUM_SAMPLES,), generator=generator))
    texts = torch.randint(11, (NUM_SAMPLES, 7), generator=generator)
    return TensorDataset(texts[:, :-1], texts[:, 1:])


Case = tuple[Callable[[], nn.Module], Sequence[int], Sequence[str]]  # model, shape of a sample, stages
CASES: dict[str, Case] = {
    "mlp": (Mlp, (8,), ("blocks.1", "blocks.2", "last")),
    "stochastic": (Stochastic, (8,), ("blocks.1", "blocks.2", "last")),
    "gpt": (Gpt, (), ("blocks.1", "blocks.2", "blocks.3")),
    "tied": (TiedGpt, (), ("blocks.1", "blocks.2", "blocks.3")),
    "resnet": (ResNet, (3, 8, 8), ("layer1", "layer2", "layer3")),
}


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def open_run(run_dir: Path | None = None, **options: Any) -> Any:
    settings = {"batch_size": BATCH_SIZE, "micro_batch_size": MICRO_BATCH_SIZE, "pipeline": 4, "device": "cpu"}
    return samestep.Run(run_dir, **settings | options)  # type: ignore[arg-type]


def build_in(run: Any, build: Callable[[], nn.Module], *, in_sharded_init: bool) -> nn.Module:
    with run.sharded_init() if in_sharded_init else nullcontext():
        return build()


def train(
    kind: str,
    run_dir: Path | None = None,
    *,
    num_epochs: int = 2,
    clips: bool = False,
    is_weighted: bool = False,
    in_sharded_init: bool = False,
    averages: bool = False,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    **options: Any,
) -> dict[str, Any]:
    """Train a model. Returns what must be the same for each map of stages to ranks; the state on rank 0 only."""
    build, shape, stages = CASES[kind]
    run = open_run(run_dir, **options)
    model = build_in(run, build, in_sharded_init=in_sharded_init)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    average = {"ema": ema} if averages else {}
    updates = optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(updates, 2, 0.9)
    run.prepare(model=model, optimizer=updates, schedule=schedule, stages=stages, **average)
    data = build_data(shape)

    def compute_loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        with run.autocast():
            out = model(x)
        loss = F.cross_entropy(out.float().flatten(0, -2), y.flatten())
        step.log(accuracy=(out.argmax(-1) == y).float().mean(), drawn=torch.rand(()))
        return loss

    def score(scored: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        out = scored(batch[0])
        return {"sum": out.double().sum(), "firsts": out.flatten(1)[:, 0].tolist()}

    seen: list[Any] = []
    for epoch in run.epochs(data, num_epochs):
        for step in epoch:
            step.run(compute_loss, weight=(lambda batch: float(batch[1].sum()) % 3) if is_weighted else None)
            norm = run.clip_grad_norm_(model.parameters(), 0.5).item().hex() if clips else ""
            updates.step()
            schedule.step()
            if averages:
                ema.update_parameters(model)
            seen.append((step.number, step.loss.item().hex(), sorted(step.metrics.items()), norm))
        for scored in (model, *average.values()):
            seen.append(sorted(run.evaluate(partial(score, scored), data).items()))
    states = run._prepared.collect_states()
    return {"seen": seen, "state": digest(states) if run.rank == 0 else ""}


def train_on(num_replicas: int, num_ranks: int, kind: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Train on so many pipelines of so many ranks. Returns the result of rank 0."""
    env = {"SAMESTEP_PIPELINE_RANKS": str(num_ranks)}
    return samestep.spawn(train, num_replicas * num_ranks, (kind, *args), kwargs, env=env)  # type: ignore[no-any-return]
