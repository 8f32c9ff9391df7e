"""What `shard` costs: memory, steps, snapshots and bytes between hosts, against stock FSDP2 and DDP.

The transformer of reduction.py, one micro-batch per rank, AdamW, gloo ranks of 1 thread. samestep without `shard`, with
"optimizer" (one copy of the state, or two) and with "fsdp2", the first and the last also with gradients rounded to
bf16; torch's `fully_shard` and DDP in loops written by hand. Steps run in the same processes, in turns. Peak memory is
measured in processes of their own, above what a process holds before it builds its model, in two ways: the high-water
mark of resident memory (RSS), and the same with a mapping for each block of at least 64 KiB, which ends when the block
is freed: the bytes of live tensors. A snapshot is written and waited for; a load is the time from nothing to a model
that can train, on another number of ranks, against torch.distributed.checkpoint (DCP). `--hosts` puts the ranks on two
hosts with a shaped link, and counts the bytes that each host sends. That needs root.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import io
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import (
    Contestant,
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
from reduction import Block, Sequences, Shape, Transformer, compute_loss, run_ddp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from two_hosts import INTERFACE, measure_on, open_two_hosts, shape_link

import samestep

NONE, OPTIMIZER, FSDP2 = "samestep", "samestep, optimizer", "samestep, fsdp2"
STOCK, DDP = "FSDP2 by hand", "DDP by hand"
TWINS = "samestep, optimizer, 2 copies"
ROUNDED, ROUNDED_FSDP2 = "samestep, bf16", "samestep, fsdp2, bf16"
SHARDS: dict[str, Any] = {
    NONE: None,
    OPTIMIZER: "optimizer",
    TWINS: "optimizer",
    FSDP2: "fsdp2",
    ROUNDED: None,
    ROUNDED_FSDP2: "fsdp2",
}
WAYS = [*SHARDS, STOCK, DDP]
SAVING = [NONE, OPTIMIZER, FSDP2, STOCK]
MAX_RATIO = 1.1  # of fsdp2 to stock FSDP2: memory and time
SAMPLES_PER_RANK = 4
SIZES = ("num_layers", "width", "num_heads", "sequence")  # of `Shape`
FULL_SHAPE = [getattr(Shape(), name) for name in SIZES]
QUICK_SHAPE = [1, 64, 2, 16]
MAPPED_BYTES = 64 << 10
M_MMAP_THRESHOLD = -3  # of mallopt
NUM_MICRO_BATCHES = 4  # of the runs with snapshots
PORT = 29500


def build_shape(sizes: list[int]) -> Shape:
    return Shape(**dict(zip(SIZES, sizes, strict=True)))


def build(shape: Shape) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Transformer(shape)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def open_run(way: str, num_micro_batches: int, directory: Path | None = None, **options: Any) -> samestep.Run:
    return samestep.Run(
        directory,
        batch_size=SAMPLES_PER_RANK * num_micro_batches,
        micro_batch_size=SAMPLES_PER_RANK,
        shard=SHARDS[way],
        shard_copies=2 if way == TWINS else 1,
        exchange_dtype="bf16" if way in (ROUNDED, ROUNDED_FSDP2) else None,
        snapshot_every=10**9,
        device="cpu",
        **options,
    )


def train(
    run: samestep.Run, shape: Shape, model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 10**9
) -> Iterator[None]:
    for step in run.steps(Sequences(shape), num_steps):
        for rows in step:
            step.backward(compute_loss(model, rows))
        optimizer.step()
        yield


def run_samestep(shape: Shape, way: str, **options: Any) -> Iterator[None]:
    run = open_run(way, dist.get_world_size(), **options)
    model, optimizer = build(shape)
    run.prepare(model=model, optimizer=optimizer, shard_blocks=[Block])
    yield from train(run, shape, model, optimizer)


def shard_by_hand(shape: Shape) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Transformer(shape)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def run_stock(shape: Shape) -> Iterator[None]:
    model, optimizer = shard_by_hand(shape)
    yield from train_by_hand(shape, model, optimizer)


def train_by_hand(shape: Shape, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    data = Sequences(shape)
    position = dist.get_rank() * SAMPLES_PER_RANK
    while True:
        rows = torch.stack([data[(position + i) % len(data)] for i in range(SAMPLES_PER_RANK)])
        compute_loss(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        position += SAMPLES_PER_RANK * dist.get_world_size()
        yield


def start(shape: Shape, way: str) -> Iterator[None]:
    """Return the loop of a way."""
    if way == STOCK:
        return run_stock(shape)
    if way == DDP:
        world_size = dist.get_world_size()
        return run_ddp(Shape(**vars(shape) | {"batch_size": SAMPLES_PER_RANK * world_size}), world_size)
    return run_samestep(shape, way)


def prepare_rank() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stdout = io.StringIO()  # samestep's own lines, up to the end of the process
    dist.init_process_group("gloo")


# --- memory -----------------------------------------------------------------------------------------------------------


def read_rss(name: str) -> float:
    """Return VmRSS or VmHWM of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(name))


def measure_peak(shape: Shape, way: str, num_steps: int) -> tuple[float, float]:
    """Return the peak of this process above its memory now, in MB: until the end of the first two steps; later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = read_rss("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again
    steps = start(shape, way)
    for _ in range(2):
        next(steps)
    at_start = read_rss("VmHWM") - before
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(num_steps):
        next(steps)
    dist.barrier()
    return at_start, read_rss("VmHWM") - before


def measure_memory(shape: Shape, way: str, num_steps: int) -> dict[str, float]:
    """On each rank, in a process of its own. Returns the largest figures of all ranks, in MB."""
    prepare_rank()
    measure_peak(build_shape(QUICK_SHAPE), way, 1)  # imports, connections
    start_rss, rss = measure_peak(shape, way, num_steps)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    start_live, live = measure_peak(shape, way, num_steps)
    figures = torch.tensor([rss, live, start_rss, start_live])
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    return dict(zip(("rss", "live", "start_rss", "start_live"), figures.tolist(), strict=True))


# --- steps ------------------------------------------------------------------------------------------------------------


class Meter:
    """Counts, per block of steps of each contestant, what the process and its host have used.

    Attributes:
        cpu: CPU seconds of this process per step.
        sent: bytes that this host has sent per step; empty without an interface of its own.
    """

    def __init__(self) -> None:
        self.cpu: Times = {}
        self.sent: Times = {}
        self._counter = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")

    def watch(self, contestant: Contestant, *, counts_bytes: bool) -> Contestant:
        def run_steps(num_steps: int) -> None:
            cpu_s, num_bytes = time.process_time(), self._count_sent() if counts_bytes else 0
            contestant.run_steps(num_steps)
            self.cpu.setdefault(contestant.name, []).append((time.process_time() - cpu_s) / num_steps)
            if counts_bytes:
                dist.barrier()
                self.sent.setdefault(contestant.name, []).append((self._count_sent() - num_bytes) / num_steps)

        return Contestant(contestant.name, run_steps, contestant.deterministic)

    def _count_sent(self) -> int:
        # The file in /sys is that of the network namespace in which /sys was mounted.
        rows = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()]
        return next(int(row[9]) for row in rows if row[0] == f"{INTERFACE}:")


def measure_steps(
    shape: Shape, ways: list[str], num_rounds: int, steps_per_block: int, *, counts_bytes: bool = False
) -> dict[str, Times]:
    """On each rank: measures the ways in turns."""
    meter = Meter()
    contestants = [build_contestant(way, start(shape, way), deterministic=way in SHARDS) for way in ways]
    watched = [meter.watch(each, counts_bytes=counts_bytes) for each in contestants]
    times = measure(watched, num_rounds=num_rounds, steps_per_block=steps_per_block)
    without_first = [{name: values[1:] for name, values in each.items()} for each in (meter.cpu, meter.sent)]
    return dict(zip(("wall", "cpu", "sent"), (times, *without_first), strict=True))


def run_rank(shape: Shape, num_rounds: int, steps_per_block: int) -> dict[str, Times]:
    prepare_rank()
    return measure_steps(shape, WAYS, num_rounds, steps_per_block)


# --- snapshots --------------------------------------------------------------------------------------------------------


def write_snapshot(shape: Shape, way: str, directory: str) -> float:
    """Train for two steps, and write a snapshot. Returns the seconds until it was whole."""
    prepare_rank()
    if way == STOCK:
        model, optimizer = shard_by_hand(shape)
        steps = train_by_hand(shape, model, optimizer)
    else:
        run = open_run(way, NUM_MICRO_BATCHES, Path(directory) / "run")
        model, optimizer = build(shape)
        run.prepare(model=model, optimizer=optimizer, shard_blocks=[Block])
        steps = train(run, shape, model, optimizer, 2)
    for _ in range(2):
        next(steps)
    dist.barrier()
    began = time.perf_counter()
    if way == STOCK:
        dcp.save(_get_state(model, optimizer), checkpoint_id=Path(directory) / "dcp")
    else:
        assert next(steps, "end") == "end"  # the run's last snapshot
    dist.barrier()
    return time.perf_counter() - began


def load_snapshot(shape: Shape, way: str, directory: str) -> float:
    """Load the snapshot. Returns the seconds from nothing to a model that can train."""
    prepare_rank()
    run = None if way == STOCK else open_run(way, NUM_MICRO_BATCHES, Path(directory) / "run")
    dist.barrier()
    began = time.perf_counter()
    if run is None:
        model, optimizer = shard_by_hand(shape)
        state = _get_state(model, optimizer)
        dcp.load(state, checkpoint_id=Path(directory) / "dcp")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    else:
        model, optimizer = build(shape)
        run.prepare(model=model, optimizer=optimizer, shard_blocks=[Block])
    dist.barrier()
    return time.perf_counter() - began


def _get_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def measure_snapshots(shape: Shape, world_sizes: list[int], num_rounds: int) -> dict[str, list[float]]:
    """Write on each number of ranks, and load on the next one. Returns seconds by what is done."""
    found: dict[str, list[float]] = {}
    for number in range(num_rounds):
        for way in SAVING if number % 2 else SAVING[::-1]:
            for writers, readers in zip(world_sizes, [*world_sizes[1:], world_sizes[0]], strict=True):
                with tempfile.TemporaryDirectory() as directory:
                    write_s = spawn(partial(write_snapshot, shape, way, directory), writers)
                    load_s = spawn(partial(load_snapshot, shape, way, directory), readers)
                found.setdefault(f"{way}: write on {writers} ranks", []).append(write_s)
                found.setdefault(f"{way}: load on {readers} ranks", []).append(load_s)
    return found


# --- two hosts --------------------------------------------------------------------------------------------------------


def run_on_host(args: argparse.Namespace, shape: Shape) -> None:
    """On each rank of two hosts. Rank 0 of each host writes what it has measured."""
    local_ranks = args.world_size // 2
    os.environ |= {"RANK": str(args.rank), "WORLD_SIZE": str(args.world_size)}
    os.environ |= {"LOCAL_RANK": str(args.rank % local_ranks), "LOCAL_WORLD_SIZE": str(local_ranks)}
    os.environ |= {"MASTER_ADDR": args.address, "MASTER_PORT": str(PORT)}
    prepare_rank()
    found = measure_steps(shape, WAYS, args.rounds, args.steps, counts_bytes=True)
    if args.rank == 0:
        args.times.write_text(json.dumps(found))


def measure_hosts(world_size: int, mbit: int | None, args: argparse.Namespace) -> dict[str, Times]:
    """Start half of the ranks on each of two hosts, with such a link between them."""
    with open_two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        shape_link(hosts, mbit)
        path = Path(folder) / "times.json"
        words = [sys.executable, __file__, "--times", str(path), "--address", hosts[0].address]
        words += ["--world-size", str(world_size), "--rounds", str(args.rounds), "--steps", str(args.steps)]
        words += ["--shape", *map(str, args.shape)]
        commands = [[*words, "--rank", str(rank)] for rank in range(world_size)]
        homes = [hosts[rank * 2 // world_size] for rank in range(world_size)]
        found: dict[str, Times] = measure_on(homes, commands, path)
        return found


# --- output -----------------------------------------------------------------------------------------------------------


def spawn(function: Callable[[], Any], world_size: int) -> Any:
    return samestep.spawn(function, nprocs=world_size, device="cpu")


def print_memory(world_size: int, memory: dict[str, dict[str, float]]) -> None:
    rows = [[way, *(f"{values[name]:,.0f}" for name in ("rss", "live", "start_rss", "start_live"))]
            for way, values in memory.items()]  # fmt: skip
    header = [f"{world_size} ranks: peak memory of a rank, MB", "steps: RSS", "live", "start: RSS", "live"]
    print_table(header, rows)
    for name, title in {"rss": "RSS", "live": "live tensors"}.items():
        ratio = memory[FSDP2][name] / memory[STOCK][name]
        print(f"{title} in steps, {FSDP2} by {STOCK}: {judge(ratio, MAX_RATIO)}")
    print(flush=True)


def print_steps(title: str, found: dict[str, Times]) -> None:
    times, sent = found["wall"], found["sent"]
    rows = []
    for way, values in times.items():
        cells = [f"{statistics.median(values) * 1e3:,.0f}", f"{statistics.median(found['cpu'][way]) * 1e3:,.0f}"]
        cells += [f"{compute_ratio(times, way, other):.3f}" for other in (STOCK, DDP)]
        cells += [f"{compute_ratio(found['cpu'], way, STOCK):.3f}"]
        cells += [f"{statistics.median(sent[way]) / 1e6:,.1f}"] if sent else []
        rows.append([way, *cells])
    header = [title, "ms", "CPU ms", "by FSDP2", "by DDP", "CPU by FSDP2", *["MB sent per host"][: len(sent)]]
    print_table(header, rows)
    print(f"{FSDP2} by {STOCK}: {judge(compute_ratio(times, FSDP2, STOCK), MAX_RATIO)}\n", flush=True)


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    sizes = ("LAYERS", "WIDTH", "HEADS", "SEQUENCE")
    parser.add_argument("--shape", type=int, nargs=4, metavar=sizes, help="of the model")
    parser.add_argument("--parts", nargs="+", default=["memory", "steps", "snapshots"], help="what to measure")
    parser.add_argument("--hosts", action="store_true", help="measure the steps on two hosts instead")
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 100], help="rates of their link; 0: unshaped")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each, after one to warm up")
    parser.add_argument("--steps", type=int, default=1, help="steps per block")
    parser.add_argument("--times", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world-size", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.shape = args.shape or (QUICK_SHAPE if args.quick else FULL_SHAPE)
    shape = build_shape(args.shape)
    if args.rank is not None:
        run_on_host(args, shape)
        return
    if args.quick:
        args.rounds = 1
    if not args.json:
        print_machine()
        print(f"{sum(param.nbytes for param in Transformer(shape).parameters()) / 1e6:.1f} MB of parameters\n")
    results: dict[str, Any] = {}
    for world_size in args.world_sizes:
        if args.hosts:
            for mbit in args.mbit:
                title = f"{world_size} ranks on 2 hosts, {mbit} Mbit/s" if mbit else f"{world_size} ranks on 2 hosts"
                results[title] = measure_hosts(world_size, mbit or None, args)
                if not args.json:
                    print_steps(title, results[title])
            continue
        if "memory" in args.parts:
            memory = {way: spawn(partial(measure_memory, shape, way, 3), world_size) for way in WAYS}
            results[f"memory on {world_size} ranks"] = memory
            if not args.json:
                print_memory(world_size, memory)
        if "steps" in args.parts:
            found = spawn(partial(run_rank, shape, args.rounds, args.steps), world_size)
            results[f"steps on {world_size} ranks"] = found
            if not args.json:
                print_steps(f"{world_size} ranks: a step", found)
    if "snapshots" in args.parts and not args.hosts:
        seconds = measure_snapshots(shape, args.world_sizes, 1 if args.quick else 3)
        results["snapshots"] = seconds
        if not args.json:
            rows = [[name, f"{statistics.median(values):.2f}"] for name, values in seconds.items()]
            print_table(["snapshots", "s"], rows)
    if args.json:
        print_json(**results)


if __name__ == "__main__":
    main()
