"""What the input path costs: samples/s and tokens/s against a plain DataLoader over the same data, and a resume.

Images are rows of 3 x 64 x 64 bytes with a label, in tars that the script writes; tokens are
sequences from a memory-mapped file. Both loaders read shuffled, with `__getitems__`, the same micro-batch size and as
many workers. A resume is the time from a loop's beginning in mid-epoch, over 10^8 samples, to the indices of its first
micro-batch. All times but those with workers are CPU times of this process, because other load changes them little.
"""

import io
import itertools
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import build_contestant, build_parser, compute_ratio, measure, print_json, print_machine, print_table
from torch import Tensor
from torch.utils.data import DataLoader

import samestep
from samestep.data.loader import Loader
from samestep.plan.tree import Layout, build_layout
from samestep.sources import WebDataset, open_tokens
from samestep.train.loop_data import LoopData, open_loop_data

SHAPE, CONTEXT, MICRO_BATCH_SIZE = (3, 64, 64), 256, 64
OURS, PLAIN = "samestep", "DataLoader"


def decode_tar(sample: dict[str, Any]) -> tuple[Tensor, int]:
    return torch.from_numpy(np.frombuffer(sample["rgb"], np.uint8).reshape(SHAPE).copy()), int(sample["cls"])


def write_images(root: Path, num_shards: int, per_shard: int) -> None:
    generator = np.random.default_rng(0)
    for number in range(num_shards):
        images = generator.integers(0, 256, (per_shard, *SHAPE), np.uint8)
        with tarfile.open(root / f"{number:04d}.tar", "w") as tar:
            for k, image in enumerate(images):
                for extension, content in (("rgb", image.tobytes()), ("cls", str(k % 10).encode())):
                    about = tarfile.TarInfo(f"{number:04d}-{k:06d}.{extension}")
                    about.size = len(content)
                    tar.addfile(about, io.BytesIO(content))


def plan_loop(source: Any, size: int, *, seed: int = 0, **arguments: Any) -> LoopData:
    """Return the data of a loop of one micro-batch per step."""
    return open_loop_data(
        source, 1, seed=seed, batch_size=size, micro_batch_size=size, sampler=None, start=(0, 0), **arguments
    )


def share_alone(num_micro_batches: int) -> Layout:
    return build_layout(num_micro_batches, 1)


def run_ours(source: Any, num_workers: int) -> Iterator[None]:
    """Yields after each micro-batch of a run of one micro-batch per step."""
    data = plan_loop(source, MICRO_BATCH_SIZE, endless=True, num_workers=num_workers)
    tasks = data.plan.tasks(0, sys.maxsize, rank=0, layout=share_alone)
    with Loader(data.spec, tasks, device=torch.device("cpu")) as loader:
        for _ in loader:
            yield


def run_plain(source: Any, num_workers: int, **options: Any) -> Iterator[None]:
    loader = DataLoader(
        source, MICRO_BATCH_SIZE, shuffle=True, drop_last=True, num_workers=num_workers,
        persistent_workers=num_workers > 0, **options,
    )  # fmt: skip
    while True:
        for _ in loader:
            yield


class Virtual:
    """A source of many samples that nobody reads."""

    def __init__(self, num_samples: int, num_shards: int) -> None:
        size = num_samples // max(num_shards, 1)
        self._num_samples = num_samples
        self.shards = [samestep.Shard(f"part-{k:06d}.tar", size, 1 << 26) for k in range(num_shards)]

    def __len__(self) -> int:
        return self._num_samples

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def measure_resume(num_samples: int, num_shards: int, repeats: int) -> float:
    """The median of the seconds from the loop's beginning to the indices of its first micro-batch, in mid-epoch."""
    source, size, found = Virtual(num_samples, num_shards), 256, []
    for repeat in range(repeats):
        began = time.process_time()
        plan = plan_loop(source, size, endless=False, seed=repeat).plan
        step = num_samples // size // 2
        task = next(plan.tasks(step, step + 1, rank=0, layout=share_alone))
        found.append(time.process_time() - began)
        assert len(task.indices) == size
    return statistics.median(found)


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=11, help="blocks of each contestant, after one to warm up")
    parser.add_argument("--steps", type=int, default=40, help="micro-batches per block")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1], help="numbers of workers")
    args = parser.parse_args()
    per_shard, num_rounds, num_steps = (64, 1, 4) if args.quick else (512, args.rounds, args.steps)
    torch.set_num_threads(1)
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_images(root, 16, per_shard)
        np.random.default_rng(0).integers(0, 50_000, 1 << (18 if args.quick else 24), np.uint16).tofile(root / "t.bin")
        sources: dict[str, tuple[Any, dict[str, Any]]] = {
            "images in tars": (WebDataset(root, decode_tar), {}),
            "tokens": (open_tokens(root / "t.bin", CONTEXT), {"collate_fn": torch.from_numpy}),
        }
        for (name, (source, options)), num_workers in itertools.product(sources.items(), args.workers):
            times = measure(
                [
                    build_contestant(OURS, run_ours(source, num_workers)),
                    build_contestant(PLAIN, run_plain(source, num_workers, **options)),
                ],
                num_rounds=num_rounds,
                steps_per_block=num_steps,
                read_clock=time.perf_counter if num_workers else time.process_time,
            )
            rate = MICRO_BATCH_SIZE / statistics.median(times[OURS]) * (CONTEXT if name == "tokens" else 1)
            unit = "tokens" if name == "tokens" else "samples"
            rows[f"{name}, {num_workers} workers"] = {f"{unit}_per_s": rate, "ratio": compute_ratio(times, PLAIN, OURS)}
    resumes = {
        f"resume at 10^8 samples, {num_shards or 'no'} shards": measure_resume(10**8, num_shards, 11)
        for num_shards in (0, 1000, 10_000)
    }
    if args.json:
        print_json(rates=rows, start_s=resumes)
        return
    print_machine()
    print_table(
        ["input", "samples/s or tokens/s", "relative to DataLoader (target >= 1)"],
        [[name, f"{next(iter(row.values())):,.0f}", f"{row['ratio']:.2f}"] for name, row in rows.items()],
    )
    print_table(["", "ms of CPU time"], [[name, f"{seconds * 1e3:.1f}"] for name, seconds in resumes.items()])


if __name__ == "__main__":
    main()
