"""How long the others stop when a rank joins them in the place of one that died: `samestep launch --heal --replace`.

A rank dies, another one starts beside the running ones, and gets the state of the run from them. The pause is the time
between the ends of two steps around that, less the median time of a step. Gloo ranks of 1 thread on one machine.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from common import build_parser, print_json, print_machine, print_table
from restart import WIDTH, build_model

import samestep

KILLED = 3  # the step in which a rank dies
AFTER = 10  # steps after it has been replaced


def train(run_dir: Path, marks: Path, num_mb: int) -> None:
    """A rank of the run that is timed. Ends when a rank has joined, and some steps later."""
    run = samestep.Run(run_dir, batch_size=16, micro_batch_size=4, snapshot_every="never", device="cpu")
    model = build_model(num_mb)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    run.prepare(model=model, optimizer=optimizer)
    num_ranks = int(os.environ["WORLD_SIZE"])
    joined = 0
    for step in run.steps(torch.randn(64, WIDTH), 1000):
        for x in step:
            if step.number == KILLED and run.rank == num_ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward((model(x) ** 2).mean())
        optimizer.step()
        if run.rank == 0:
            with open(marks, "a") as file:
                print(step.number, run.world_size, time.monotonic(), file=file)
        joined += step.number > KILLED and run.world_size == num_ranks
        if run.once(int, joined) == AFTER:  # rank 0's number: a rank that has just joined has not counted
            run.stop()


class Seconds(NamedTuple):
    """The median step, the pause, and the time from the death until a step with the new rank is done."""

    step: float
    pause: float
    until_joined: float


def measure(num_mb: int, num_ranks: int) -> Seconds:
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder, "marks")
        flags = ["--nproc-per-node", str(num_ranks), "--heal", "--replace"]
        words = [__file__, "--train", f"{folder}/run", "--marks", str(marks), "--mb", str(num_mb)]
        command = [sys.executable, "-m", "samestep", "launch", *flags, *words]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        lines = [line.split() for line in marks.read_text().splitlines()]
    rows = [(int(step), int(world_size), float(at_s)) for step, world_size, at_s in lines]
    first = next(i for i, row in enumerate(rows) if row[0] > KILLED and row[1] == num_ranks)
    steps = [rows[i][2] - rows[i - 1][2] for i in range(first + 1, len(rows))]
    step_s = statistics.median(steps)
    killed_s = next(row[2] for row in rows if row[0] == KILLED - 1)
    return Seconds(step_s, rows[first][2] - rows[first - 1][2] - step_s, rows[first][2] - killed_s)


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 1000], help="of weights and optimizer state")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="2 to 4")
    parser.add_argument("--rounds", type=int, default=3, help="times that each is run")
    for words in (["--train"], ["--marks"]):
        parser.add_argument(*words, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train(args.train, args.marks, args.mb[0])
        return
    if args.quick:
        args.mb, args.ranks, args.rounds = [12], [2], 1
    results = {
        f"{mb} MB, {ranks} ranks": [measure(mb, ranks) for _ in range(args.rounds)]
        for mb in args.mb
        for ranks in args.ranks
    }
    if args.json:
        print_json(results={name: [*map(list, rounds)] for name, rounds in results.items()})
        return
    print_machine()
    rows = [
        [name, *(f"{statistics.median(each):.2f} s" for each in zip(*rounds, strict=True))]
        for name, rounds in results.items()
    ]
    print_table(["state", "a step", "the pause", "from the death until the new rank takes part"], rows)


if __name__ == "__main__":
    main()
