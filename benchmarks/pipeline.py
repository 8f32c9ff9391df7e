"""A step of a pipeline on several ranks, against torch's own 1F1B schedule on the same stages, and against the formula.

All run in the same processes. torch gets each rank's stages as a module, and chunks of the whole batch.
"""

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Times, build_contestant, build_parser, compute_ratio, judge, measure, print_json, print_machine
from common import print_table as show
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import samestep

OURS, TORCH, ALONE = "samestep", "torch", "samestep, 1 rank"
NUM_BLOCKS = 8
TARGET = 1.1


class Block(nn.Module):
    """The two linear layers of a transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))  # type: ignore[no-any-return]


def build(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(NUM_BLOCKS)))


def train(width: int, micro_batches: int, data: Tensor, num_stages: int) -> Iterator[None]:
    """The steps of samestep. A sample is a micro-batch, so that loading it is as cheap as a slice."""
    run = samestep.Run(None, batch_size=micro_batches, micro_batch_size=1, pipeline=num_stages, device="cpu")
    model = build(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    cuts = [str(NUM_BLOCKS * stage // num_stages) for stage in range(1, num_stages)]
    run.prepare(model=model, optimizer=optimizer, stages=cuts)
    for step in run.steps(data, 10**6, shuffle=False):
        step.run(lambda x: F.mse_loss(model(x[0]), x[0]))
        optimizer.step()
        yield


def train_by_torch(width: int, micro_batches: int, data: Tensor) -> Iterator[None]:
    """The steps of torch's schedule."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    blocks = [*build(width)][NUM_BLOCKS * rank // world_size : NUM_BLOCKS * (rank + 1) // world_size]
    module = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    stage: Any = PipelineStage(module, rank, world_size, torch.device("cpu"))
    schedule: Any = Schedule1F1B(stage, micro_batches, loss_fn=F.mse_loss)
    for number in itertools.count():
        begin = number * micro_batches % len(data)
        batch = data[begin : begin + micro_batches].flatten(0, 1)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(batch)
        elif rank == world_size - 1:
            schedule.step(target=batch, losses=[])
        else:
            schedule.step()
        optimizer.step()
        yield


def run_rank(
    num_ranks: int, num_stages: int, width: int, micro_batches: int, rows: int, num_rounds: int, steps: int
) -> Times:
    data = torch.randn(4 * micro_batches, rows, width, generator=torch.Generator().manual_seed(0))
    if num_ranks == 1:
        alone = [build_contestant(ALONE, train(width, micro_batches, data, num_stages))]
        return measure(alone, num_rounds=num_rounds, steps_per_block=steps)
    ours = build_contestant(OURS, train(width, micro_batches, data, num_stages))
    ours.run_steps(1)  # joins the ranks
    theirs = build_contestant(TORCH, train_by_torch(width, micro_batches, data))
    return measure([ours, theirs], num_rounds=num_rounds, steps_per_block=steps)


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks")
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--rows", type=int, default=64, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16], help="per step")
    parser.add_argument("--rounds", type=int, default=5, help="measured blocks of steps")
    args = parser.parse_args()
    steps = 3
    if args.quick:
        args.width, args.rounds, steps, args.micro_batches = 32, 2, 1, [4]
    if not args.json:
        print_machine()
    results: dict[int, dict[str, float]] = {}
    for count in args.micro_batches:
        given = (args.ranks, args.width, count, args.rows, args.rounds, steps)
        times = samestep.spawn(run_rank, args.ranks, (args.ranks, *given), device="cpu")
        alone = statistics.median(samestep.spawn(run_rank, 1, (1, *given), device="cpu")[ALONE])
        ours = statistics.median(times[OURS])
        results[count] = {
            "samestep_ms": ours * 1e3,
            "torch_ms": statistics.median(times[TORCH]) * 1e3,
            "ratio": compute_ratio(times, OURS, TORCH),
            "bubble": 1 - alone / args.ranks / ours,
            "formula": (args.ranks - 1) / (count + args.ranks - 1),
        }
    if args.json:
        print_json(ranks=args.ranks, results=results)
        return
    rows = [
        [str(count), f"{found['samestep_ms']:.1f} ms", f"{found['torch_ms']:.1f} ms", judge(found["ratio"], TARGET),
         f"{found['bubble']:.0%}", f"{found['formula']:.0%}"]
        for count, found in results.items()
    ]  # fmt: skip
    head = [f"micro-batches per step, {args.ranks} ranks", OURS, TORCH, "ratio", "waiting and overhead", "formula"]
    show(head, rows)


if __name__ == "__main__":
    main()
