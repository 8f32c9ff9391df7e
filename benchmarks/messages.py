"""How many messages, bytes and rounds a step's exchange takes on many ranks, and what it would cost. Starts no rank.

The counts are those of the routes themselves, which run on tensors without memory and send nothing. The costs are a
calculation, not a measurement: `rounds * alpha + bytes * beta + added bytes * gamma` (Thakur, Rabenseifner and Gropp
2005), one bucket after the other, with nothing computed meanwhile.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from typing import Any
from unittest.mock import patch

import torch
from common import build_parser, print_json
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.engine import routes
from samestep.engine.exchange import Exchange, ReductionPlan
from samestep.engine.sharded_sum import ChunkExchange, ChunkSum
from samestep.plan.tree import build_layout
from samestep.world.group import Group

RANKS = (2, 3, 4, 5, 8, 16, 64, 512)
COST_RANKS = (8, 64, 512, 4096)
NUM_ELEMENTS = 1 << 24  # of the gradient whose exchange by each route is counted
NEW = partial(torch.zeros, device="meta")
DDP_BUCKET_BYTES = 25 << 20
TITLES = {
    "gather": "all-gather",
    "butterfly": "butterfly",
    "chunks": "chunks",
    "owners": '`shard="optimizer"`',
    "twins": 'the same, `shard_copies=2`',
    "shards": 'gradients of `shard="fsdp2"`',
    "ring": "ring all-reduce",
}


@dataclass(frozen=True)
class Network:
    """What a message costs: seconds, and seconds per byte; and to add a byte to another.

    Attributes:
        most: the largest number of ranks.
    """

    name: str
    alpha: float
    beta: float
    gamma: float = 1e-12
    most: int = sys.maxsize


NETWORKS = (
    Network("NVLink, 400 GB/s", 10e-6, 1 / 400e9, most=64),
    Network("InfiniBand, 400 Gbit/s per rank", 10e-6, 1 / 50e9),
    Network("10 Gbit/s per rank", 50e-6, 1 / 1.25e9),
)
HOST = NETWORKS[-1]  # between hosts, gloo sends the control block over TCP


@dataclass(frozen=True)
class Count:
    """What one rank does in an exchange.

    Attributes:
        messages, num_bytes: that it sends.
        rounds: how often it waits for messages before it sends the next ones.
        added: bytes that it adds to others.
    """

    messages: float = 0
    num_bytes: float = 0
    rounds: float = 0
    added: float = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(
            self.messages + other.messages,
            self.num_bytes + other.num_bytes,
            self.rounds + other.rounds,
            self.added + other.added,
        )

    def compute_s(self, network: Network) -> float:
        """Return the seconds that the exchange takes."""
        return self.rounds * network.alpha + self.num_bytes * network.beta + self.added * network.gamma


class Recorder(TorchDispatchMode):
    """Takes the place of torch.distributed for one rank, and counts what it would send, and what the rank adds."""

    def __init__(self, world_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self._world_size = world_size
        self.messages = self.num_bytes = self.added = 0

    def isend(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> "Recorder":
        self.messages += 1
        self.num_bytes += tensor.nbytes
        return self

    def irecv(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> "Recorder":
        return self

    def all_to_all_single(self, received: torch.Tensor, sent: torch.Tensor, *_: Any, **__: Any) -> "Recorder":
        self.messages += self._world_size - 1
        self.num_bytes += sent.nbytes * (self._world_size - 1) // self._world_size
        return self

    def wait(self, timeout: object = None) -> None:
        """A message that is never sent is complete."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add_.Tensor:
            self.added += args[0].nbytes
        return func(*args, **kwargs or {})


def count(world_size: int, run: Callable[[], Iterator[object]]) -> Count:
    """Count what one rank does in a route, or in another generator that yields when it waits."""
    with Recorder(world_size) as recorder, patch.object(routes, "dist", recorder):
        rounds = sum(1 for _ in run())
    return Count(recorder.messages, recorder.num_bytes, rounds, recorder.added)


def count_route(route: routes.Route) -> Count:
    """Count what one rank does to exchange a bucket."""
    return count(route.space.layout.world_size, lambda: route.run(0))


def find_largest(counts: Sequence[Count]) -> Count:
    """Return the largest numbers of some ranks."""
    return Count(*(max(values) for values in zip(*(asdict(each).values() for each in counts), strict=True)))


def build_space(world_size: int, rank: int, num_micro_batches: int) -> routes.Space:
    layout = build_layout(num_micro_batches, world_size)
    return routes.Space(NEW, NUM_ELEMENTS, torch.float32, layout, rank)


def count_owned(world_size: int, rank: int, num_micro_batches: int, copies: int) -> Count:
    """Count what shard="optimizer" exchanges: a part of the gradient to each rank, then the parameters along a ring."""
    total = Count()
    size = ceil(NUM_ELEMENTS / world_size)
    for owner in range(world_size):
        layout = build_layout(num_micro_batches, world_size)
        owners = [(owner + k) % world_size for k in range(copies)]
        space = routes.Space(NEW, size, torch.float32, layout, rank, owners)
        total += count_route(routes.ToOwner(space))
    data = [NEW(4 * size, dtype=torch.uint8) for _ in range(world_size)]
    return total + count(world_size, lambda: routes.pass_along_ring(data, rank))


def count_sharded(world_size: int, rank: int, num_micro_batches: int) -> Count:
    """Count what shard="fsdp2" exchanges of gradients, in all rounds of micro-batches."""
    total = Count()
    sums = ChunkSum(num_micro_batches)
    exchange = ChunkExchange(num_micro_batches, rank, world_size, 1)
    chunks = NEW(world_size, ceil(NUM_ELEMENTS / world_size))
    for first in range(0, num_micro_batches, world_size):
        total += count(world_size, partial(exchange.run, chunks, first, sums, None))
    return total


def count_ring(world_size: int, num_bytes: float) -> Count:
    """Count what a ring all-reduce does with a gradient."""
    rounds = 2 * (world_size - 1)
    return Count(rounds, rounds * num_bytes / world_size, rounds, rounds / 2 * num_bytes / world_size)


def count_routes(world_size: int, num_micro_batches: int) -> dict[str, Count]:
    """Count, per route, what the rank with the most work does to exchange one gradient."""

    def count_ranks(count_rank: Callable[[int], Count]) -> Count:
        return find_largest([count_rank(rank) for rank in sorted({0, world_size // 2, world_size - 1})])

    def build(kind: Callable[[routes.Space], routes.Route]) -> Callable[[int], Count]:
        return lambda rank: count_route(kind(build_space(world_size, rank, num_micro_batches)))

    found = {"gather": count_ranks(build(routes.AllGather))}
    if build_layout(num_micro_batches, world_size).butterfly:
        found["butterfly"] = count_ranks(build(routes.Butterfly))
    found["chunks"] = count_ranks(build(routes.Chunks))
    for name, copies in (("owners", 1), ("twins", 2)):
        found[name] = count_ranks(partial(count_owned, world_size, num_micro_batches=num_micro_batches, copies=copies))
    found["shards"] = count_ranks(lambda rank: count_sharded(world_size, rank, num_micro_batches))
    found["ring"] = count_ring(world_size, 4 * NUM_ELEMENTS)
    return found


def count_step(world_size: int, num_params: int, num_tensors: int, num_micro_batches: int) -> dict[str, Count]:
    """Count what one rank exchanges in a step: gradients, control blocks, and what DDP would exchange."""
    sizes = [num_params // num_tensors] * num_tensors
    params = [(str(i), NEW(size)) for i, size in enumerate(sizes)]
    group = Group(0, world_size, torch.device("cpu"))
    group.is_on_one_host = False
    exchange = Exchange(ReductionPlan(params, group), build_layout(num_micro_batches, world_size))
    *gradients, control = map(count_route, exchange.routes)
    num_bytes = 4 * sum(sizes)
    num_buckets = ceil(num_bytes / DDP_BUCKET_BYTES)
    ring = count_ring(world_size, num_bytes / num_buckets)
    return {
        "gradients": sum(gradients, Count()),
        "control": control,
        "ddp": sum([ring] * num_buckets, Count()),
    }


def format_count(count: Count | None, num_bytes: int) -> str:
    return "" if count is None else f"{count.messages:g}; {count.rounds:g}; {count.num_bytes / num_bytes:.3g}"


def print_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--params", type=int, default=124_000_000, help="parameters of the model, float32")
    parser.add_argument("--tensors", type=int, default=148, help="number of its tensors")
    parser.add_argument("--micro-batches", type=int, help="of a step; default: one per rank")
    args = parser.parse_args()
    ranks, cost_ranks = ((2, 3), (8,)) if args.quick else (RANKS, COST_RANKS)
    counts = {each: count_routes(each, args.micro_batches or each) for each in ranks}
    steps = {each: count_step(each, args.params, args.tensors, args.micro_batches or each) for each in cost_ranks}
    if args.json:
        print_json(
            routes={each: {name: asdict(found) for name, found in of.items()} for each, of in counts.items()},
            steps={each: {name: asdict(found) for name, found in of.items()} for each, of in steps.items()},
        )
        return
    rows = [
        [str(each), *(format_count(found.get(name), 4 * NUM_ELEMENTS) for name in TITLES)]
        for each, found in counts.items()
    ]
    print("Messages that a rank sends; rounds; bytes that it sends, relative to the gradient:\n")
    print_markdown(["ranks", *TITLES.values()], rows)
    rows = []
    for each, found in steps.items():
        control = found["control"]
        row = [
            str(each),
            f"{control.messages}; {control.num_bytes / 1000:,.1f} kB; {1e3 * control.compute_s(HOST):.2f}",
        ]
        for network in NETWORKS:
            own, ddp = (1e3 * found[name].compute_s(network) for name in ("gradients", "ddp"))
            row.append(f"{own:,.1f}; {ddp:,.1f}" if each <= network.most else "")
        rows.append(row)
    print("Control block: messages, bytes, ms. Gradients: ms by samestep; ms by a ring all-reduce of DDP's buckets:\n")
    print_markdown(["ranks", "control block", *(network.name for network in NETWORKS)], rows)


if __name__ == "__main__":
    main()
