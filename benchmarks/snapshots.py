"""What a snapshot costs: the loop's stall, the step beside it, the time to write and to check; against torch's ways.

A model whose weights and AdamW state take 500 MB, on 2 gloo ranks of 1 thread (--ranks 1: with a core to spare, where
there are 2). All ways save in the same loop, in
turns: samestep's background snapshots, torch.save on rank 0 (with and without fsync), and async_save of
torch.distributed.checkpoint (DCP). Then, in one process: writing, checking and reading alone, and hashes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import itertools
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import build_parser, judge, print_json, print_machine, print_table
from torch import Tensor, nn

import samestep
from samestep.snapshot.manifest import find_damage
from samestep.snapshot.serialization import encode
from samestep.snapshot.store import Store

WIDTH = 2048
OURS, SAVE, SAVE_SYNC, DCP = "samestep", "torch.save", "torch.save and fsync", "DCP async_save"
MAX_STALL, MAX_STEP, MAX_WRITE = 0.10, 1.05, 1.0
Seconds = dict[str, float]


@dataclass
class Watch:
    """When rank 0 was where in one step, and how long it has waited for a copy in it."""

    began: float = 0.0
    updated: float = 0.0
    waited: float = 0.0


def build_state(num_mb: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that takes `num_mb` MB together with AdamW's two moments."""
    depth = max(1, round(num_mb * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
    return model, torch.optim.AdamW(model.parameters(), 1e-4)


class Loop:
    """samestep's loop over this model, in which each of the ways saves.

    Attributes:
        steps: what was measured, by the step's number.
        written: how long the last snapshot took until it was whole, in seconds.
    """

    def __init__(self, directory: Path, num_mb: int, num_samples: int) -> None:
        size = num_samples * dist.get_world_size()
        self._run = run = samestep.Run(
            directory / "run",
            batch_size=size,
            micro_batch_size=num_samples,
            snapshot_every=10**9,
            keep_last=1,
            device="cpu",
        )
        self._directory = directory
        self.model, self.optimizer = build_state(num_mb)
        run.prepare(model=self.model, optimizer=self.optimizer)
        self.steps: dict[int, Watch] = {-1: Watch()}
        self.written = 0.0
        self._end_of_dcp: Any = None
        self._loop = self._run_steps(torch.randn(2 * size, WIDTH))
        self._watch_snapshotter()

    def _watch_snapshotter(self) -> None:
        snapshotter, directory = self._run._services.snapshotter, self._run._context.location.directory
        join = snapshotter.join_copy

        def join_copy() -> None:
            began = time.perf_counter()
            join()
            self.steps[max(self.steps)].waited += time.perf_counter() - began

        snapshotter.join_copy = join_copy  # type: ignore[method-assign]
        if directory is not None:
            commit = directory.store.commit

            def commit_and_look(*args: Any, **kwargs: Any) -> Path:
                path = commit(*args, **kwargs)
                self.written = time.perf_counter() - self.steps[kwargs["step"] - 1].updated
                return path

            directory.store.commit = commit_and_look  # type: ignore[method-assign]

    def _run_steps(self, samples: Tensor) -> Iterator[int]:
        for step in self._run.steps(samples, 10**6):
            watch = self.steps[step.number] = Watch()
            for x in step:
                watch.began = time.perf_counter()
                step.backward((self.model(x) ** 2).mean())
            self.optimizer.step()
            watch.updated = time.perf_counter()
            yield step.number

    def save(self, way: str) -> None:
        """Within the body of a step, after its update."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        began = time.perf_counter()
        if way == OURS:
            self._run._services.snapshotter.want()
        elif way == DCP:
            future: Any = dcp.async_save(state, checkpoint_id=self._directory / "dcp")

            def note(_: Any) -> None:
                self.written = time.perf_counter() - began

            future.add_done_callback(note)
            self._end_of_dcp = future
        elif dist.get_rank() == 0:
            save_by_torch(state, self._directory / "state.pt", sync=way == SAVE_SYNC)
            self.written = time.perf_counter() - began

    def measure(self, way: str, num_steps: int) -> Seconds:
        """Some steps, a snapshot, and more steps, of which the last are alone again."""
        first = next(self._loop) + 1
        for _ in range(num_steps):
            last = next(self._loop)
        self.save(way)
        for _ in range(num_steps):
            next(self._loop)
        self._run._services.snapshotter.wait_until_written()
        if self._end_of_dcp is not None:
            self._end_of_dcp.result()
            self._end_of_dcp = None
        steps = [self.steps[number] for number in range(first - 1, last + 1)]
        pauses = [after.began - before.updated for before, after in itertools.pairwise(steps)]
        lengths = [step.updated - step.began - step.waited for step in steps[1:]]
        beside = self.steps[last + 1]
        whole = self.steps[last + num_steps].updated - steps[-1].updated
        ordinary = statistics.median(lengths) + statistics.median(pauses)
        return {
            "ordinary": statistics.median(lengths),
            "stall": beside.began - steps[-1].updated - statistics.median(pauses) + beside.waited,
            "beside": beside.updated - beside.began - beside.waited,
            "lost": whole - num_steps * ordinary,
            "written": self.written,
        }

    def end(self) -> None:
        self._run.stop()
        for _ in self._loop:
            pass


def save_by_torch(state: Any, path: Path, *, sync: bool) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def replace_by_torch(state: Any, path: Path) -> None:
    """As it has to be done for a crash to leave the old one or the new one."""
    new = path.with_suffix(".new")
    save_by_torch(state, new, sync=True)
    os.replace(new, path)


def run_rank(
    directory: str, num_mb: int, num_samples: int, num_rounds: int, num_steps: int
) -> dict[str, list[Seconds]]:
    """On each rank; rank 0 returns what it measured, by the way and the round. The first round warms up."""
    torch.set_num_threads(1)
    sys.stdout = io.StringIO()  # samestep's own lines, up to the end of the process
    dist.init_process_group("gloo")
    loop = Loop(Path(directory), num_mb, num_samples)
    ways = [OURS, SAVE, SAVE_SYNC, DCP]
    found: dict[str, list[Seconds]] = {way: [] for way in ways}
    for number in range(num_rounds + 1):
        for way in ways if number % 2 else ways[::-1]:
            dist.barrier()
            if dist.get_rank() == 0:
                os.sync()
            dist.barrier()
            seconds = loop.measure(way, num_steps)
            if number:
                found[way].append(seconds)
    loop.end()
    return found


def measure_files(directory: str, num_mb: int, num_rounds: int) -> dict[str, list[float]]:
    """In one process with nothing beside it: seconds to write, check and read, by what is done."""
    torch.set_num_threads(1)
    model, optimizer = build_state(num_mb)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    objects = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state = {"objects": objects, "position": {"step": 1, "epoch": 0}, "state": {}}
    store, path = Store(Path(directory) / "store"), Path(directory) / "state.pt"
    store.path.parent.mkdir()
    structure, tensors = encode(state)

    def write() -> Path:
        place = store.begin(1, None)
        return store.commit(place, store.prepare(place, tensors), structure, step=1, name=None, meta={})

    file = write() / "tensors-00000.safetensors"
    buffer = memoryview(bytearray(1 << 20))

    def read_file() -> None:
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass

    def check() -> None:
        (snapshot,) = store.snapshots()
        assert find_damage(snapshot.path, snapshot.manifest) is None

    def load() -> None:
        snapshot = store.find("latest")
        assert snapshot is not None
        saved = store.open(snapshot)
        saved.fill(saved.contents)

    works: dict[str, Callable[[], object]] = {
        "write: samestep": write,
        "write: torch.save": lambda: save_by_torch(objects, path, sync=False),
        "write: torch.save and fsync": lambda: save_by_torch(objects, path, sync=True),
        "write: torch.save, fsync and rename": lambda: replace_by_torch(objects, path),
        "read: the file alone": read_file,
        "read: samestep's check of every byte": check,
        "read: samestep, check and load": load,
        "read: torch.load": lambda: torch.load(path, weights_only=True),
    }
    return time_all(works, num_rounds, before=os.sync)


def measure_hashes(num_mb: int, num_rounds: int) -> dict[str, list[float]]:
    """Seconds to hash as many bytes as the state has, in pieces of 16 MB, in one thread."""
    data = memoryview(os.urandom(16 << 20))
    count = max(1, round(num_mb * 1e6 / len(data)))
    hashes: dict[str, Callable[[Any], object]] = {
        name: lambda piece, name=name: hashlib.new(name, piece).digest()  # type: ignore[misc]
        for name in ("sha256", "blake2b", "sha1", "md5", "sha3_256")
    }
    hashes["crc32 of zlib"] = zlib.crc32
    if importlib.util.find_spec("xxhash"):
        import xxhash

        hashes["xxh3_128"] = lambda piece: xxhash.xxh3_128(piece).digest()
    if importlib.util.find_spec("blake3"):
        import blake3

        hashes["blake3"] = lambda piece: blake3.blake3(piece).digest()

    def hash_all(name: str) -> None:
        for _ in range(count):
            hashes[name](data)

    return time_all({name: partial(hash_all, name) for name in hashes}, num_rounds)


def time_all(
    works: dict[str, Callable[[], object]], num_rounds: int, before: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(num_rounds + 1):
        for name in works if number % 2 else reversed(works):
            before()
            began = time.perf_counter()
            works[name]()
            if number:
                found[name].append(time.perf_counter() - began)
    return found


def compute_ratio(found: dict[str, list[Seconds]], way: str, what: str, other: str, other_what: str) -> float:
    pairs = zip(found[way], found[other], strict=True)
    return statistics.median(one[what] / two[other_what] for one, two in pairs)


def summarize(found: dict[str, list[Seconds]]) -> dict[str, dict[str, float]]:
    summary = {}
    for way, rounds in found.items():
        summary[way] = {what: statistics.median(seconds[what] for seconds in rounds) for what in rounds[0]}
        summary[way] |= {
            "stall_by_torch_save": compute_ratio(found, way, "stall", SAVE, "stall"),
            "beside_by_ordinary": compute_ratio(found, way, "beside", way, "ordinary"),
            "written_by_torch_save": compute_ratio(found, way, "written", SAVE, "written"),
            "written_by_torch_save_and_fsync": compute_ratio(found, way, "written", SAVE_SYNC, "written"),
        }
    return summary


def print_loop(summary: dict[str, dict[str, float]]) -> None:
    rows = []
    for way, row in summary.items():
        is_ours = way == OURS
        rows.append([
            way, f"{row['stall'] * 1e3:,.0f}", judge(row["stall_by_torch_save"], MAX_STALL if is_ours else None),
            judge(row["beside_by_ordinary"], MAX_STEP if is_ours else None), f"{row['written']:.2f}",
            judge(row["written_by_torch_save"], MAX_WRITE if is_ours else None), f"{row['lost'] * 1e3:,.0f}",
        ])  # fmt: skip
    print_table(
        ["way", "stall ms", "by torch.save's", "step beside it", "written s", "by torch.save's", "lost in all ms"], rows
    )
    ordinary = statistics.median(row["ordinary"] for row in summary.values())
    print(f"an ordinary step takes {ordinary:.2f} s\n")


def print_alone(title: str, times: dict[str, list[float]], num_mb: int, other: str) -> None:
    rows = []
    for name, values in times.items():
        ratio = statistics.median(a / b for a, b in zip(values, times[other], strict=True))
        seconds = statistics.median(values)
        rows.append([name, f"{seconds:.3f}", f"{num_mb / 1e3 / seconds:.2f}", f"{ratio:.2f}"])
    print_table([title, "s", "GB/s", f"by {other}"], rows)


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--mb", type=int, default=500, help="of weights and optimizer state")
    parser.add_argument("--samples", type=int, default=128, help="of each rank in a step")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="snapshots of each way, after one to warm up")
    parser.add_argument("--steps", type=int, default=4, help="before each snapshot, and after it")
    parser.add_argument("--directory", help="where to write; default: the system's for temporary files")
    args = parser.parse_args()
    if args.quick:
        args.mb, args.samples, args.rounds, args.steps = 50, 8, 2, 2
    if not args.json:
        print_machine()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        run_args = (directory, args.mb, args.samples, args.rounds, args.steps)
        found = samestep.spawn(run_rank, nprocs=args.ranks, args=run_args, device="cpu")
        summary = summarize(found)
        files = samestep.spawn(measure_files, nprocs=1, args=(directory, args.mb, args.rounds), device="cpu")
    hashes = measure_hashes(args.mb, args.rounds)
    if args.json:
        print_json(summary=summary, seconds=found, files=files, hashes=hashes)
        return
    print_loop(summary)
    print_alone("alone", {n: t for n, t in files.items() if "write" in n}, args.mb, "write: torch.save")
    print_alone("alone", {n: t for n, t in files.items() if "read" in n}, args.mb, "read: the file alone")
    print_alone("hash", hashes, args.mb, "sha256")


if __name__ == "__main__":
    main()
