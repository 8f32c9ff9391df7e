"""What `samestep launch --heal` costs while no rank dies: a step of about 20 ms with and without it, in turns.

Its parts, which are also measured one at a time, are the confirmation after each exchange, the thread that waits for
large messages, and the rows and records that every rank keeps. (`restart.py` measures what a death costs with it.)
"""

import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

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
from paced_run import build_paced_run

TARGET = 1.01
CONFIRMATION, THREAD, ROWS = PARTS = "its confirmation", "its thread", "its rows and records"
ON, OFF = "with it", "without it"
WAYS = {OFF: (), ON: PARTS} | {part: (part,) for part in PARTS}  # -> the parts that are on


def time_steps(run_dir: str, num_rounds: int, steps_per_block: int) -> Times:
    """On each rank: times blocks of steps."""
    run, steps = build_paced_run(run_dir, log_every=1)
    group, location = run._context.group, run._context.location
    kept, waiter = location.kept, group.waiter

    def switch(parts: Sequence[str], block: Callable[[int], None]) -> Callable[[int], None]:
        def timed(num_steps: int) -> None:
            location.kept = kept if ROWS in parts else None
            group.waiter = waiter if THREAD in parts else None
            group._refuses = CONFIRMATION not in parts
            block(num_steps)

        return timed

    run_steps = build_contestant("", steps).run_steps
    contestants = [Contestant(way, switch(parts, run_steps), deterministic=True) for way, parts in WAYS.items()]
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
        if os.environ["RANK"] == "0":
            Path(args.train, "times.json").write_text(json.dumps(times))
        return
    results = {ranks: launch(ranks, args.rounds, args.steps) for ranks in args.ranks}
    if args.json:
        print_json(results={str(ranks): times for ranks, times in results.items()})
        return
    print_machine()
    rows = []
    for ranks, times in results.items():
        ratios = {way: compute_ratio(times, way, OFF) for way in WAYS if way != OFF}
        judged = [judge(ratio, TARGET if way == ON else None) for way, ratio in ratios.items()]
        rows.append([str(ranks), f"{1000 * statistics.median(times[OFF]):.1f} ms", *judged])
    print_table(["ranks", f"a step {OFF}", f"{ON}, relative", *PARTS], rows)


if __name__ == "__main__":
    main()
