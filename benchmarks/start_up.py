"""What starting costs: `samestep --help`, and from the command to the first step of 2 ranks, against torchrun.

The commands run in turns, each alone. The recipe's first step is done when it prints its closing table: that is a
little late, as the run has been saved by then. `spawn` is timed in this process, after a first call.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
from common import Times, build_parser, compute_ratio, judge, print_json, print_machine, print_table

import samestep

HELP, TRAIN, TORCHRUN = "samestep --help", "samestep train mlp", "torchrun, the tutorials' script"
HELP_TARGET_S = 0.3
TARGET = 0.7
SCRIPT = str(Path(__file__).with_name("seeds_ddp.py"))


def time_command(arguments: list[str], mark: str, tries: int = 3) -> tuple[float, float]:
    """Seconds until it prints a line with `mark`, and until it has ended.

    A command that fails is timed again: under torchrun, torch 2.13 now and then aborts while it takes gloo down.
    """
    began = time.perf_counter()
    first_s = None
    with subprocess.Popen(
        [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if first_s is None and mark in line:
                first_s = time.perf_counter() - began
        errors = process.stderr.read()
    whole_s = time.perf_counter() - began
    if process.returncode or first_s is None:
        if tries == 1:
            sys.exit(f"{' '.join(arguments)} ended with {process.returncode}:\n{errors}")
        return time_command(arguments, mark, tries - 1)
    return first_s, whole_s


def time_commands(num_rounds: int) -> tuple[Times, Times]:
    """Seconds to the first step, and to the end, per command and round. The first round warms up the disk's cache."""
    first: Times = {HELP: [], TRAIN: [], TORCHRUN: []}
    whole: Times = {HELP: [], TRAIN: [], TORCHRUN: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num_rounds + 1):
            train = ["samestep", "train", "mlp", "--nproc-per-node", "2", "--max-steps", "1", "--device", "cpu"]
            commands = {
                HELP: (["samestep", "--help"], "samestep"),
                TRAIN: ([*train, "--run-dir", f"{folder}/{number}"], "steps"),
                TORCHRUN: (
                    ["torch.distributed.run", "--nproc-per-node", "2", SCRIPT, "1", "1", "--max_steps", "1"],
                    "first step",
                ),
            }
            for name in list(commands)[:: 1 if number % 2 else -1]:
                first_s, whole_s = time_command(*commands[name])
                if number:
                    first[name].append(first_s)
                    whole[name].append(whole_s)
    return first, whole


def join() -> None:
    dist.init_process_group("gloo")


def time_spawn(num_ranks: int, num_rounds: int) -> float:
    """Median seconds of a spawn of ranks that form a group, by a server that is warm."""
    samestep.spawn(join, num_ranks, device="cpu")
    times = []
    for _ in range(num_rounds):
        began = time.perf_counter()
        samestep.spawn(join, num_ranks, device="cpu")
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="times that each command is run")
    args = parser.parse_args()
    num_rounds = 1 if args.quick else args.rounds
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    spawn_s = {num_ranks: time_spawn(num_ranks, num_rounds) for num_ranks in (1, 2, 4)}
    first, whole = time_commands(num_rounds)
    ratios = {name: compute_ratio(times, TRAIN, TORCHRUN) for name, times in (("first", first), ("whole", whole))}
    if args.json:
        print_json(first_step_s=first, whole_command_s=whole, spawn_s=spawn_s, ratios=ratios)
        return
    print_machine()
    rows = [
        [name, f"{statistics.median(first[name]):.2f}", f"{statistics.median(whole[name]):.2f}"]
        for name in (TRAIN, TORCHRUN)
    ]
    print_table(["2 gloo ranks, seconds", "to the first step", "whole command"], rows)
    help_s = statistics.median(whole[HELP])
    spawns = ", ".join(f"{seconds:.2f} s for {num_ranks}" for num_ranks, seconds in spawn_s.items())
    print(f"to the first step, of torchrun's time: {judge(ratios['first'], TARGET)}")
    print(f"whole command, of torchrun's time: {judge(ratios['whole'], None)}")
    print(f"samestep --help: {help_s:.3f} s (<= {HELP_TARGET_S} s {'met' if help_s <= HELP_TARGET_S else 'MISSED'})")
    print(f"a further samestep.spawn of ranks that form a group: {spawns}")


if __name__ == "__main__":
    main()
