"""`samestep scale`: measures how a script scales with the number of ranks. Does not import torch."""

import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from samestep.cli import JSON, print_json
from samestep.config import Option, Overrides, Shard, whole
from samestep.console import format_bytes, format_count, format_time, print_table, say, show_activity
from samestep.errors import Error
from samestep.files import read_tail
from samestep.launch.target import FLAGS as LAUNCH_FLAGS
from samestep.launch.target import ScriptCommand, Target, Values, check_target, parse_sizes
from samestep.plan.shards import ParamSize, RankMemory, compute_memory
from samestep.tools.traced_script import OF_RUN, find_errors, open_workdir, read_lines, run_traced

FLAGS: dict[str, Option] = {
    "world_sizes": Option(str, "N,N", "numbers of ranks to measure, 1 among them; default: 1,2,4"),
    "steps": Option(int, "N", "measured steps of each start; default: 30", whole(2)),
    "warm_up": Option(int, "N", "steps of each start before the measured ones; default: 5", whole(1)),
    "repeats": Option(int, "N", "starts at each number of ranks; default: 3", whole(1)),
    "for_steps": Option(int, "N", "also print the time to finish a run of N steps", whole(1)),
    "json": JSON,
    **{name: LAUNCH_FLAGS[name] for name in OF_RUN},
}
DIVISIONS: tuple[tuple[Shard | None, int], ...] = ((None, 1), ("optimizer", 1), ("optimizer", 2), ("fsdp2", 1))
NOTE = (
    "memory: the sizes of the tensors are measured on 1 rank, their division is computed; without activations, "
    "messages, buffers of the model and copies for snapshots"
)
INTERCEPTOR = "samestep.tools.interceptors:ScaleTiming"
NUM_BLOCKS = 5  # of each start, whose spread gives the error
LEAST_STEPS = 2
LEAST_ERROR = 1e-3  # relative, of a measurement: blocks that happen to be equal are no exact time
Row = dict[str, Any]


@click.command("scale", cls=ScriptCommand, flags=FLAGS)
def run_scale(target: Target, values: Values) -> None:
    """Trains for a few steps on several numbers of ranks of this machine, in turns, each in a temporary run directory.
    Fits the time of a step to them, and prints speed-up, efficiency and the time to finish, with their standard errors,
    also of more ranks than were measured. A second table has the memory of a rank for each value of shard, and for
    shard_copies=2.
    """
    check_target(target)
    sizes = sorted(parse_sizes(values.get("world_sizes", "1,2,4")))
    if sizes[0] != 1 or len(sizes) < 2:
        raise Error(
            "--world-sizes needs 1, to which all is compared, and at least one other number, such as 1,2,4",
            code="SS101",
        )
    num_cores = len(os.sched_getaffinity(0))
    if sizes[-1] > num_cores and values.get("device", "cpu") == "cpu":
        say(f"{sizes[-1]} ranks share {num_cores} cores, and slow each other down: separate machines would not")
    num_steps = values.get("steps", 30)
    with open_workdir("scale") as work:
        overrides = {name: value for name, value in values.items() if name in OF_RUN}
        starts = Starts(target, overrides, work, num_steps, values.get("warm_up", 5))
        measured = starts.measure(sizes, values.get("repeats", 3))
    if (found := min(size.num_steps for size in measured.values())) < num_steps:
        say(f"{found} steps were measured, not {num_steps}: after the warm-up, the script trains for no more")
    fit = fit_steps(measured[1].num_parts, {w: (size.step_s, size.error) for w, size in measured.items()})
    rows = build_rows(fit, measured)
    num_run_steps = values.get("for_steps", 0)
    for row in rows if num_run_steps else ():
        row |= {"finish_s": num_run_steps * row["step_s"], "finish_error_s": num_run_steps * row["step_error_s"]}
    memory = list_memory(measured[1].memory, [row["world_size"] for row in rows])
    if values.get("json"):
        print_json(
            {
                "script": " ".join(target.to_words()),
                "num_cores": num_cores,
                "fit": asdict(fit),
                "sizes": rows,
                "memory": memory,
            }
        )
    else:
        print_result(fit, measured[1].parts, rows, memory, num_run_steps)


# --- the measurement --------------------------------------------------------------------------------------------------


@dataclass
class Size:
    """The measurements at one number of ranks.

    Attributes:
        batch_size, micro_batch_size, workers: of the run.
        blocks_s: seconds per step of the slowest rank, for each block of steps of each start.
        memory: the sizes of the tensors, if it is one rank.
        num_steps: number of steps of the shortest start.
    """

    world_size: int
    batch_size: int = 0
    micro_batch_size: int = 1
    blocks_s: list[float] = field(default_factory=list)
    memory: list[ParamSize] = field(default_factory=list)
    num_steps: int = sys.maxsize
    workers: int | None = None

    @property
    def parts(self) -> str:
        """What the ranks divide, for messages."""
        return "micro-batches" if self.workers is None else "workers"

    @property
    def num_parts(self) -> int:
        """How many micro-batches or workers a step has, and so the largest number of ranks."""
        return self.workers or self.batch_size // self.micro_batch_size

    @property
    def step_s(self) -> float:
        """The seconds per step: the median over the blocks."""
        return median(self.blocks_s)

    @property
    def error(self) -> float:
        """The relative standard error of `step_s`, from the blocks' median absolute deviation."""
        step_s = self.step_s
        spread_s = 1.4826 * median(abs(block_s - step_s) for block_s in self.blocks_s)
        return 1.2533 * spread_s / math.sqrt(len(self.blocks_s)) / step_s

    def add_steps(self, ranks: Sequence[Sequence[float]], where: str) -> None:
        """Add the steps of one start: for each rank, the times at which steps ended. Raises Error if too few did."""
        num = min(map(len, ranks)) - 1
        if num < LEAST_STEPS:
            raise Error(
                f"{where} trains for {max(num, 0)} steps after the warm-up: more are needed, or a lower --warm-up",
                code="SS712",
            )
        self.num_steps = min(self.num_steps, num)
        num_blocks = min(NUM_BLOCKS, num)
        for begin, end in pairwise(block * num // num_blocks for block in range(num_blocks + 1)):
            self.blocks_s.append(max(rank[end] - rank[begin] for rank in ranks) / (end - begin))


@dataclass(frozen=True)
class Starts:
    """Starts of one target, each in a new directory in `home`.

    Attributes:
        overrides: options of `Run` that replace those of the script.
    """

    target: Target
    overrides: Overrides
    home: Path
    num_steps: int
    num_warm_up: int

    def measure(self, sizes: Sequence[int], repeats: int) -> dict[int, Size]:
        """Start all sizes in turns, so that a change of the machine's speed affects all. Returns size -> result."""
        measured = {1: Size(1)}
        for number in range(repeats):
            for size in sizes:
                if size > 1 and size > measured[1].num_parts:
                    continue
                show_activity(f"{format_count(size, 'rank')}, start {number + 1} of {repeats} ...")
                self._run(measured.setdefault(size, Size(size)))
        show_activity("")
        alone = measured[1]
        most = format_count(alone.num_parts, "rank")
        if len(measured) == 1:
            smaller = f"a smaller --micro-batch-size than {alone.micro_batch_size}"
            raise Error(
                f"the {alone.parts} of a step are work for {most} only, so no sizes can be compared: give "
                f"{smaller if alone.workers is None else 'more --workers'}",
                code="SS109",
            )
        if skipped := [str(size) for size in sizes if size not in measured]:
            say(f"left out: {', '.join(skipped)} ranks, because the {alone.parts} of a step are work for {most} only")
        return measured

    def _run(self, size: Size) -> None:
        """Start the script, and add its measurements. Raises Error if it fails, or trains for too few steps."""
        directory = self.home / "start"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        options = {
            **self.overrides,
            "run_dir": directory / "run",
            "max_steps": self.num_warm_up + self.num_steps,
            "snapshot_every": "never",
            "resume": "never",
            "compare_every": "never",
        }
        code = run_traced(self.target.to_full_command(size.world_size), directory, INTERCEPTOR, options)
        ranks = [[*read_lines(directory / f"rank-{rank}.jsonl")] for rank in range(size.world_size)]
        where = f"{self.target.said} on {format_count(size.world_size, 'rank')}"
        if code or not all(ranks):
            output = read_tail(directory / "output").rstrip()
            words = (find_errors(output) or output.splitlines() or ["it printed nothing"])[-1]
            raise Error(f"{where} cannot be measured, it ends with exit code {code}: {words}", code="SS711")
        facts = ranks[0][0]
        if (found := facts["world_size"]) != size.world_size:
            raise Error(f"{where} starts {found} ranks itself: pass the script that each rank runs", code="SS712")
        size.batch_size, size.micro_batch_size = facts["batch_size"], facts["micro_batch_size"]
        size.workers = facts["workers"]
        size.memory = [ParamSize(*each) for line in ranks[0] for each in line.get("memory", ())]
        times = [[line["at_s"] for line in rank if "at_s" in line] for rank in ranks]
        size.add_steps([each[self.num_warm_up - 1 :] for each in times], where)  # from the end of the last one


# --- the fit ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepFit:
    """The time of a step of V micro-batches (or workers) on W ranks: `fixed_s + micro_batch_s * ceil(V / W)`.

    The slowest rank computes ceil(V / W) of them, one after the other. All else, such as the exchange and the
    update, takes `fixed_s`.

    Attributes:
        num_micro_batches: V.
        fixed_s, micro_batch_s: in seconds.
        covariance: of `micro_batch_s` and `fixed_s`.
    """

    num_micro_batches: int
    fixed_s: float
    micro_batch_s: float
    covariance: list[list[float]]

    def predict(self, world_size: int) -> tuple[float, float]:
        """Return the seconds of a step on so many ranks, and their standard error."""
        share = math.ceil(self.num_micro_batches / world_size)
        factors = np.array([share, 1])
        variance = float(factors @ self.covariance @ factors)
        return self.fixed_s + share * self.micro_batch_s, math.sqrt(max(variance, 0.0))


def fit_steps(num_micro_batches: int, measured: Mapping[int, tuple[float, float]]) -> StepFit:
    """Fit both parameters by least squares, weighted by the errors of the measurements.

    If the measurements are farther from the fit than their errors explain, the errors of the parameters grow
    accordingly. A negative `fixed_s`, from ranks that speed up by more than their number, becomes 0.

    Args:
        num_micro_batches: of a step.
        measured: number of ranks -> seconds per step, and their relative standard error; two shares or more.
    """
    shares = np.array([math.ceil(num_micro_batches / size) for size in measured], float)
    times_s, errors = np.array([*measured.values()]).T
    weights = 1 / (np.maximum(errors, LEAST_ERROR) * times_s)
    (micro_s, fixed_s), covariance = np.polyfit(shares, times_s, 1, w=weights, cov="unscaled")
    if fixed_s < 0:
        fixed_s = 0.0
        micro_s = np.average(times_s / shares, weights=(weights * shares) ** 2)
    residual = (((fixed_s + micro_s * shares - times_s) * weights) ** 2).sum()
    if len(shares) > 2:
        covariance *= max(1.0, residual / (len(shares) - 2))
    return StepFit(num_micro_batches, float(fixed_s), float(micro_s), covariance.tolist())


# --- the tables -------------------------------------------------------------------------------------------------------


def build_rows(fit: StepFit, measured: Mapping[int, Size]) -> list[Row]:
    """Return a row for each measured size, and for each larger power of two that a step has work for.

    If more ranks are not faster, by the fit, larger sizes are left out: the ranks share what limits them.
    """
    largest = fit.num_micro_batches if fit.micro_batch_s > 0 else 0
    powers = [2**k for k in range(largest.bit_length()) if 2**k > max(measured)]
    alone = measured[1]
    rows = []
    for size in [*sorted(measured), *powers]:
        found = measured.get(size)
        step_s, step_error_s = (found.step_s, found.step_s * found.error) if found else fit.predict(size)
        speed_up = alone.step_s / step_s
        rows.append(
            {
                "world_size": size,
                "is_measured": found is not None,
                "step_s": step_s,
                "step_error_s": step_error_s,
                "samples_per_s": alone.batch_size / step_s,
                "speed_up": speed_up,
                "speed_up_error": speed_up * math.hypot(step_error_s / step_s, alone.error) if size > 1 else 0.0,
                "efficiency": speed_up / size,
            }
        )
    return rows


def list_memory(sizes: Sequence[ParamSize], world_sizes: Sequence[int]) -> list[Row]:
    """Return the memory of a rank at each number of ranks, for each division. One rank divides nothing."""
    rows = []
    for world_size in world_sizes if sizes else ():
        for shard, copies in DIVISIONS if world_size > 1 else DIVISIONS[:1]:
            memory = compute_memory(sizes, shard, world_size, copies)
            of_one = {"world_size": world_size, "shard": shard or "none", "shard_copies": copies}
            rows.append({**of_one, **asdict(memory), "total": memory.total})
    return rows


def print_result(fit: StepFit, parts: str, rows: Sequence[Row], memory: Sequence[Row], num_steps: int) -> None:
    """Print the tables and sentences.

    Args:
        parts: what the ranks divide.
        num_steps: of the run whose time to finish they have; 0: none.
    """
    header = ["ranks", "", "samples/s", "ms per step", "speed-up", "efficiency"]
    cells = []
    for row in rows:
        cell = [
            str(row["world_size"]),
            "measured" if row["is_measured"] else "fitted",
            f"{row['samples_per_s']:,.0f}",
            f"{1e3 * row['step_s']:,.1f} +- {1e3 * row['step_error_s']:,.1f}",
            f"{row['speed_up']:.2f} +- {row['speed_up_error']:.2f}",
            f"{row['efficiency']:.0%}",
        ]
        if num_steps:
            cell.append(f"{format_time(row['finish_s'])} +- {format_time(row['finish_error_s'])}")
        cells.append(cell)
    print_table("scaling", [*header, "to finish"] if num_steps else header, cells)
    if fit.micro_batch_s > 0:
        print(
            f"fitted: {1e3 * fit.fixed_s:,.1f} ms + {1e3 * fit.micro_batch_s:,.1f} ms for each of the slowest rank's "
            f"{parts}, of {fit.num_micro_batches} per step"
        )
    else:
        print("fitted: more ranks are not faster here, so more than were measured are not estimated")
    if num_steps:
        print(f"to finish: {num_steps:,} steps, without the start of the ranks, snapshots and validation")
    if memory:
        kinds = [*(each.name for each in fields(RankMemory)), "total"]
        names = ["world_size", "shard", "shard_copies"]
        table = [[*(str(row[each]) for each in names), *(format_bytes(row[each]) for each in kinds)] for row in memory]
        print_table("memory per rank", ["ranks", "shard", "copies", *(each.replace("_", " ") for each in kinds)], table)
        print(NOTE)
