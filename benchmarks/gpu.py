"""What samestep costs on one GPU: GPT-2 124M in bf16, compiled, and what surrounds its steps. At most 15 minutes.

docs/performance.md has the figures of one NVIDIA H200. Each part runs in a process of its own with a limit on its time,
and a part that fails is a line of the table. `--quick` runs all parts on the CPU with tiny sizes. Ratios are of times
in the same process, in turns.

- train: the loop of the recipe `gpt` with exact reduction, with and without deterministic kernels, against nanoGPT's
  loop written by hand, with fused AdamW and clipping, on sequences of the same sizes.
- syncs: how often the host waits for the device in a step.
- step: a step of the toy `mlp`, in which the device has next to nothing to do.
- loader: images from workers through page-locked memory, against a DataLoader.
- snapshot: what a snapshot of GPT-2 and AdamW's state adds to the step after which it is taken.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    Contestant,
    Times,
    build_parser,
    compute_ratio,
    count_flops_per_token,
    judge,
    look_up_peak,
    measure,
    print_json,
    print_machine,
    print_table,
)
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

import samestep
from samestep.recipes import gpt
from samestep.recipes.gpt import GPT2, PRESETS, GPT2Config

Row = tuple[str, str, str]  # what, figure, comparison
EXACT, FAST_KERNELS, BY_HAND = "samestep, exact", "the same, any kernels", "nanoGPT's loop"
BY_HAND_DETERMINISTIC = "the same, deterministic kernels"
MAX_TIME = 1 / 0.98  # relative to the loop by hand


class Sizes(argparse.Namespace):
    """What `--quick` makes small.

    Attributes:
        samples: sequences of a step; images and rows of a step are as many times 16.
        device: "cuda", or "cpu" with --quick.
    """

    def __init__(self, quick: bool) -> None:
        self.quick, self.device = quick, "cpu" if quick else "cuda"
        tiny = GPT2Config(vocabulary_size=64, context=16, num_layers=1, num_heads=2, width=32)
        # A vocabulary of a multiple of 64, as in nanoGPT.
        self.config = tiny if quick else replace(PRESETS["gpt2"], vocabulary_size=50304)
        self.samples, self.rounds, self.steps = (2, 1, 2) if quick else (12, 5, 30)
        self.image_size, self.num_workers = (8, 1) if quick else (224, 8)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def build(name: str, steps: Iterator[object], device: str, *, deterministic: bool = False) -> Contestant:
    """A contestant whose block ends when the device is done."""

    def run_steps(num_steps: int) -> None:
        for _ in itertools.islice(steps, num_steps):
            pass
        synchronize(device)

    return Contestant(name, run_steps, deterministic)


def describe(times: Times, name: str, num: int, unit: str) -> str:
    return f"{num / statistics.median(times[name]):,.0f} {unit}/s"


def build_tokens(sizes: Sizes) -> Tensor:
    return torch.randint(sizes.config.vocabulary_size, (64 * sizes.samples, sizes.config.context + 1))


def compute_loss(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def run_gpt(sizes: Sizes, run_dir: Path | None = None, compiles: bool = True, **options: Any) -> Iterator[int]:
    """The loop of the recipe."""
    run = samestep.Run(
        run_dir, batch_size=sizes.samples, micro_batch_size=sizes.samples, precision="bf16", device=sizes.device,
        log_every=10**9, compare_every=None, **{"snapshot_every": None, **options},
    )  # fmt: skip
    model = GPT2(sizes.config)
    optimizer = gpt.build_optimizer(model, 6e-4, 0.1)
    run.prepare(model=model, optimizer=optimizer)
    forward = torch.compile(model) if compiles and not sizes.quick else model
    for step in run.steps(build_tokens(sizes), 10**9):
        for tokens in step:
            with run.autocast():
                loss = compute_loss(forward, tokens)
            step.backward(loss)
        run.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield step.number


def run_by_hand(sizes: Sizes) -> Iterator[None]:
    """nanoGPT's train.py on one device, without logging: the next batch is copied while the device computes."""
    torch.manual_seed(0)
    data, model = build_tokens(sizes), GPT2(sizes.config).to(sizes.device)
    optimizer = gpt.build_optimizer(model, 6e-4, 0.1)
    forward = model if sizes.quick else torch.compile(model)

    def get_batch() -> Tensor:
        batch = data[torch.randint(len(data), (sizes.samples,))]
        return batch if sizes.quick else batch.pin_memory().to(sizes.device, non_blocking=True)

    tokens = get_batch()
    while True:
        with torch.autocast(sizes.device, dtype=torch.bfloat16):
            loss = compute_loss(forward, tokens)
        tokens = get_batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def measure_training(sizes: Sizes) -> list[Row]:
    contestants = [
        build(EXACT, run_gpt(sizes), sizes.device, deterministic=True),
        build(FAST_KERNELS, run_gpt(sizes, deterministic=False), sizes.device),
        build(BY_HAND, run_by_hand(sizes), sizes.device),
        build(BY_HAND_DETERMINISTIC, run_by_hand(sizes), sizes.device, deterministic=True),
    ]
    times = measure(contestants, num_rounds=sizes.rounds, steps_per_block=sizes.steps)
    num_tokens = sizes.samples * sizes.config.context
    peak = None if sizes.quick else look_up_peak(torch.cuda.get_device_name())
    flops = num_tokens * count_flops_per_token(GPT2(sizes.config), sizes.config.context)
    rows = []
    for contestant in contestants:
        name = contestant.name
        mfu = f", MFU {flops / peak / statistics.median(times[name]):.1%}" if peak else ""
        target = MAX_TIME if name == EXACT else None
        ratio = "" if name == BY_HAND else f"time by the loop's {judge(compute_ratio(times, name, BY_HAND), target)}"
        rows.append((f"train: {name}", describe(times, name, num_tokens, "tokens") + mfu, ratio))
    cost = compute_ratio(times, EXACT, FAST_KERNELS)
    return [*rows, ("train: cost of deterministic kernels", f"{cost - 1:+.1%}", "time, within samestep")]


def count_syncs(sizes: Sizes) -> list[Row]:
    """By torch's own warnings on a GPU; on the CPU, by the calls that would read from one."""
    steps, num_steps = run_gpt(sizes, compiles=False), 5
    for _ in itertools.islice(steps, 3):
        pass
    if sizes.quick:
        with profile(activities=[ProfilerActivity.CPU]) as found:
            for _ in itertools.islice(steps, num_steps):
                pass
        count = sum(each.count for each in found.key_averages() if each.key == "aten::_local_scalar_dense")
    else:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in itertools.islice(steps, num_steps):
                pass
        torch.cuda.set_sync_debug_mode("default")
        count = sum("synchroniz" in str(each.message) for each in caught)
    what = "syncs: numbers read, also by the CPU's kernels" if sizes.quick else "syncs: the host waits for the device"
    return [(what, f"{count / num_steps:g} times per step", "" if sizes.quick else "wanted: 0")]


class Toy(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, num: int) -> None:
        self.x, self.y = torch.randn(num, 20), torch.randn(num, 1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def measure_step(sizes: Sizes) -> list[Row]:
    size = 16 * sizes.samples

    def build_model() -> nn.Module:
        return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))

    def run_ours() -> Iterator[int]:
        run = samestep.Run(None, batch_size=size, micro_batch_size=size, device=sizes.device, log_every=10**9)
        model = build_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        run.prepare(model=model, optimizer=optimizer)
        for step in run.steps(Toy(32 * size), 10**9):
            for x, y in step:
                step.backward(F.mse_loss(model(x), y))
            optimizer.step()
            yield step.number

    def run_plain() -> Iterator[None]:
        model = build_model().to(sizes.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        while True:
            for x, y in DataLoader(Toy(32 * size), size, shuffle=True, drop_last=True):
                optimizer.zero_grad()
                F.mse_loss(model(x.to(sizes.device)), y.to(sizes.device)).backward()
                optimizer.step()
                yield

    contestants = [
        build("samestep", run_ours(), sizes.device, deterministic=True),
        build("the plain loop", run_plain(), sizes.device),
    ]
    times = measure(contestants, num_rounds=sizes.rounds, steps_per_block=4 * sizes.steps)
    ratio = f"time by the plain loop's {judge(compute_ratio(times, 'samestep', 'the plain loop'), None)}"
    return [
        (f"step of a toy: {name}", f"{statistics.median(values) * 1e6:,.0f} us", ratio if name == "samestep" else "")
        for name, values in times.items()
    ]


class Images(Dataset[Tensor]):
    def __init__(self, size: int) -> None:
        self.image = torch.zeros(3, size, size)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        return self.image + index


def measure_loader(sizes: Sizes) -> list[Row]:
    size, data = 16 * sizes.samples, Images(sizes.image_size)

    def run_ours() -> Iterator[int]:
        run = samestep.Run(None, batch_size=size, micro_batch_size=size, device=sizes.device, log_every=10**9)
        model = nn.Linear(1, 1)
        run.prepare(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        for step in run.steps(data, 10**9, num_workers=sizes.num_workers, pin_memory=True):
            for images in step:
                images.sum()  # a step without a backward makes no update
            yield step.number

    def run_plain() -> Iterator[None]:
        pins = sizes.device == "cuda"
        loader = DataLoader(
            data, size, shuffle=True, num_workers=sizes.num_workers, pin_memory=pins, persistent_workers=True
        )
        while True:
            for images in loader:
                images.to(sizes.device, non_blocking=True).sum()
                yield

    contestants = [
        build("samestep", run_ours(), sizes.device), build("DataLoader", run_plain(), sizes.device)
    ]  # fmt: skip
    # Blocks are many times longer than the queue of loaded batches, which is full when a block begins.
    num_steps = sizes.steps if sizes.quick else 5 * 2 * sizes.num_workers
    times = measure(contestants, num_rounds=min(sizes.rounds, 3), steps_per_block=num_steps)
    ratio = f"time by DataLoader's {judge(compute_ratio(times, 'samestep', 'DataLoader'), 1.0)}"
    return [
        (f"loader, page-locked: {name}", describe(times, name, size, "images"), ratio if name == "samestep" else "")
        for name in times
    ]


def measure_snapshot(sizes: Sizes) -> list[Row]:
    """Lengths of steps, each up to the end of its work on the device. A snapshot is written before the next is due."""
    lengths, every = [], 3 if sizes.quick else 60
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:  # the last snapshot is being written
        steps = run_gpt(sizes, Path(directory) / "run", compiles=False, snapshot_every=every, keep_last=1)
        for _ in range(4 * every + 1):
            began = time.perf_counter()
            next(steps)
            synchronize(sizes.device)
            lengths.append(time.perf_counter() - began)
        steps.close()  # type: ignore[attr-defined]
    # The body of a step ends, and its snapshot begins, when the next one is asked for.
    after = [lengths[i] for i in range(every, len(lengths), every)]
    others = [length for i, length in enumerate(lengths) if i % every and i > 2]
    stall, step = statistics.median(after) - statistics.median(others), statistics.median(others)
    return [("snapshot: stall of the step after it", f"{stall * 1e3:,.1f} ms", f"a step takes {step * 1e3:,.1f} ms")]


# name -> function, seconds that it may take
PARTS: dict[str, tuple[Callable[[Sizes], list[Row]], int]] = {
    "train": (measure_training, 420),
    "syncs": (count_syncs, 90),
    "step": (measure_step, 90),
    "loader": (measure_loader, 120),
    "snapshot": (measure_snapshot, 150),
}


def run_part(name: str, arguments: list[str], limit_s: int) -> list[Row]:
    """Run a part in a process of its own. What goes wrong is its row."""
    command = [sys.executable, __file__, "--part", name, *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ},  # as samestep launch does, for deterministic kernels
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return [(name, "FAILED", f"took more than {limit_s} s")]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks and workers that it has started
        process.wait()
    if process.returncode:
        lines = [line for line in err.strip().splitlines() if line.strip()]
        return [(name, "FAILED", lines[-1][:100] if lines else f"exit code {process.returncode}")]
    rows: list[Row] = [tuple(row) for row in json.loads(out.splitlines()[-1])]
    return rows


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--part", choices=PARTS, help="only this part, printed as JSON")
    args = parser.parse_args()
    if not args.quick and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use: --quick runs all parts on the CPU")
    if args.part:
        stdout, sys.stdout = sys.stdout, io.StringIO()  # samestep's own lines
        rows = PARTS[args.part][0](Sizes(args.quick))
        print(json.dumps(rows), file=stdout, flush=True)
        os._exit(0)  # the runs are in the middle of their loops
    if not args.json:
        print_machine()
    found = {}
    for name, (_, limit_s) in PARTS.items():
        found[name] = run_part(name, ["--quick"] if args.quick else [], limit_s)
        if not args.json:
            print(f"{name}: {'failed' if found[name][0][1] == 'FAILED' else 'done'}", file=sys.stderr, flush=True)
    if args.json:
        print_json(summary=found)
    else:
        device = "CPU, tiny sizes: figures mean nothing" if args.quick else torch.cuda.get_device_name()
        print_table([device, "", ""], [row for rows in found.values() for row in rows])
    if any(rows[0][1] == "FAILED" for rows in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
