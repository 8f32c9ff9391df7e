"""Rounds of DiLoCo against data parallelism over a slow link: bytes and seconds of as many samples, and the loss.

Both train the model of the recipe `gpt` on as many samples, with the same schedule of AdamW: data parallelism in steps
of 32 sequences, and DiLoCo in rounds of 4 workers with 20 inner steps of 8 sequences each. First on one rank, for the
losses, which are the same at any number of ranks. Then with a rank on each of two hosts, the link shaped by tc, in the
same two processes, in turns of 20 steps; this needs root.
"""

import argparse
import contextlib
import io
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import build_parser, print_json, print_machine, print_table
from torch import Tensor, nn
from two_hosts import INTERFACE, measure_on, open_two_hosts, shape_link

import samestep
from samestep.recipes.gpt import GPT2, LEARNING_RATES, PRESETS, build_optimizer, read_tokens, split

DATA_PARALLEL, DILOCO = "data parallel", "DiLoCo"
PORT = 29500
WORKERS, INNER_STEPS, BATCH_SIZE = 4, 20, 32
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9  # of the paper
HIGHEST_LR = LEARNING_RATES["tiny"]
VALIDATE_EVERY = 2  # turns; the others yield nan
NUM_VALIDATION = 128  # sequences
Turns = list[dict[str, float]]


def compute_lr(step: int, num_steps: int) -> float:
    """The schedule of the recipe: a warm-up, and half a cosine to a tenth."""
    num_warm_up = max(num_steps // 20, 1)
    if step < num_warm_up:
        return HIGHEST_LR * (step + 1) / num_warm_up
    done = (step - num_warm_up) / (num_steps - num_warm_up)
    return HIGHEST_LR * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(name: str, args: argparse.Namespace, num_steps: int) -> Iterator[float]:
    """Yields twice after each turn of 20 steps: nan, and then the loss of the validation."""
    config = replace(PRESETS["tiny"], vocabulary_size=256, num_layers=args.layers, context=args.context)
    is_diloco = name == DILOCO
    size = BATCH_SIZE // WORKERS
    run: Any
    if is_diloco:
        batch_size = BATCH_SIZE * INNER_STEPS
        run = samestep.Run(None, batch_size=batch_size, workers=WORKERS, inner_steps=INNER_STEPS, device="cpu")
    else:
        run = samestep.Run(None, batch_size=BATCH_SIZE, micro_batch_size=size, device="cpu")
    model = GPT2(config)
    data, held_out = split(read_tokens(None), config.context, config.vocabulary_size, 0.05, NUM_VALIDATION)
    adamw = build_optimizer(model, HIGHEST_LR, 0.1, fused=False)
    outer = torch.optim.SGD(model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    objects = {"optimizer": outer, "inner_optimizer": adamw} if is_diloco else {"optimizer": adamw}
    run.prepare(model=model, **objects)
    step: Any = None

    def set_lr(*_: Any) -> None:
        number = step.number
        if is_diloco:
            number = number * INNER_STEPS + step.micro_batch % INNER_STEPS
        for group in adamw.param_groups:
            group["lr"] = compute_lr(number, num_steps)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def compute_loss(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    adamw.register_step_pre_hook(set_lr)
    for step in run.steps(data, num_steps // INNER_STEPS if is_diloco else num_steps):
        for tokens in step:
            step.backward(compute_loss(tokens))
        objects["optimizer"].step()
        turn, left = divmod(step.number + 1, 1 if is_diloco else INNER_STEPS)
        if left == 0:
            yield math.nan
            found = {"loss": math.nan}
            if turn % VALIDATE_EVERY == 0:
                found = run.evaluate(lambda rows: {"loss": compute_loss(rows)}, held_out)
            yield found["loss"]


def read_bytes_sent() -> int:
    """What this host has sent over the link."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith(f"{INTERFACE}:"))


def run_rank(rank: int, address: str, args: argparse.Namespace) -> dict[str, Turns]:
    """On each host: trains both in turns."""
    torch.set_num_threads(1)
    sys.stdout = io.StringIO()  # samestep's own lines, up to the end of the process
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(PORT)}
    dist.init_process_group("gloo")
    loops = {name: train(name, args, args.turns * INNER_STEPS) for name in (DATA_PARALLEL, DILOCO)}
    turns: dict[str, Turns] = {name: [] for name in loops}
    for number in range(args.turns):
        for name, loop in loops.items():
            dist.barrier()
            sent, began_s = read_bytes_sent(), time.perf_counter()
            next(loop)
            row = {"seconds": time.perf_counter() - began_s, "bytes": read_bytes_sent() - sent}
            if number:  # the first turn includes the start of the run
                turns[name].append(row)
            next(loop)
    return turns


def train_alone(name: str, args: argparse.Namespace) -> list[float]:
    """The losses of the validations on one rank."""
    with contextlib.redirect_stdout(io.StringIO()):
        return [loss for loss in train(name, args, args.steps) if not math.isnan(loss)]


def measure_link(args: argparse.Namespace) -> dict[str, Turns]:
    """Starts a rank on each of two hosts, with such a link between them."""
    with open_two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        shape_link(hosts, args.mbit)
        found = Path(folder) / "turns.json"
        words = [sys.executable, __file__, "--found", str(found), "--address", hosts[0].address]
        words += ["--turns", str(args.turns), "--layers", str(args.layers), "--context", str(args.context)]
        turns: dict[str, Turns] = measure_on(hosts, [[*words, "--rank", str(rank)] for rank in (0, 1)], found)
        return turns


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--mbit", type=int, default=100, help="rate of the link")
    parser.add_argument("--turns", type=int, default=6, help="on two hosts, the first one to warm up; 0: none")
    parser.add_argument("--steps", type=int, default=400, help="on one rank, for the losses; 0: none")
    parser.add_argument("--layers", type=int, default=2, help="of the model, which is `tiny` otherwise")
    parser.add_argument("--context", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        turns = run_rank(args.rank, args.address, args)
        if args.rank == 0:
            args.found.write_text(json.dumps(turns))
        return
    if args.quick:
        args.steps, args.turns = VALIDATE_EVERY * INNER_STEPS, 2
    if not args.json:
        print_machine()
    torch.set_num_threads(1)
    losses = {name: train_alone(name, args) for name in (DATA_PARALLEL, DILOCO)} if args.steps else {}
    turns = measure_link(args) if args.turns else {}
    if args.json:
        print_json(mbit=args.mbit, losses=losses, turns=turns)
        return
    rows = []
    for name, of_run in turns.items():
        seconds, num_bytes = (statistics.median(row[key] for row in of_run) for key in ("seconds", "bytes"))
        rows.append([name, f"{num_bytes / 1e6:,.2f}", f"{num_bytes / 1e6 / INNER_STEPS:,.3f}", f"{seconds:,.2f}"])
    if turns:
        print_table([f"{args.mbit} Mbit/s", f"MB sent in {INNER_STEPS} steps", "MB per step", "seconds"], rows)
    rows = [
        [str((k + 1) * VALIDATE_EVERY * INNER_STEPS), *(f"{loss:.3f}" for loss in of_step)]
        for k, of_step in enumerate(zip(*losses.values(), strict=True))
    ]
    if losses:
        print_table(["loss after", *losses], rows)


if __name__ == "__main__":
    main()
