"""What exactness costs where the arithmetic is large: a transformer's step against hand-written DDP.

About 10 million parameters, batch 16, sequence 128, 2 gloo ranks of 1 thread, as 2 and as 8 micro-batches. Both
train the same model on the same tokens with the same AdamW, in the same processes, in turns. DDP accumulates under
`no_sync` (forward included) and has `gradient_as_bucket_view=True`, its fast setting.
"""

import io
import statistics
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import (
    Times,
    build_contestant,
    build_parser,
    compute_ratio,
    judge,
    measure,
    print_json,
    print_machine,
    print_table,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import samestep
from samestep.engine import exchange

SAMESTEP, DDP = "samestep", "DDP by hand"
TARGET = 1.02  # of the ratio of their times
NUM_SEQUENCES = 256
BUCKET_BYTES = exchange.LEAST_BUCKET_BYTES, exchange.MAX_BUCKET_BYTES


@dataclass(frozen=True)
class Shape:
    """Of the model and its data."""

    num_layers: int = 6
    width: int = 384
    num_heads: int = 6
    vocabulary: int = 256
    sequence: int = 128
    batch_size: int = 16


class Block(nn.Module):
    """Attention and a perceptron, normalised before."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.num_heads = shape.width, shape.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """Tokens [batch, sequence] to logits; the embedding is tied to the output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Parameter(torch.randn(shape.sequence, shape.width) * 0.02)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.num_layers)))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.tokens(tokens) + self.places)
        return F.linear(self.norm(x), self.tokens.weight)


class Sequences:
    """Random tokens on the host: [sequence + 1] each."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(shape.vocabulary, (NUM_SEQUENCES, shape.sequence + 1), generator=generator)

    def __len__(self) -> int:
        return NUM_SEQUENCES

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def compute_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def run_samestep(shape: Shape, num_micro_batches: int, bucket_bytes: tuple[int, int] = BUCKET_BYTES) -> Iterator[None]:
    """`bucket_bytes`: the least and the largest maximum size of a bucket."""
    run = samestep.Run(
        None,
        batch_size=shape.batch_size,
        micro_batch_size=shape.batch_size // num_micro_batches,
        device="cpu",
    )
    model = Transformer(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with mock.patch.multiple(exchange, LEAST_BUCKET_BYTES=bucket_bytes[0], MAX_BUCKET_BYTES=bucket_bytes[1]):
        run.prepare(model=model, optimizer=optimizer)
    for step in run.steps(Sequences(shape), 10**9):
        for rows in step:
            step.backward(compute_loss(model, rows))
        optimizer.step()
        yield


def run_ddp(shape: Shape, num_micro_batches: int) -> Iterator[None]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Transformer(shape), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = Sequences(shape)
    size, num_own = shape.batch_size // num_micro_batches, num_micro_batches // world_size
    position = rank * size * num_own
    while True:
        for k in range(num_own):
            rows = torch.stack([data[(position + k * size + i) % len(data)] for i in range(size)])
            with nullcontext() if k == num_own - 1 else model.no_sync():
                (compute_loss(model, rows) / num_own).backward()
        optimizer.step()
        optimizer.zero_grad()
        position += shape.batch_size
        yield


def run_rank(shape: Shape, num_micro_batches: int, num_rounds: int, steps_per_block: int) -> Times:
    """On each rank: measures both in turns."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stdout = io.StringIO()  # samestep's own lines, up to the end of the process
    dist.init_process_group("gloo")
    contestants = [
        build_contestant(SAMESTEP, run_samestep(shape, num_micro_batches), deterministic=True),
        build_contestant(DDP, run_ddp(shape, num_micro_batches)),
    ]
    return measure(contestants, num_rounds=num_rounds, steps_per_block=steps_per_block)


def summarize(times: Times) -> dict[str, Any]:
    """The times in ms, and their ratio."""
    return {
        "ms": {name: statistics.median(values) * 1e3 for name, values in times.items()},
        "ratio": compute_ratio(times, SAMESTEP, DDP),
    }


def print_results(num_micro_batches: int, times: Times) -> None:
    summary = summarize(times)
    print_table(
        [f"{num_micro_batches} micro-batches, 2 ranks", "ms per step"],
        [[name, f"{value:,.1f}"] for name, value in summary["ms"].items()],
    )
    print(f"{SAMESTEP} by {DDP}: {judge(summary['ratio'], TARGET)}\n", flush=True)


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 8], help="micro-batches per step")
    parser.add_argument("--rounds", type=int, default=25, help="blocks of each, after one to warm up")
    parser.add_argument("--steps", type=int, default=1, help="steps per block")
    args = parser.parse_args()
    shape = Shape()
    if args.quick:
        shape = Shape(num_layers=1, width=64, num_heads=2, sequence=16)
        args.rounds, args.steps = 2, 2
    if not args.json:
        print_machine()
        num_params = sum(param.numel() for param in Transformer(shape).parameters())
        print(f"{num_params:,} parameters, batch {shape.batch_size}, sequence {shape.sequence}\n")
    results = {}
    for num_micro_batches in args.micro_batches:
        run_args = (shape, num_micro_batches, args.rounds, args.steps)
        results[num_micro_batches] = samestep.spawn(run_rank, nprocs=2, args=run_args, device="cpu")
        if not args.json:
            print_results(num_micro_batches, results[num_micro_batches])
    if args.json:
        summary = {num_micro_batches: summarize(times) for num_micro_batches, times in results.items()}
        print_json(summary=summary, seconds_per_step=results)


if __name__ == "__main__":
    main()
