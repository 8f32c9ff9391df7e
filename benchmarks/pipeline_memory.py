"""The memory with which a model trains on one rank and in pipelines: the least RLIMIT_DATA above that of an empty rank.

The model is built in `run.sharded_init`, so that no rank ever has the parameters of other ranks.
"""

import resource
from pathlib import Path
from typing import Any

import torch
from common import build_parser, print_json, print_machine
from common import print_table as show
from torch import nn

import samestep

NUM_BLOCKS = 8
MEBIBYTE = 1 << 20


class Block(nn.Sequential):
    """The two linear layers of a transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False))


def read_data_bytes() -> int:
    """Return what RLIMIT_DATA limits: the writable private memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))


def train_within(limit: int, width: int) -> None:
    """Train for two steps with so many mebibytes more than before the model is built."""
    run: Any = samestep.Run(None, batch_size=8, micro_batch_size=1, pipeline=4, device="cpu")
    allowed = read_data_bytes() + limit * MEBIBYTE
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    with run.sharded_init():
        model = nn.Sequential(*(Block(width) for _ in range(NUM_BLOCKS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.prepare(model=model, optimizer=optimizer, stages=["2", "4", "6"])
    for step in run.steps(torch.ones(16, width), 2):
        step.run(lambda x: model(x).square().mean())
        optimizer.step()


def fits(num_ranks: int, limit: int, width: int) -> bool:
    try:
        samestep.spawn(train_within, num_ranks, (limit, width), device="cpu")
    except RuntimeError as error:
        if not any(words in str(error) for words in ("can't allocate memory", "can't start new thread")):
            raise
        return False
    except MemoryError:
        return False
    return True


def find_least(num_ranks: int, width: int, most: int, resolution: int) -> int:
    """Return the least limit that is enough, up to a resolution."""
    low, high = 0, most
    while high - low > resolution:
        middle = (low + high) // 2
        if fits(num_ranks, middle, width):
            high = middle
        else:
            low = middle
    return high


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--width", type=int, default=1024, help="of the model")
    args = parser.parse_args()
    sizes, parts = [1, 2, 4], 64
    if args.quick:
        args.width, sizes, parts = 512, [1, 4], 4
    size = NUM_BLOCKS * 8 * args.width**2 * 4 // MEBIBYTE  # of the parameters
    if not args.json:
        print_machine()
    least = {count: find_least(count, args.width, 8 * size, 8 * size // parts) for count in sizes}
    if args.json:
        print_json(parameters=size, least=least)
        return
    rows = [[str(count), f"{limit} MiB"] for count, limit in least.items()]
    show([f"ranks, with {size} MiB of parameters", "enough for a rank"], rows)


if __name__ == "__main__":
    main()
