"""What the recipe gpt costs: tokens/s against nanoGPT's loop written by hand with DDP, Accelerate and Lightning.

GPT-2 in the size of the preset `small` with a vocabulary of bytes, AdamW with a schedule and clipping, a few sequences
per rank and step as one micro-batch, gloo ranks of 1 thread, fp32. All train the same model class on the same
memory-mapped tokens (the source of Python's standard library), in the same processes, in turns. nanoGPT's own loop uses
the fused AdamW on GPUs only, so there is one row with it and one without; all others use the fused one. Accelerate and
Lightning are optional (`pip install accelerate lightning`).

A second table is about the input alone: micro-batches per second of the loader against torch's DataLoader.
"""

from __future__ import annotations  # cloudpickle does not see the names in a local class's annotations

import importlib.util
import io
import itertools
import logging
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
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
from step_cost import Turns
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import samestep
from samestep.data.loader import Loader
from samestep.data.spec import DataSpec
from samestep.plan.loop_plan import Task
from samestep.plan.order import build_order, derive
from samestep.recipes import build_schedule, gpt
from samestep.recipes.gpt import GPT2, PRESETS, GPT2Config
from samestep.sources import TokenWindows

OURS, BY_HAND, BY_HAND_FUSED = "samestep", "nanoGPT's loop", "the same, fused AdamW"
ACCELERATE, LIGHTNING = "Accelerate", "Lightning"
FLOOR = "the same, ranks alone"  # without an exchange: what no data-parallel step can be faster than
# contestant to compare with -> the largest ratio of times that is wanted
TARGETS = {BY_HAND: 1.0, ACCELERATE: 1.0, LIGHTNING: 1.0}
LOADER, DATALOADER, SINGLE = "samestep's loader", "DataLoader, __getitems__", "DataLoader, __getitem__"
NUM_BYTES = 256  # the vocabulary
LOADED_SIZE = 32  # samples of a micro-batch in the second table
STEPS, WARM_UP = 10_000, 100  # of the schedule


def compute_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def build_windows(data: Path, context: int) -> TokenWindows:
    tokens = gpt.read_tokens(data)
    return TokenWindows(tokens, context, 0, len(tokens), NUM_BYTES)


def run_samestep(config: GPT2Config, data: Path, samples_per_rank: int, world_size: int) -> Iterator[None]:
    """The loop of the recipe."""
    batch_size = samples_per_rank * world_size
    run = samestep.Run(None, batch_size=batch_size, micro_batch_size=samples_per_rank, device="cpu")
    model = GPT2(config)
    optimizer = gpt.build_optimizer(model, 1e-3, 0.1)
    scheduler = build_schedule(optimizer, STEPS, WARM_UP, 0.1)
    run.prepare(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in run.steps(build_windows(data, config.context), 10**9):
        for tokens in step:
            with run.autocast():
                loss = compute_loss(model, tokens)
            step.backward(loss)
        run.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        yield


def run_by_hand(
    config: GPT2Config, data: Path, samples_per_rank: int, world_size: int, fused: bool, *, exchange: bool = True
) -> Iterator[None]:
    """nanoGPT's train.py, without logging: sequences at random places, read one by one, the next ones read early."""
    tokens, context = gpt.read_tokens(data), config.context
    torch.manual_seed(1337 + (dist.get_rank() if world_size > 1 else 0))

    def get_batch() -> tuple[Tensor, Tensor]:
        places = torch.randint(len(tokens) - context, (samples_per_rank,))
        x = torch.stack([torch.from_numpy(tokens[i : i + context].astype(np.int64)) for i in places])
        y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + context].astype(np.int64)) for i in places])
        return x, y

    raw_model = GPT2(config)
    model = DistributedDataParallel(raw_model) if world_size > 1 and exchange else raw_model
    optimizer = gpt.build_optimizer(raw_model, 1e-3, 0.1, fused=fused)
    scheduler = build_schedule(optimizer, STEPS, WARM_UP, 0.1)
    x, y = get_batch()
    while True:
        loss = F.cross_entropy(model(x).view(-1, config.vocabulary_size), y.view(-1))
        x, y = get_batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def run_accelerate(config: GPT2Config, data: Path, samples_per_rank: int, world_size: int) -> Iterator[None]:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    hidden = {} if world_size > 1 else {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options] if world_size > 1 else None)
    os.environ.update(hidden)  # without them it wraps nothing, as when it is launched with one process
    model: Any = GPT2(config)
    optimizer: Any = gpt.build_optimizer(model, 1e-3, 0.1)
    scheduler: Any = build_schedule(optimizer, STEPS, WARM_UP, 0.1)
    loader: Any = build_dataloader(build_windows(data, config.context), samples_per_rank)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    while True:
        for tokens in loader:
            optimizer.zero_grad()
            accelerator.backward(compute_loss(model, tokens))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            yield


def run_lightning(
    config: GPT2Config, data: Path, samples_per_rank: int, world_size: int, after_step: Callable[[], bool]
) -> None:
    """Its Trainer, without what logs, saves or draws."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT2(config)

        def training_step(self, tokens: Tensor, index: int) -> Tensor:
            return compute_loss(self.model, tokens)

        def configure_optimizers(self) -> Any:
            optimizer = gpt.build_optimizer(self.model, 1e-3, 0.1)
            schedule = {"scheduler": build_schedule(optimizer, STEPS, WARM_UP, 0.1), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    class AfterStep(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = not after_step()

    ddp = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=ddp if world_size > 1 else "auto",
        max_epochs=10**6,
        gradient_clip_val=1.0,
        callbacks=[AfterStep()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), build_dataloader(build_windows(data, config.context), samples_per_rank))


def build_dataloader(dataset: Any, batch_size: int) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True, collate_fn=torch.from_numpy)


def run_rank(
    config: GPT2Config, data: Path, world_size: int, samples_per_rank: int, frameworks: tuple[str, ...],
    num_rounds: int, steps_per_block: int,
) -> Times:  # fmt: skip
    """On each rank: sets all contestants up and measures them."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.stdout = io.StringIO()  # samestep's own lines, up to the end of the process
    dist.init_process_group("gloo")
    sizes = (config, data, samples_per_rank, world_size)
    others: list[Turns] = []
    contestants = [
        build_contestant(OURS, run_samestep(*sizes), deterministic=True),
        build_contestant(BY_HAND, run_by_hand(*sizes, fused=False)),
        build_contestant(BY_HAND_FUSED, run_by_hand(*sizes, fused=True)),
    ]
    if world_size > 1:
        contestants.append(build_contestant(FLOOR, run_by_hand(*sizes, fused=True, exchange=False)))
    if "accelerate" in frameworks:
        contestants.append(build_contestant(ACCELERATE, run_accelerate(*sizes)))
    if "lightning" in frameworks:
        others.append(Turns(partial(run_lightning, *sizes)))
        contestants.append(Contestant(LIGHTNING, others[0].run_steps))
    times = measure(contestants, num_rounds=num_rounds, steps_per_block=steps_per_block)
    for turns in others:
        turns.close()
    return times


# --- the input alone --------------------------------------------------------------------------------------------------


class OneByOne:
    """The windows as most scripts write a data set: one tensor per sample."""

    def __init__(self, windows: TokenWindows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.windows[index])


def run_loader(windows: TokenWindows) -> Iterator[None]:
    spec = DataSpec(windows)
    for epoch in itertools.count():
        order = build_order(len(windows), seed=0, epoch=epoch, shuffle=True)
        starts = range(0, len(windows) - LOADED_SIZE + 1, LOADED_SIZE)
        tasks = (Task(order[k : k + LOADED_SIZE], derive(0, "data", step=k)) for k in starts)
        with Loader(spec, tasks, device=torch.device("cpu")) as loader:
            for _ in loader:
                yield


def run_dataloader(dataset: Any, **options: Any) -> Iterator[None]:
    while True:
        for _ in DataLoader(dataset, batch_size=LOADED_SIZE, shuffle=True, drop_last=True, **options):
            yield


def measure_input(context: int, data: Path, num_rounds: int, steps_per_block: int) -> Times:
    torch.set_num_threads(1)
    windows = build_windows(data, context)
    contestants = [
        build_contestant(LOADER, run_loader(windows)),
        build_contestant(DATALOADER, run_dataloader(windows, collate_fn=torch.from_numpy)),
        build_contestant(SINGLE, run_dataloader(OneByOne(windows))),
    ]
    return measure(contestants, num_rounds=num_rounds, steps_per_block=steps_per_block)


# --- results ----------------------------------------------------------------------------------------------------------


def summarize(times: Times, samples_per_step: int, context: int, reference: str) -> dict[str, dict[str, float]]:
    """Per contestant: its rates, and the ratio of times to the reference."""
    rows = {}
    for name, values in times.items():
        rate = samples_per_step / statistics.median(values)
        rows[name] = {"samples_per_s": rate, "tokens_per_s": rate * context}
        rows[name]["reference_by_it"] = compute_ratio(times, reference, name)
    return rows


def print_results(title: str, rows: dict[str, dict[str, float]], reference: str, targets: dict[str, float]) -> None:
    table = []
    for name, row in rows.items():
        ratio = "" if name == reference else judge(row["reference_by_it"], targets.get(name))
        table.append([name, f"{row['samples_per_s']:,.1f}", f"{row['tokens_per_s']:,.0f}", ratio])
    print_table([title, "samples/s", "tokens/s", f"time of {reference} by its"], table)


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--preset", choices=PRESETS, default="small", help="size of the model")
    parser.add_argument("--samples", type=int, default=4, help="sequences of each rank in a step")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=11, help="blocks of each contestant, after one to warm up")
    parser.add_argument("--steps", type=int, default=1, help="steps per block")
    args = parser.parse_args()
    config, num_loads = replace(PRESETS[args.preset], vocabulary_size=NUM_BYTES), 256
    if args.quick:
        config, num_loads = replace(config, num_layers=1, num_heads=2, width=32, context=16), 4
        args.rounds, args.steps = 1, 2
    frameworks = tuple(name for name in ("accelerate", "lightning") if importlib.util.find_spec(name))
    missing = sorted({"accelerate", "lightning"} - {*frameworks})
    if not args.json:
        print_machine()
        for name in missing:
            print(f"{name} is not installed and left out: pip install {name}\n")
    summary: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "tokens.npy"
        np.save(data, gpt.read_tokens(None))
        for world_size in args.ranks:
            run_args = (config, data, world_size, args.samples, frameworks, args.rounds, args.steps)
            times = samestep.spawn(run_rank, nprocs=world_size, args=run_args, device="cpu")
            title = f"{world_size} rank{'s' if world_size > 1 else ''}"
            summary[title] = summarize(times, args.samples * world_size, config.context, OURS)
            if not args.json:
                print_results(title, summary[title], OURS, TARGETS)
        times = samestep.spawn(measure_input, 1, (config.context, data, args.rounds, num_loads), device="cpu")
        summary["input"] = summarize(times, LOADED_SIZE, config.context, LOADER)
    if args.json:
        print_json(summary=summary, left_out=missing)
    else:
        print_results("input, 1 process", summary["input"], LOADER, {DATALOADER: 1.0, SINGLE: 1.0})


if __name__ == "__main__":
    main()
