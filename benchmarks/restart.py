"""What a rank's death costs in time: from SIGKILL to the next finished step, by `samestep launch --max-restarts`, and
by `--heal`, with which the others continue.

Against the floor: the same command started by a person, which resumes from the same snapshot, from the command to its
first finished step. That starts processes, imports torch, and reads the snapshot; whoever dies has to be noticed, too,
and the others ended. Gloo ranks of 1 thread on one machine; the ways in turns. A rank dies in a step that comes some
steps after the snapshot; the last column is the time until that step is done, which a restart computes again.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from common import Times, build_parser, compute_ratio, judge, print_json, print_machine, print_table
from torch import nn

import samestep

WIDTH = 1024
SAVED, LOST = 4, 3  # steps until the snapshot, and from there until the kill
RESTART, HEAL, FLOOR = "SIGKILL, --max-restarts 1", "SIGKILL, --heal", "a fresh samestep launch"
TARGET = 1.3
HEAL_TARGET = 0.3  # of a restart's time


def train(run_dir: Path, marks: Path, num_mb: int, num_steps: int, kills: bool) -> None:
    """A rank of the run that is timed: leaves in `marks` when it began, when it was killed, when each step was done."""

    def mark(what: str, step: int = -1) -> None:
        with open(marks, "a") as file:
            print(what, step, time.monotonic(), file=file)  # of one clock in all processes

    if os.environ["RANK"] == "0":
        mark("start")
    run = samestep.Run(run_dir, batch_size=16, micro_batch_size=4, snapshot_every="never", device="cpu")
    depth = max(1, round(num_mb * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    run.prepare(model=model, optimizer=optimizer)
    is_doomed = kills and run.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for step in run.steps(torch.randn(64, WIDTH), num_steps):
        for x in step:
            if is_doomed and step.number == SAVED + LOST:
                mark("kill")
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward((model(x) ** 2).mean())
        optimizer.step()
        if run.rank == 0:
            mark("step", step.number)
        if step.number + 1 == SAVED:
            run.snapshot("saved")


class Mark(NamedTuple):
    """What a rank, or the launch itself as "command", left at a time."""

    what: str
    step: int
    at_s: float


def launch(run_dir: Path, num_mb: int, num_steps: int, *flags: str, num_ranks: int, kills: bool) -> list[Mark]:
    """Run the command to its end. Returns what was marked, in the order of time."""
    marks = run_dir.with_name(f"{run_dir.name}-marks")
    words = [sys.executable, "-m", "samestep", "launch", "--nproc-per-node", str(num_ranks), *flags, __file__]
    words += ["--train", str(run_dir), "--marks", str(marks), "--mb", str(num_mb), "--steps", str(num_steps)]
    began_s = time.monotonic()
    done = subprocess.run([*words, *(["--kill"] if kills else [])], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    lines = [line.split() for line in marks.read_text().splitlines()]
    found = [Mark(what, int(step), float(at_s)) for what, step, at_s in lines]
    return sorted([Mark("command", -1, began_s), *found], key=lambda mark: mark.at_s)


class Seconds(NamedTuple):
    """From the death, or the command, until a step is done, and until the step in which the rank died is done."""

    to_next: float
    to_same: float


def read_times(marks: list[Mark], way: str) -> Seconds:
    since_s = next(mark.at_s for mark in marks if mark.what == ("command" if way == FLOOR else "kill"))
    steps = [mark for mark in marks if mark.what == "step" and mark.at_s > since_s]
    if way != HEAL:
        start_s = next(mark.at_s for mark in marks if mark.what == "start" and mark.at_s > since_s)
        steps = [mark for mark in steps if mark.at_s > start_s]
    else:  # rank 0 may still end the step before
        steps = [mark for mark in steps if mark.step >= SAVED + LOST]
    same_s = next(mark.at_s for mark in steps if mark.step == SAVED + LOST)
    return Seconds(steps[0].at_s - since_s, same_s - since_s)


FLAGS = {RESTART: ("--max-restarts", "1"), HEAL: ("--heal",), FLOOR: ()}


def measure(num_mb: int, num_ranks: int, num_rounds: int) -> tuple[Times, Times]:
    """Seconds until a step is done, and until that step is. The first round warms up the disk's cache."""
    to_next: Times = {way: [] for way in FLAGS}
    to_same: Times = {way: [] for way in FLAGS}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        launch(base, num_mb, SAVED, num_ranks=num_ranks, kills=False)
        for number in range(num_rounds + 1):
            for place, way in enumerate([*FLAGS][:: 1 if number % 2 else -1]):
                run_dir = Path(folder) / f"{number}-{place}"
                shutil.copytree(base, run_dir)
                steps = SAVED + LOST + 1
                marks = launch(run_dir, num_mb, steps, *FLAGS[way], num_ranks=num_ranks, kills=way != FLOOR)
                seconds = read_times(marks, way)
                if number:
                    to_next[way].append(seconds.to_next)
                    to_same[way].append(seconds.to_same)
                shutil.rmtree(run_dir)
    return to_next, to_same


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--mb", type=int, default=100, help="of weights and optimizer state")
    parser.add_argument("--ranks", type=int, default=2, help="2 to 4")
    parser.add_argument("--rounds", type=int, default=9, help="times that each way is run")
    for words in (["--train"], ["--marks"]):
        parser.add_argument(*words, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train(args.train, args.marks, args.mb, args.steps, args.kill)
        return
    if args.quick:
        args.mb, args.rounds = 12, 1
    to_next, to_same = measure(args.mb, args.ranks, args.rounds)
    ratio = compute_ratio(to_next, RESTART, FLOOR)
    heal_ratio = compute_ratio(to_same, HEAL, RESTART)
    if args.json:
        print_json(until_next_step_s=to_next, until_same_step_s=to_same, ratio=ratio, heal_ratio=heal_ratio)
        return
    print_machine()
    rows = [
        [
            way,
            f"{statistics.median(to_next[way]):.2f}",
            f"{max(to_next[way]):.2f}",
            f"{statistics.median(to_same[way]):.2f}",
        ]
        for way in FLAGS
    ]
    title = f"{args.mb} MB of state, {args.ranks} ranks, seconds"
    print_table([title, "next step done", "slowest", "the same step done"], rows)
    print(f"a restart to the next step, of the floor's time: {judge(ratio, TARGET)}")
    print(f"healing to the same step, of a restart's time: {judge(heal_ratio, HEAL_TARGET)}")


if __name__ == "__main__":
    main()
