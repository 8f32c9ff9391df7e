"""What a rank's death costs in time: from SIGKILL to the next finished step, by `samestep launch --max-restarts`.

Against the floor: the same command started by a person, which resumes from the same snapshot, from the command to its
first finished step. That starts processes, imports torch, and reads the snapshot; whoever dies has to be noticed, too,
and the others ended. 2 gloo ranks of 1 thread on one machine; the two ways in turns.
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

import torch
from common import Times, build_parser, compute_ratio, judge, print_json, print_machine, print_table
from torch import nn

import samestep

WIDTH = 1024
SAVED, LOST = 4, 3  # steps until the snapshot, and from there until the kill
RESTART, FLOOR = "SIGKILL, --max-restarts 1", "a fresh samestep launch"
TARGET = 1.3


def train(run_dir: Path, marks: Path, num_mb: int, num_steps: int, kills: bool) -> None:
    """A rank of the run that is timed: leaves in `marks` when it began, when it was killed, when each step was done."""

    def mark(what: str) -> None:
        with open(marks, "a") as file:
            print(what, time.monotonic(), file=file)  # of one clock in all processes

    if os.environ["RANK"] == "0":
        mark("start")
    run = samestep.Run(run_dir, batch_size=8, micro_batch_size=4, snapshot_every="never", device="cpu")
    depth = max(1, round(num_mb * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    run.prepare(model=model, optimizer=optimizer)
    is_doomed = kills and run.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for step in run.steps(torch.randn(64, WIDTH), num_steps):
        for x in step:
            step.backward((model(x) ** 2).mean())
        optimizer.step()
        if run.rank == 0:
            mark("step")
        if step.number + 1 == SAVED:
            run.snapshot("saved")
        if is_doomed and step.number + 1 == SAVED + LOST:
            mark("kill")
            os.kill(os.getpid(), signal.SIGKILL)


def launch(run_dir: Path, num_mb: int, num_steps: int, *, kills: bool) -> list[tuple[str, float]]:
    """Runs the command to its end. Returns what was marked, the command itself as "command"."""
    marks = run_dir.with_name(f"{run_dir.name}-marks")
    words = [sys.executable, "-m", "samestep", "launch", "--nproc-per-node", "2", "--max-restarts", "1", __file__]
    words += ["--train", str(run_dir), "--marks", str(marks), "--mb", str(num_mb), "--steps", str(num_steps)]
    began = time.monotonic()
    done = subprocess.run([*words, *(["--kill"] if kills else [])], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    lines = [line.split() for line in marks.read_text().splitlines()]
    return [("command", began), *((what, float(at)) for what, at in lines)]


def read_times(marks: list[tuple[str, float]], since: str) -> tuple[float, float]:
    """Seconds from the mark `since` until the script runs, and until a step is done."""
    place = next(place for place, (what, _) in enumerate(marks) if what == since)
    after = sorted(marks[place + 1 :], key=lambda mark: mark[1])
    start = next(at for what, at in after if what == "start")
    step = next(at for what, at in after if what == "step" and at > start)
    return start - marks[place][1], step - marks[place][1]


def measure(num_mb: int, num_rounds: int) -> tuple[Times, Times]:
    """Seconds until the script runs, and until the next step is done. The first round warms up the disk's cache."""
    begun: Times = {RESTART: [], FLOOR: []}
    stepped: Times = {RESTART: [], FLOOR: []}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        launch(base, num_mb, SAVED, kills=False)
        for number in range(num_rounds + 1):
            for name in (RESTART, FLOOR)[:: 1 if number % 2 else -1]:
                run_dir = Path(folder) / f"{number}-{'killed' if name == RESTART else 'fresh'}"
                shutil.copytree(base, run_dir)
                marks = launch(run_dir, num_mb, SAVED + LOST + 1, kills=name == RESTART)
                start_s, step_s = read_times(marks, "kill" if name == RESTART else "command")
                if number:
                    begun[name].append(start_s)
                    stepped[name].append(step_s)
                shutil.rmtree(run_dir)
    return begun, stepped


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--mb", type=int, default=100, help="of weights and optimizer state")
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
    begun, stepped = measure(args.mb, args.rounds)
    ratio = compute_ratio(stepped, RESTART, FLOOR)
    if args.json:
        print_json(until_script_runs_s=begun, until_step_s=stepped, ratio=ratio)
        return
    print_machine()
    rows = [
        [name, *(f"{statistics.median(times[name]):.2f}" for times in (begun, stepped)), f"{max(stepped[name]):.2f}"]
        for name in (RESTART, FLOOR)
    ]
    print_table([f"{args.mb} MB of state, 2 ranks, seconds", "script runs", "next step done", "slowest"], rows)
    print(f"to the next finished step, of the floor's time: {judge(ratio, TARGET)}")


if __name__ == "__main__":
    main()
