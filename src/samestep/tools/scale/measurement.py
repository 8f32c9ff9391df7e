"""Measures the time of a script's steps on a number of ranks of this machine."""

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from samestep.config import Overrides
from samestep.errors import Error
from samestep.files import read_tail
from samestep.launch.target import Target
from samestep.plan.memory import ParamSize
from samestep.tools.traced_script import find_errors, read_lines, run_traced
from samestep.units import format_ranks

Line = Mapping[str, Any]

INTERCEPTOR = "samestep.tools.scale.timing:ScaleTiming"
NUM_BLOCKS = 5  # of each start, whose spread gives the error
LEAST_STEPS = 2


@dataclass
class Size:
    """The measurements at one number of ranks.

    Attributes:
        batch_size, micro_batch_size: of the run.
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
        ends = [block * num // num_blocks for block in range(num_blocks + 1)]
        for begin, end in pairwise(ends):
            self.blocks_s.append(max(rank[end] - rank[begin] for rank in ranks) / (end - begin))


@dataclass(frozen=True)
class Starts:
    """Starts of one target, each in a new directory in `home`, which is removed after it.

    Attributes:
        overrides: options of `Run` that replace those of the script.
    """

    target: Target
    overrides: Overrides
    home: Path
    num_steps: int
    num_warm_up: int

    def run(self, size: Size) -> None:
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
        ranks = [read_lines(directory / f"rank-{rank}.jsonl") for rank in range(size.world_size)]
        where = f"{self.target.name.removeprefix('samestep.recipes.')} on {format_ranks(size.world_size)}"
        if code or not all(ranks):
            output = read_tail(directory / "output").rstrip()
            words = (find_errors(output) or output.splitlines() or ["it printed nothing"])[-1]
            raise Error(f"{where} cannot be measured, it ends with exit code {code}: {words}", code="SS711")
        facts = ranks[0][0]
        if (found := facts["world_size"]) != size.world_size:
            raise Error(f"{where} starts {found} ranks itself: pass the script that each rank runs", code="SS712")
        size.batch_size, size.micro_batch_size = facts["batch_size"], facts["micro_batch_size"]
        size.memory = [ParamSize(*each) for line in ranks[0] for each in line.get("memory", ())]
        times = [[line["at_s"] for line in rank if "at_s" in line] for rank in ranks]
        size.add_steps([each[self.num_warm_up - 1 :] for each in times], where)  # from the end of the last one
