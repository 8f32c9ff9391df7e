"""What a slow link costs, and how much of it the backward hides: a rank on each of two hosts, the link shaped by tc.

The transformer of reduction.py, one micro-batch per rank. Per link: a step of samestep and of DDP by hand; beside
them the computation alone and the exchange of the same bytes alone (samestep: by halves; DDP: the backend's
all-reduce). No step is shorter than its floor, the longer one of the computation and of bytes / rate. Hidden is what
the step does not show of the exchange: 1 - (step - computation) / exchange alone. Then samestep with several sizes of
buckets. All in the same two processes, in turns. Needs root, for the hosts.
"""

import argparse
import io
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    Contestant,
    Times,
    build_contestant,
    build_parser,
    compute_ratio,
    measure,
    print_json,
    print_machine,
    print_table,
)
from reduction import DDP, SAMESTEP, Sequences, Shape, Transformer, compute_loss, run_ddp, run_samestep
from two_hosts import measure_on, open_two_hosts, shape_link

from samestep.engine import routes
from samestep.plan.tree import build_layout

COMPUTATION, ALL_REDUCE, HALVES = "the computation alone", "all-reduce alone", "exchange by halves alone"
PORT = 29500
QUICK_SHAPE = Shape(num_layers=1, width=64, num_heads=2, sequence=16)


def name_size(mb: float) -> str:
    return f"{SAMESTEP}, buckets of {mb:g} MiB"


def count_bytes(shape: Shape) -> int:
    """Of the gradients, which is what each of two ranks has to send and to receive."""
    return sum(param.numel() * param.element_size() for param in Transformer(shape).parameters())


def run_computation(shape: Shape) -> Iterator[None]:
    """A rank's part of a step, without the other one."""
    model = Transformer(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = Sequences(shape)
    while True:
        rows = torch.stack([data[i] for i in range(shape.batch_size // 2)])
        compute_loss(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def run_halves(shape: Shape) -> Iterator[None]:
    space = routes.Space(torch.zeros, count_bytes(shape) // 4, torch.float32, build_layout(2, 2), dist.get_rank())
    exchange = routes.Butterfly(space)
    while True:
        routes.wait_all([routes.PendingOp(exchange.run(tag=0))])
        yield


def run_all_reduce(shape: Shape) -> Iterator[None]:
    data = torch.zeros(count_bytes(shape) // 4)
    while True:
        dist.all_reduce(data)
        yield


def run_rank(rank: int, address: str, sizes: list[float], num_rounds: int, shape: Shape) -> Times:
    """On each host: measures everything in turns."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stdout = io.StringIO()  # samestep's own lines, up to the end of the process
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(PORT)}
    dist.init_process_group("gloo")
    contestants: list[Contestant] = [
        build_contestant(COMPUTATION, run_computation(shape)),
        build_contestant(ALL_REDUCE, run_all_reduce(shape)),
        build_contestant(HALVES, run_halves(shape)),
        build_contestant(SAMESTEP, run_samestep(shape, 2), deterministic=True),
        build_contestant(DDP, run_ddp(shape, 2)),
    ]
    for mb in sizes:
        num_bytes = int(mb * 2**20)
        steps = run_samestep(shape, 2, (num_bytes, num_bytes))
        contestants.append(build_contestant(name_size(mb), steps, deterministic=True))
    return measure(contestants, num_rounds=num_rounds, steps_per_block=1)


def measure_link(mbit: int | None, args: argparse.Namespace) -> Times:
    """Starts a rank on each of two hosts, with such a link between them."""
    with open_two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        shape_link(hosts, mbit)
        found = Path(folder) / "times.json"
        words = [sys.executable, __file__, "--times", str(found), "--address", hosts[0].address]
        words += ["--rounds", str(args.rounds), "--buckets", *map(str, args.buckets)]
        words += ["--quick"] if args.quick else []
        commands = [[*words, "--rank", str(rank)] for rank in (0, 1)]
        times: Times = measure_on(hosts, commands, found)
        return times


def summarize(times: Times, mbit: int | None, num_bytes: int) -> dict[str, dict[str, float]]:
    """Per contestant: ms; of what is a step, its floor in ms, how much longer it is, and which part is hidden."""
    seconds = {name: statistics.median(values) for name, values in times.items()}
    rows = {name: {"ms": value * 1e3} for name, value in seconds.items()}
    for name in times.keys() - {COMPUTATION, ALL_REDUCE, HALVES}:
        alone = ALL_REDUCE if name == DDP else HALVES
        wire_s = seconds[alone] if mbit is None else num_bytes * 8 / (mbit * 1e6)
        floor_s = max(seconds[COMPUTATION], wire_s)
        hidden = [
            1 - (step_s - computation_s) / alone_s
            for step_s, computation_s, alone_s in zip(times[name], times[COMPUTATION], times[alone], strict=True)
        ]
        rows[name] |= {
            "floor_ms": floor_s * 1e3,
            "by_floor": seconds[name] / floor_s,
            "hidden": statistics.median(hidden),
            "by_ddp": compute_ratio(times, name, DDP),
        }
    return rows


def name_link(mbit: int | None) -> str:
    return "unshaped" if mbit is None else f"{mbit} Mbit/s"


def print_results(mbit: int | None, times: Times, num_bytes: int) -> None:
    rows = []
    for name, row in summarize(times, mbit, num_bytes).items():
        cells = [f"{row['ms']:,.0f}"]
        if "hidden" in row:
            cells += [
                f"{row['floor_ms']:,.0f}",
                f"{row['by_floor']:.2f}",
                f"{row['hidden']:.0%}",
                f"{row['by_ddp']:.3f}",
            ]
        rows.append([name, *cells, *[""] * (5 - len(cells))])
    print_table([name_link(mbit), "ms", "floor", "by floor", "hidden", f"by {DDP}"], rows)
    best = min((statistics.median(values), name) for name, values in times.items() if name.startswith(f"{SAMESTEP}, "))
    print(f"the fastest: {best[1]}\n", flush=True)


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--mbit", type=int, nargs="+", default=[0, 1000, 100], help="rates of the link; 0: unshaped")
    parser.add_argument("--buckets", type=float, nargs="+", default=[1, 2, 4, 8, 25], help="sizes in MiB")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each, after one to warm up")
    parser.add_argument("--times", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = QUICK_SHAPE if args.quick else Shape()
    if args.rank is not None:
        times = run_rank(args.rank, args.address, args.buckets, args.rounds, shape)
        if args.rank == 0:
            args.times.write_text(json.dumps(times))
        return
    if args.quick:
        args.mbit, args.buckets, args.rounds = [1000], [1, 25], 1
    num_bytes = count_bytes(shape)
    if not args.json:
        print_machine()
        print(f"{num_bytes / 1e6:.1f} MB of gradients; 2 ranks, one on each host\n")
    links = [mbit or None for mbit in args.mbit]
    results: dict[str, Any] = {}
    for mbit in links:
        times = measure_link(mbit, args)
        results[name_link(mbit)] = {"summary": summarize(times, mbit, num_bytes), "seconds_per_step": times}
        if not args.json:
            print_results(mbit, times, num_bytes)
    if args.json:
        print_json(gradient_bytes=num_bytes, links=results)


if __name__ == "__main__":
    main()
