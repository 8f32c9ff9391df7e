"""What a step costs beyond its arithmetic: samestep, the tutorials' DDP loop, Accelerate and Lightning on a toy.

The `mlp` recipe's model and data set, 32 samples per rank as one micro-batch, Adam, gloo ranks of 1 thread. All run
in the same processes over the same process group, in turns. Accelerate and Lightning are optional
(`pip install accelerate lightning`) and run with all that logs, saves or draws switched off.
"""

from __future__ import annotations  # cloudpickle does not see the names in a local class's annotations

import importlib.util
import io
import itertools
import logging
import os
import statistics
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

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
from default_cost import WORKLOADS, run_by_hand
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import samestep
from samestep.engine import routes
from samestep.plan.tree import build_layout
from samestep.recipes.mlp import CustomDataset
from samestep.world.environment import read_environment
from samestep.world.group import open_group

NUM_SAMPLES = 2048
SAMPLES_PER_RANK = 32
OURS, SEEDS, ACCELERATE, LIGHTNING = "samestep", "DDP loop", "Accelerate", "Lightning"
FLOOR, BARE = "forward, backward, Adam alone", "the same and loading the samples"
BY_HAND = "a loop by hand with the same guarantees"
ALL_REDUCE, GATHER = "all-reduce of the gradient alone", "all-gather of it alone"
SOCKETS = "the same over sockets"
# (contestant to compare with, ranks) -> the largest ratio that is wanted
TARGETS = {
    (SEEDS, 1): 0.7,
    (SEEDS, 2): 1.0,
    (ACCELERATE, 1): 0.75,
    (ACCELERATE, 2): 0.75,
    (LIGHTNING, 1): 0.5,
    (LIGHTNING, 2): 0.5,
}


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))


def run_samestep(world_size: int) -> Iterator[None]:
    run = samestep.Run(None, batch_size=SAMPLES_PER_RANK * world_size, micro_batch_size=SAMPLES_PER_RANK, device="cpu")
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run.prepare(model=model, optimizer=optimizer)
    for epoch in run.epochs(CustomDataset(NUM_SAMPLES), 10**6):
        for step in epoch:
            for source, targets in step:
                step.backward(F.mse_loss(model(source), targets))
            optimizer.step()
            yield


def run_seeds() -> Iterator[None]:
    """The tutorials' loop, less the batch that it loads at each epoch's start to print its size."""
    dataset = CustomDataset(NUM_SAMPLES)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=SAMPLES_PER_RANK, shuffle=False, sampler=sampler)
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for source, targets in loader:
            optimizer.zero_grad()
            output = model(source)
            loss = F.mse_loss(output, targets)
            loss.backward()
            optimizer.step()
            yield


def run_accelerate(world_size: int) -> Iterator[None]:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    hidden = {} if world_size > 1 else {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options] if world_size > 1 else None)
    os.environ.update(hidden)  # without them it wraps nothing, as when it is launched with one process
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(CustomDataset(NUM_SAMPLES), batch_size=SAMPLES_PER_RANK, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    while True:
        for source, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(source), targets)
            accelerator.backward(loss)
            optimizer.step()
            yield


class Turns:
    """Lets a loop that is not ours, such as a Trainer's, run in turns with others: in its own thread, one at a time.

    Args:
        run: what to run in the thread; it gets `after_step`, to be called after each step.
    """

    def __init__(self, run: Callable[[Callable[[], bool]], None]) -> None:
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._left = 0
        self._ending = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._guard, args=(run,), daemon=True)
        self._thread.start()

    def run_steps(self, num_steps: int) -> None:
        self._left = num_steps
        self._go.release()
        self._paused.acquire()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._ending = True
        self._go.release()
        self._thread.join()

    def after_step(self) -> bool:
        """Waits when the block is done. Returns whether to go on."""
        self._left -= 1
        if self._left == 0:
            self._paused.release()
            self._go.acquire()
        return not self._ending

    def _guard(self, run: Callable[[Callable[[], bool]], None]) -> None:
        self._go.acquire()
        try:
            if not self._ending:
                run(self.after_step)
        except BaseException as error:
            self._failure = error
        self._paused.release()


def run_lightning(world_size: int, after_step: Callable[[], bool]) -> None:
    """Its Trainer, without what logs, saves or draws; `Trainer(barebones=True)` takes the same time."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Toy(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            source, targets = batch
            return F.mse_loss(self.model(source), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    class AfterStep(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = not after_step()

    loader = DataLoader(CustomDataset(NUM_SAMPLES), batch_size=SAMPLES_PER_RANK, shuffle=True)
    ddp = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=ddp if world_size > 1 else "auto",
        max_epochs=10**6,
        callbacks=[AfterStep()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Toy(), loader)


def run_floor(*, loads: bool) -> Iterator[None]:
    """What is left without any framework: the arithmetic, with or without the loading of the same samples in order."""
    dataset = CustomDataset(NUM_SAMPLES)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for start in itertools.cycle(range(0, NUM_SAMPLES, SAMPLES_PER_RANK)):
        if loads or start == 0:
            samples = [dataset[index] for index in range(start, start + SAMPLES_PER_RANK)]
            source, targets = (torch.stack(column) for column in zip(*samples, strict=True))
        optimizer.zero_grad()
        F.mse_loss(model(source), targets).backward()
        optimizer.step()
        yield


def run_exchange(route: str) -> Iterator[None]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_elements = sum(param.numel() for param in build_model().parameters())
    space = routes.Space(torch.zeros, num_elements, torch.float32, build_layout(world_size, world_size), rank)
    if route == "sockets":
        sockets = open_group(read_environment(), torch.device("cpu")).local_sockets
        exchange: routes.Route = routes.AllGather(space, 64, sockets)
    else:
        exchange = routes.AllGather(space)
    while True:
        routes.wait_all([routes.PendingOp(exchange.run(tag=0))])
        yield


def run_all_reduce() -> Iterator[None]:
    data = torch.zeros(sum(param.numel() for param in build_model().parameters()))
    while True:
        dist.all_reduce(data)
        yield


def run_rank(world_size: int, frameworks: tuple[str, ...], num_rounds: int, steps_per_block: int) -> Times:
    """On each rank: sets all contestants up and measures them."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.stdout = io.StringIO()  # samestep's own lines, up to the end of the process
    dist.init_process_group("gloo")
    others: list[Turns] = []
    contestants = [
        build_contestant(OURS, run_samestep(world_size), deterministic=True),
        build_contestant(SEEDS, run_seeds()),
    ]
    if "accelerate" in frameworks:
        contestants.append(build_contestant(ACCELERATE, run_accelerate(world_size)))
    if "lightning" in frameworks:
        others.append(Turns(partial(run_lightning, world_size)))
        contestants.append(Contestant(LIGHTNING, others[0].run_steps))
    contestants.append(build_contestant(BARE, run_floor(loads=True)))
    contestants.append(build_contestant(FLOOR, run_floor(loads=False)))
    if world_size == 1:
        toy = replace(WORKLOADS["toy"], build_data=lambda: CustomDataset(NUM_SAMPLES))
        contestants.append(build_contestant(BY_HAND, run_by_hand(toy, SAMPLES_PER_RANK)))
    else:
        contestants.append(build_contestant(ALL_REDUCE, run_all_reduce()))
        contestants.append(build_contestant(GATHER, run_exchange("gather")))
        contestants.append(build_contestant(SOCKETS, run_exchange("sockets")))
    times = measure(contestants, num_rounds=num_rounds, steps_per_block=steps_per_block)
    for turns in others:
        turns.close()
    return times


def summarize(world_size: int, times: Times) -> dict[str, dict[str, float]]:
    """Per contestant: its time, and the ratios and targets."""
    rows = {}
    for name, values in times.items():
        rows[name] = {"us": statistics.median(values) * 1e6, "by_ddp_loop": compute_ratio(times, name, SEEDS)}
        if (name, world_size) in TARGETS:
            rows[name] |= {"samestep_by_it": compute_ratio(times, OURS, name), "target": TARGETS[name, world_size]}
    return rows


def print_results(world_size: int, times: Times) -> None:
    rows = []
    for name, row in summarize(world_size, times).items():
        ours = judge(row["samestep_by_it"], row["target"]) if "target" in row else ""
        rows.append([name, f"{row['us']:,.0f}", f"{row['by_ddp_loop']:.3f}", ours])
    title = f"{world_size} rank{'s' if world_size > 1 else ''}"
    print_table([title, "us per step", f"by the {SEEDS}", "samestep by it"], rows)


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each contestant, after one to warm up")
    parser.add_argument("--steps", type=int, default=256, help="steps per block: 4 epochs at 1 rank, 8 at 2")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.steps = 2, 8
    frameworks = tuple(name for name in ("accelerate", "lightning") if importlib.util.find_spec(name))
    missing = {"accelerate", "lightning"} - set(frameworks)
    if not args.json:
        print_machine()
        for name in sorted(missing):
            print(f"{name} is not installed and left out: pip install {name}\n")
    results = {}
    for world_size in args.ranks:
        run_args = (world_size, frameworks, args.rounds, args.steps)
        results[world_size] = samestep.spawn(run_rank, nprocs=world_size, args=run_args, device="cpu")
        if not args.json:
            print_results(world_size, results[world_size])
    if args.json:
        summary = {world_size: summarize(world_size, times) for world_size, times in results.items()}
        print_json(summary=summary, seconds_per_step=results, left_out=sorted(missing))


if __name__ == "__main__":
    main()
