"""What `samestep launch --heal` costs while no rank dies: a step of about 20 ms with and without its parts, in turns.

Its parts are the confirmation after each exchange, and the rows and records that every rank keeps. (`restart.py`
measures what a death costs with it.)
"""

import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from common import (
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
from torch import nn

import samestep

NUM_MICRO_BATCHES, MICRO_BATCH_SIZE, WIDTH = 8, 16, 512
STEP_S, TARGET = 0.020, 1.01
ON, OFF = "with", "without"


def time_steps(run_dir: str, num_rounds: int, steps_per_block: int) -> Times:
    """On each rank: times blocks of steps."""
    batch_size = NUM_MICRO_BATCHES * MICRO_BATCH_SIZE
    run = samestep.Run(run_dir, batch_size=batch_size, micro_batch_size=MICRO_BATCH_SIZE, device="cpu", log_every=1)
    model = nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    run.prepare(model=model, optimizer=optimizer)
    data = [torch.ones(WIDTH)] * (4 * batch_size)
    repeats = 1

    def train() -> Iterator[None]:
        for step in run.steps(data, 10**9):
            for x in step:
                for _ in range(repeats - 1):  # so that a step takes about as long as it should
                    with torch.no_grad():
                        model(x)
                step.backward(model(x).square().mean())
            optimizer.step()
            yield

    steps = train()
    times_s = []
    for count in (1, 1, 3):
        repeats = count
        began_s = time.perf_counter()
        for _ in range(10):
            next(steps)
        times_s.append((time.perf_counter() - began_s) / 10)
    own = 1 + round(max(0.0, STEP_S - times_s[1]) / max((times_s[2] - times_s[1]) / 2, 1e-4))
    repeats = run._context.group.gather_number(own)[0]
    group: Any = run._context.group
    location: Any = run._context.location
    kept = location.kept

    def switch(is_on: bool, block: Callable[[int], None]) -> Callable[[int], None]:
        def timed(num_steps: int) -> None:
            location._kept = kept if is_on else None
            if is_on:
                vars(group).pop("settle", None)
            else:
                group.settle = lambda: None
            block(num_steps)

        return timed

    block = build_contestant("", steps).run_steps
    contestants = [build_contestant(name, iter(())) for name in (ON, OFF)]
    contestants = [type(each)(each.name, switch(each.name == ON, block), True) for each in contestants]
    return measure(contestants, num_rounds=num_rounds, steps_per_block=steps_per_block)


def launch(num_ranks: int, num_rounds: int, steps_per_block: int) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "samestep", "launch", "--heal", "--nproc-per-node", str(num_ranks), __file__]
        words += ["--train", folder, "--rounds", str(num_rounds), "--steps", str(steps_per_block)]
        done = subprocess.run(words, capture_output=True, text=True)
        times = Path(folder) / "times.json"
        if not times.exists():
            sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return dict(json.loads(times.read_text()))


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each, after one to warm up")
    parser.add_argument("--steps", type=int, default=50, help="per block")
    parser.add_argument("--train", help="the directory of a run: be a rank of it")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.steps = 2, 5
    if args.train:
        with redirect_stdout(io.StringIO()):
            times = time_steps(f"{args.train}/run", args.rounds, args.steps)
        Path(args.train, "times.json").write_text(json.dumps(times))
        return
    results = {ranks: launch(ranks, args.rounds, args.steps) for ranks in args.ranks}
    if args.json:
        print_json(results={str(ranks): times for ranks, times in results.items()})
        return
    print_machine()
    rows = [
        [str(ranks), f"{1000 * statistics.median(times[OFF]):.1f} ms", judge(compute_ratio(times, ON, OFF), TARGET)]
        for ranks, times in results.items()
    ]
    print_table(["ranks", "a step without it", "with it, relative"], rows)


if __name__ == "__main__":
    main()
