"""Models of many kinds end in the same bits in all modes, on any number of ranks, killed and resumed in other modes."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from promises.models import Transformer, build_pairs, build_texts
from support.runs import read_bits
from torch import Tensor, nn

import samestep

NUM_STEPS = 5
# Number of ranks, mode, and the step in which the last rank is killed; None: the run ends.
STARTS: list[tuple[int, str, int | None]] = [
    (5, "fsdp2", 1),
    (2, "optimizer", 2),
    (4, "fsdp2", 3),
    (3, "none", 4),
    (1, "fsdp2", None),
]


class Frozen(nn.Module):
    """A frozen layer, one that is never used, and one that every second call leaves unused."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8).requires_grad_(False)
        self.never, self.rare, self.head = nn.Linear(3, 3), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x).relu()
        return self.head(self.rare(h) if x[0, 0] > 0 else h)


def build_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": build_mlp, "tied": Transformer, "frozen and unused": Frozen}


def dies(run: samestep.Run, kill_at: int | None, steps: Iterator[Any]) -> Iterator[Any]:
    for step in steps:
        yield step
        if step.number == kill_at and run.rank == run.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def open_run(run_dir: Path) -> samestep.Run:
    return samestep.Run(run_dir, batch_size=15, micro_batch_size=3, snapshot_every=1)


def train_one(name: str, run_dir: Path, kill_at: int | None = None) -> None:
    """Train a model of `MODELS` on texts or features, with clipping and an evaluation."""
    run = open_run(run_dir)
    with run.sharded_init():
        model = MODELS[name]()
    is_text = name == "tied"
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2)
    run.prepare(model=model, optimizer=optimizer)

    def compute_loss(batch: Any) -> Tensor:
        if is_text:
            return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        return F.cross_entropy(model(batch[0]), batch[1])

    data: Any = build_texts(40) if is_text else build_pairs(40)
    for step in dies(run, kill_at, run.steps(data, NUM_STEPS)):
        for batch in step:
            step.backward(compute_loss(batch))
        run.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if step.number % 2:
            run.log(run.evaluate(lambda batch: {"loss": compute_loss(batch)}, data))


def train_gan(run_dir: Path, kill_at: int | None = None) -> None:
    """Train two models in turn."""
    run = open_run(run_dir)
    with run.sharded_init():
        generator = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        critic = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.LeakyReLU(), nn.Linear(8, 1))
    opt_g, opt_c = (torch.optim.Adam(each.parameters(), 1e-2, betas=(0.5, 0.999)) for each in (generator, critic))
    run.prepare(generator=generator, critic=critic, opt_g=opt_g, opt_c=opt_c)
    for step in dies(run, kill_at, run.steps(build_pairs(40), NUM_STEPS)):
        for x, _ in step:
            fake = generator(torch.randn(len(x), 2)).detach()
            scores = critic(torch.cat([x, fake]))
            step.backward(F.softplus(torch.cat([-scores[: len(x)], scores[len(x) :]])).mean(), model=critic)
        opt_c.step()
        for x, _ in step:
            step.backward(F.softplus(-critic(generator(torch.randn(len(x), 2)))).mean(), model=generator)
        opt_g.step()


# A start in each mode, with a kill in most of them: 19 s, and 15 s on a busy machine.
@pytest.mark.parametrize("number", range(len(MODELS) + 1))
def test_one_digest_in_all_modes(number: int, tmp_path: Path) -> None:
    """Each model begins with another of the `STARTS`."""
    name = [*MODELS, "gan"][number]
    train, arguments = (train_gan, ()) if name == "gan" else (train_one, (name,))
    samestep.spawn(train, 1, (*arguments, tmp_path / "alone"))
    turn = number % (len(STARTS) - 1)
    starts = [*STARTS[turn:-1], *STARTS[:turn], STARTS[-1]]
    kills = [kill_at for *_, kill_at in STARTS]
    for (world_size, shard, _), kill_at in zip(starts, kills, strict=True):
        env = {"SAMESTEP_SHARD": shard}
        if kill_at is None:
            samestep.spawn(train, world_size, (*arguments, tmp_path / "modes"), env=env)
            continue
        with pytest.raises(RuntimeError, match=r"SIGKILL|by peer"):
            samestep.spawn(train, world_size, (*arguments, tmp_path / "modes", kill_at), env=env)
    assert read_bits(tmp_path / "modes") == read_bits(tmp_path / "alone")
