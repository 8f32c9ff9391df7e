"""Trains a script on several numbers of ranks, each for some steps and several times, and measures its steps."""

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from samestep.config import NO_INTERCEPTORS, Overrides, to_variables
from samestep.errors import Error
from samestep.files import read_tail
from samestep.launch.target import Target
from samestep.tools.traced_script import build_trace, find_errors, read_lines, start
from samestep.units import format_ranks
from samestep.world.environment import HOOK

Line = Mapping[str, Any]

INTERCEPTOR = "samestep.tools.scale.timing:ScaleTiming"
NUM_BLOCKS = 5  # of each start, whose spread gives the error
OUTSIDE = ("saving", "validating")  # phases that are not part of a step
LEAST_BLOCKS = 2


@dataclass
class Size:
    """The measurements at one number of ranks.

    Attributes:
        facts: rank 0's lines about the run and its links, and about its tensors, if it is alone.
        blocks_s: seconds per step of the slowest rank, for each block of steps of each start.
        phases_s: phase -> seconds per step, the mean over ranks and starts. "exchange" is the time that the rank with
            the shortest wait spends in the exchange, and "waiting" the additional time of the others.
        compute_steps_s: seconds that rank 0 computes in each step, to measure their variation.
        num_micro_batches: largest number of micro-batches of a rank.
        num_samples: number of samples of a step, over all ranks.
        num_steps: number of steps of the shortest start.
    """

    world_size: int
    batch_size: int
    facts: Line = field(default_factory=dict)
    blocks_s: list[float] = field(default_factory=list)
    starts: list[Mapping[str, float]] = field(default_factory=list)
    compute_steps_s: list[float] = field(default_factory=list)
    num_samples: float = 0.0
    num_steps: int = sys.maxsize

    @property
    def step_s(self) -> float:
        """Return the seconds per step: the median over the blocks."""
        return median(self.blocks_s)

    @property
    def error(self) -> float:
        """Return the relative standard error of `step_s`, from the blocks' median absolute deviation."""
        middle = self.step_s
        spread_s = 1.4826 * median(abs(block_s - middle) for block_s in self.blocks_s)
        return 1.2533 * spread_s / math.sqrt(len(self.blocks_s)) / middle

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.step_s

    @property
    def phases_s(self) -> dict[str, float]:
        return {name: median(start[name] for start in self.starts) for name in self.starts[0]}

    def to_json(self) -> dict[str, Any]:
        """Return the measurements for a file."""
        return {
            "world_size": self.world_size,
            "batch_size": self.batch_size,
            "step_s": self.step_s,
            "error": self.error,
            "samples_per_s": self.samples_per_s,
            "phases_s": self.phases_s,
            "blocks_s": self.blocks_s,
            "jitter": measure_jitter(self.compute_steps_s),
            "facts": self.facts,
        }


@dataclass
class Starts:
    """Starts of one target, each in a new directory in `home`, which is removed after it.

    Attributes:
        overrides: options of `Run` that replace those of the script.
        quota: the options of `cpu_quota.begin`; None: no quota.
        lock: a file descriptor that the ranks inherit.
    """

    target: Target
    overrides: Overrides
    home: Path
    num_steps: int
    num_warm_up: int
    quota: Mapping[str, Any] | None
    lock: int

    def run(self, size: Size, overrides: Overrides) -> None:
        """Start the script, and add its measurements.

        Raises:
            Error: the script fails, or trains for too few steps.
        """
        place = self.home / "start"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        options = {
            **self.overrides,
            "run_dir": place / "run",
            "max_steps": self.num_warm_up + self.num_steps,
            "snapshot_every": "never",
            "resume": "never",
            "compare_every": "never",
            **NO_INTERCEPTORS,
            **overrides,
        }
        variables = build_trace(INTERCEPTOR, place, to_variables(options))
        if self.quota is not None:
            variables[HOOK] = json.dumps(["samestep.tools.scale.cpu_quota", self.quota])
        with start(self.target.to_full_command(size.world_size), variables, place / "output", (self.lock,)) as process:
            code = process.wait()
        ranks = [read_lines(place / f"rank-{rank}.jsonl") for rank in range(size.world_size)]
        where = f"{self.target.name.removeprefix('samestep.recipes.')} on {format_ranks(size.world_size)}"
        if code or not all(ranks):
            output = read_tail(place / "output").rstrip()
            words = (find_errors(output) or output.splitlines() or ["it printed nothing"])[-1]
            raise Error(f"{where} cannot be measured, it ends with exit code {code}: {words}", code="SS711")
        size.facts = ranks[0][0] | next((line for line in ranks[0] if "memory" in line), {})
        if (found := size.facts["world_size"]) != size.world_size:
            raise Error(f"{where} starts {found} ranks itself: pass the script that each rank runs", code="SS712")
        steps = [[line for line in rank if "at_s" in line] for rank in ranks]
        add_steps(size, [lines[self.num_warm_up - 1 :] for lines in steps], where)  # from the end of the last one


def add_steps(size: Size, ranks: Sequence[Sequence[Line]], where: str) -> None:
    """Add the steps of one start: for each rank, a line at the beginning of the first step and one at the end of each.

    Raises Error if there are too few.
    """
    num = min(map(len, ranks)) - 1
    if num < LEAST_BLOCKS:
        raise Error(
            f"{where} trains for {max(num, 0)} steps after the warm-up: more are needed, or a lower --warm-up",
            code="SS712",
        )
    size.num_steps = min(size.num_steps, num)
    differences = [[subtract(before, after) for before, after in pairwise(rank[: num + 1])] for rank in ranks]
    num_blocks = min(NUM_BLOCKS, num)
    for block in range(num_blocks):
        part = slice(block * num // num_blocks, (block + 1) * num // num_blocks)
        size.blocks_s.append(max(fmean(step["step"] for step in rank[part]) for rank in differences))
    means = [{name: fmean(step[name] for step in rank) for name in rank[0]} for rank in differences]
    spent = {name: fmean(rank[name] for rank in means) for name in means[0]}
    # In each step the rank that waits least is the last one to arrive: its time is that of the exchange alone.
    exchange_s = fmean(min(rank[step]["reducing"] for rank in differences) for step in range(num))
    size.starts.append(
        {
            "data": spent["loading"],
            "compute": spent["forward"] + spent["backward"],
            "backward": spent["backward"],
            "exchange": exchange_s,
            "waiting": spent["reducing"] - exchange_s,
            "update": spent["updating"],
            "other": spent["step"] - sum(spent[name] for name in PHASES),
        }
    )
    size.compute_steps_s += [step["forward"] + step["backward"] for step in differences[0]]
    size.num_samples = fmean(sum(rank[step]["samples"] for rank in differences) for step in range(num))


PHASES = ("loading", "forward", "backward", "reducing", "updating")


def subtract(before: Line, after: Line) -> dict[str, float]:
    """Return the time of a step in each phase and in total, without snapshots and validation."""
    spent = {name: after["spent_s"].get(name, 0.0) - before["spent_s"].get(name, 0.0) for name in PHASES + OUTSIDE}
    step_s = after["at_s"] - before["at_s"] - sum(spent[name] for name in OUTSIDE)
    return {**spent, "step": step_s, "samples": after["num_samples"]}


def measure_jitter(seconds: Sequence[float]) -> float:
    """Return the relative standard deviation of steps, from the median absolute deviation, which ignores outliers."""
    middle = median(seconds)
    return 1.4826 * median(abs(value - middle) for value in seconds) / middle if middle > 0 else 0.0
