"""Models of many kinds end in the same bits in all modes, on any number of ranks, killed and resumed in other modes."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from promises.models import Transformer, build_pairs, build_texts
from support.runs import read_bits
from support.selection import one_in
from torch import Tensor, nn

import samestep
from samestep.recipes.models.gpt2 import GPT2, GPT2Config
from samestep.recipes.models.resnet import build_resnet
from samestep.recipes.models.seq2seq import Seq2Seq

NUM_STEPS = 5
SELDOM = {"SAMESTEP_SNAPSHOT_EVERY": str(NUM_STEPS)}
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


class Zeros(nn.Linear):
    """A layer that begins with 0."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class Adapted(nn.Module):
    """A frozen layer with a trained product of two small matrices (LoRA, Hu et al. 2021)."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(num_in, num_out).requires_grad_(False)
        self.down, self.up = nn.Linear(num_in, 2, bias=False), Zeros(2, num_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Adapted(6, 16), Adapted(16, 4)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers[1](self.layers[0](x).relu())
        return out


class Images(nn.Module):
    """A residual network on images that are made of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.spread, self.resnet = nn.Linear(6, 3 * 8 * 8), build_resnet("tiny", 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.resnet(self.spread(x).view(-1, 3, 8, 8))
        return out


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Seq2Seq(17, 17, dim=16, num_heads=2, num_layers=1, dropout=0.1, max_length=12)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.inner(tokens, tokens)
        return out


def build_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))


def build_gpt() -> nn.Module:
    return GPT2(GPT2Config(17, 16, 2, 2, 16, 0.1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mlp": (build_mlp, None),
    "gpt": (build_gpt, None),
    "translate": (Translator, ["Seq2Seq"]),
    "resnet": (Images, ["ResidualBlock"]),
    "tied": (Transformer, None),
    "frozen and unused": (Frozen, None),
    "lora": (Adapters, None),
}


def dies(run: samestep.Run, kill_at: int | None, steps: Iterator[Any]) -> Iterator[Any]:
    for step in steps:
        yield step
        if step.number == kill_at and run.rank == run.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def open_run(run_dir: Path) -> samestep.Run:
    return samestep.Run(run_dir, batch_size=15, micro_batch_size=3, snapshot_every=1)


def train_one(name: str, run_dir: Path, kill_at: int | None = None) -> None:
    """Train a model of `MODELS` on texts or features, with clipping and an evaluation."""
    build, blocks = MODELS[name]
    run = open_run(run_dir)
    with run.sharded_init():
        model = build()
    is_text = name in ("gpt", "translate", "tied")
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2)
    run.prepare(model=model, optimizer=optimizer, shard_blocks=blocks)

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
@pytest.mark.parametrize("number", one_in(5, range(len(MODELS) + 1)))
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


class Mixed(nn.Module):
    """Tied embeddings, blocks, a frozen table in bfloat16, and statistics in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Transformer()
        self.table = nn.Embedding(17, 16, dtype=torch.bfloat16).requires_grad_(False)
        self.mix = nn.Linear(16, 17, bias=False)
        self.norm = nn.BatchNorm1d(17, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            more = self.norm(self.mix(self.table(tokens).float()).double().transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.inner(tokens) + more.to(self.mix.weight.dtype)
        return out


def train_mixed(run_dir: Path) -> None:
    """Train with 10 micro-batches per step, in bfloat16, with clipping, two groups and a schedule."""
    run = samestep.Run(run_dir, batch_size=20, micro_batch_size=2, precision="bf16", device="cpu", snapshot_every=2)
    model = Mixed()
    model.norm.requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    run.prepare(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in run.steps(build_texts(50), 5):
        for texts in step:
            with run.autocast():
                loss = F.cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())
            step.backward(loss)
        norm = run.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        run.log(norm=norm)


CASES: dict[str, Callable[[Path], None]] = {
    **{name: partial(train_one, name) for name in MODELS},
    "gan": train_gan,
    "mixed": train_mixed,
}


def train_each(root: Path) -> None:
    """Train every model, one after the other."""
    for name, train in CASES.items():
        train(root / name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("alone")
    samestep.spawn(train_each, 1, (root,), env=SELDOM)
    return root


# Every model of the table is trained, on up to four ranks and on one: 52 s, and 39 s on a busy machine.
@pytest.mark.parametrize(("shard", "world_size"), one_in(7, [
    (shard, world_size) for world_size in (3, 1, 2, 5, 4) for shard in ("fsdp2", "optimizer", "none")
]))  # fmt: skip
def test_one_digest_on_any_number_of_ranks(shard: str, world_size: int, alone: Path, tmp_path: Path) -> None:
    samestep.spawn(train_each, world_size, (tmp_path,), env={"SAMESTEP_SHARD": shard, **SELDOM})
    assert [name for name in CASES if read_bits(tmp_path / name) != read_bits(alone / name)] == []
