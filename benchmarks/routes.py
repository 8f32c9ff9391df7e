"""How long each route takes for one bucket of gradients, between gloo ranks on this machine.

Every rank holds one gradient. gather: every rank gets all of them and adds up; butterfly: recursive halving and
doubling; chunks: all-to-all, addition, all-gather; all-reduce: the backend's own, whose bits depend on the ranks.
The sweep over sizes shows where gather stops being the best, for `GATHER_MAX_BYTES` in engine/routes.py.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from common import Contestant, Times, build_contestant, build_parser, measure, print_json, print_machine, print_table
from torch import Tensor

import samestep
from samestep.engine import routes
from samestep.plan.tree import build_layout

GRADIENT_BYTES = [5 * 10**6, 100 * 10**6]
SWEEP_BYTES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 26 << 20]
BLOCK_S = 0.1  # about as long as one block of exchanges takes
GATHER, BUTTERFLY, CHUNKS, ALL_REDUCE = "gather", "butterfly", "chunks", "all-reduce"


class AllReduce(routes.Route):
    """The backend's own."""

    def __init__(self, space: routes.Space) -> None:
        root = space.new(space.num_elements)
        super().__init__(space, [root], root)

    def run(self, tag: int) -> routes.Messages:
        yield [dist.all_reduce(self.root, async_op=True)]


ROUTES: dict[str, Callable[[routes.Space], routes.Route]] = {
    GATHER: routes.AllGather, BUTTERFLY: routes.Butterfly, CHUNKS: routes.Chunks, ALL_REDUCE: AllReduce,
}  # fmt: skip


def build_exchange(name: str, num_elements: int, world_size: int, rank: int) -> tuple[Tensor, Callable[[], Tensor]]:
    """This rank's gradient [num_elements], and what sums it over the ranks by the route `name`."""
    # As many micro-batches as ranks: one part each.
    space = routes.Space(torch.zeros, num_elements, torch.float32, build_layout(world_size, world_size), rank)
    route = ROUTES[name](space)

    def run() -> Tensor:
        routes.wait_all([routes.PendingOp(route.run(tag=0))])
        return route.root

    return route.parts[0], run


def run_again_and_again(run: Callable[[], Tensor]) -> Iterator[Tensor]:
    while True:
        yield run()


def run_rank(sizes: Sequence[int], num_rounds: int, block_s: float) -> dict[int, Times]:
    """On each rank: checks and measures all routes for each size in bytes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = [GATHER, BUTTERFLY, CHUNKS, ALL_REDUCE]
    if not build_layout(world_size, world_size).butterfly:
        names.remove(BUTTERFLY)
    results = {}
    for num_bytes in sizes:
        num_elements = -(-num_bytes // (4 * world_size)) * world_size
        contestants = []
        for name in names:
            own, run = build_exchange(name, num_elements, world_size, rank)
            own.fill_(rank + 1.0)
            total = run()
            assert bool((total == world_size * (world_size + 1) / 2).all()), f"{name} gave a wrong sum"
            own.zero_()
            contestants.append(build_contestant(name, run_again_and_again(run)))
        steps_per_block = choose_block(contestants[-1], block_s)
        results[num_bytes] = measure(contestants, num_rounds=num_rounds, steps_per_block=steps_per_block)
    return results


def choose_block(contestant: Contestant, block_s: float) -> int:
    """How many exchanges fill `block_s`, the same on all ranks."""
    contestant.run_steps(1)
    began = time.perf_counter()
    contestant.run_steps(5)
    num_steps = torch.tensor(5 * block_s / (time.perf_counter() - began)).clamp(1, 300).int()
    dist.broadcast(num_steps, 0)
    return int(num_steps)


def format_size(num_bytes: int) -> str:
    for unit, size in (("MB", 10**6), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes % size == 0:
            return f"{num_bytes // size} {unit}"
    return f"{num_bytes:,} B"


def summarize(world_size: int, results: dict[int, Times]) -> list[dict[str, Any]]:
    """Per size: the medians, the best of the engine's routes, and what the engine would take."""
    rows = []
    for num_bytes, times in results.items():
        medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
        best = min((name for name in medians if name != ALL_REDUCE), key=lambda name: medians[name])
        space = routes.Space(torch.zeros, num_bytes // 4, torch.float32, build_layout(world_size, world_size), 0)
        chosen = next(name for name, kind in ROUTES.items() if kind is type(routes.build_route(space)))
        rows.append({"bytes": num_bytes, "ms": medians, "best": best, "chosen": chosen})
    return rows


def print_results(title: str, world_size: int, results: dict[int, Times]) -> None:
    names = list(next(iter(results.values())))
    rows = [
        [format_size(row["bytes"])]
        + [f"{row['ms'][name]:,.3f}" for name in names]
        + [row["best"], row["chosen"], f"{row['ms'][row['chosen']] / row['ms'][row['best']]:.2f}"]
        for row in summarize(world_size, results)
    ]
    print(f"{title}, {world_size} ranks: ms")
    print_table(["", *names, "best route", "engine takes", "by best"], rows)


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=9, help="blocks of each route, after one to warm up")
    args = parser.parse_args()
    sizes, sweep, block_s = GRADIENT_BYTES, SWEEP_BYTES, BLOCK_S
    if args.quick:
        args.ranks, args.rounds, sizes, sweep, block_s = args.ranks[:1], 1, [10**6], [4 << 10, 1 << 20], 0.005
    if not args.json:
        print_machine()
    gradients, sweeps = {}, {}
    for world_size in args.ranks:
        run_args = (sizes, args.rounds, block_s)
        gradients[world_size] = samestep.spawn(run_rank, nprocs=world_size, args=run_args, device="cpu")
        if not args.json:
            print_results("gradients", world_size, gradients[world_size])
    for world_size in args.ranks:
        run_args = (sweep, args.rounds, block_s)
        sweeps[world_size] = samestep.spawn(run_rank, nprocs=world_size, args=run_args, device="cpu")
        if not args.json:
            print_results("sweep", world_size, sweeps[world_size])
    if args.json:
        print_json(
            gradients={world_size: summarize(world_size, results) for world_size, results in gradients.items()},
            sweep={world_size: summarize(world_size, results) for world_size, results in sweeps.items()},
            gather_max_bytes=routes.GATHER_MAX_BYTES,
        )
    else:
        print(f"GATHER_MAX_BYTES is {format_size(routes.GATHER_MAX_BYTES)}")


if __name__ == "__main__":
    main()
