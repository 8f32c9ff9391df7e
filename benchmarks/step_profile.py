"""Where the time of a step goes on one rank: samples of its CPU time, by what samestep does for its promises.

The MLP of `step_cost.py` without a run directory. A timer interrupts the process after each 0.5 ms of CPU time, and the
innermost function of samestep, or the script, gets the sample. docs/dev/step_cost.md has the figures.
"""

import io
import os
import signal
import sys
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType

import torch
from common import build_parser, print_json, print_machine, print_table
from step_cost import run_samestep

import samestep

SECONDS = 0.0005
OWN = f"{Path(samestep.__file__).parent}/"
SCRIPT_FILE = run_samestep.__code__.co_filename
SCRIPT = "forward, loss, update"
# What the step does -> where: functions, files and folders of samestep. The first match counts.
PARTS = {
    "backward": ("run_backward_alone",),
    "seeds at the places where a script may draw numbers": ("seed_all", "derive", "Loop._seed_body"),
    "samples: order, loading, collating, fingerprints": ("data/", "plan/", "recipes/", "train/feed.py", "hashing.py"),
    "checks: parameters, gradients, buffers, the script's calls": (
        "ParameterGuard", "TreeSum._note_all", "TreeSum.close", "list_storages", "engine/buffers.py", "train/guards.py",
        "TrainedParameters",
    ),
    "votes and phases: signals, stuck ranks": (
        "train/stopping.py", "snapshot/snapshotter.py", "watch/beats.py", "Loop._cast_vote",
    ),
    "metrics and progress": ("train/metrics.py", "train/context.py", "watch/", "config.py"),
    "the step itself: reports, sums, averages, the three loops": ("",),
}  # fmt: skip


class Samples:
    """Counts samples of this process's CPU time while it is active."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def __enter__(self) -> None:
        signal.signal(signal.SIGPROF, self._take)
        signal.setitimer(signal.ITIMER_PROF, SECONDS, SECONDS)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _take(self, number: int, frame: FrameType | None) -> None:
        while frame is not None and not frame.f_code.co_filename.startswith((OWN, SCRIPT_FILE)):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename == SCRIPT_FILE:
            self.counts[SCRIPT] += 1
            return
        where = frame.f_code.co_filename.removeprefix(OWN)
        function = frame.f_code.co_qualname
        part = next(part for part, marks in PARTS.items() if where.startswith(marks) or function.startswith(marks))
        self.counts[part] += 1


def profile(num_steps: int) -> dict[str, float]:
    """Return the microseconds per step of each part."""
    with redirect_stdout(io.StringIO()):
        steps = run_samestep(1)
        for _ in range(num_steps // 10 + 1):
            next(steps)
        samples = Samples()
        began_s = time.process_time()
        with samples:
            for _ in range(num_steps):
                next(steps)
        us = (time.process_time() - began_s) / num_steps * 1e6
    total = max(samples.counts.total(), 1)
    return {part: us * samples.counts[part] / total for part in (SCRIPT, *PARTS)}


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=30_000, help="number of steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = profile(20 if args.quick else args.steps)
    if args.json:
        print_json(us_per_step=result)
    else:
        print_machine()
        rows = [(part, f"{us:.0f}") for part, us in (result | {"all": sum(result.values())}).items()]
        print_table(["", "us of CPU time per step"], rows)
    sys.stdout.flush()
    os._exit(0)  # the loop has no end


if __name__ == "__main__":
    main()
