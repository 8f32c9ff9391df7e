"""`samestep plan`: finds a batch size and number of ranks for a budget, from the results of `samestep scale`."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from samestep.command_line import PATH, Command
from samestep.console import print_table
from samestep.decoding import parse_json
from samestep.errors import Error
from samestep.files import read_bytes
from samestep.tools.scale.memory_table import NOTE, build_memory, list_memory, read_sizes
from samestep.tools.scale.tables import build_predictions, build_rows, format_time
from samestep.units import format_count, format_ranks

NUM_BATCH_SIZES = 6
HOUR_S = 3600.0
MAX_SCALE_BYTES = 1 << 20


@dataclass(frozen=True)
class Choice:
    """A way to train, with the predicted time of the whole run."""

    batch_size: int
    micro_batch_size: int
    world_size: int
    step_s: float
    run_s: float

    @property
    def rank_hours(self) -> float:
        return self.run_s * self.world_size / HOUR_S


@click.command("plan", cls=Command)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=PATH)
@click.option("--samples", metavar="N", type=float, required=True, help="samples to train on, over all epochs")
@click.option("--time", "hours", metavar="H", type=float, help="budget: hours until the run ends")
@click.option("--rank-hours", metavar="H", type=float, help="budget: hours summed over all ranks")
@click.option("--most-ranks", metavar="N", type=int, default=64, help="most ranks to consider; default: 64")
@click.option("--json", "is_json", is_flag=True, help="print one JSON object")
def run_plan(
    files: Sequence[Path], samples: float, hours: float | None, rank_hours: float | None, most_ranks: int, is_json: bool
) -> int:
    """Finds the batch size, micro-batch size and number of ranks that train a number of samples within a budget.

    Uses the measurements in FILEs, which are outputs of samestep scale --json, one for each micro-batch size.
    Recommends the smallest batch size that fits, because a larger one changes the training. Exit code: 1 if nothing
    fits.
    Also prints the memory that a rank needs for each value of shard.
    """
    if (hours is None) == (rank_hours is None):
        raise Error("the budget is --time or --rank-hours: give one of them", code="SS104")
    limit = (rank_hours if hours is None else hours) or 0.0
    if not (1 <= samples < math.inf and 0 < limit < math.inf and most_ranks >= 1):
        raise Error("--samples, --most-ranks and the hours must be numbers above 0", code="SS101")
    results = [read_scale(file, is_given=True) for file in files]
    found = [each for result in results for each in list_choices(result, int(samples), most_ranks)]

    def cost(each: Choice) -> float:
        return each.run_s / HOUR_S if rank_hours is None else each.rank_hours

    def rank(each: Choice) -> tuple[float, float]:  # what is left to minimize, if the budget is kept
        other = each.rank_hours if rank_hours is None else each.run_s
        return (0.0, other) if cost(each) <= limit else (1.0, cost(each))

    best = [min((c for c in found if c.batch_size == size), key=rank) for size in sorted({c.batch_size for c in found})]
    chosen = next((each for each in best if cost(each) <= limit), None)
    sizes = next(filter(None, map(read_sizes, results)), [])
    memory = list_memory(sizes, sorted({each.world_size for each in found})) if sizes else []
    if is_json:
        rows = [{**asdict(each), "rank_hours": each.rank_hours, "fits": cost(each) <= limit} for each in best]
        print(
            json.dumps(
                {"choices": rows, "chosen": None if chosen is None else best.index(chosen), "memory": memory}, indent=1
            )
        )
        return 1 if chosen is None else 0
    print_table(
        f"{samples:,.0f} samples",
        ["batch", "micro-batch", "ranks", "ms per step", "time", "rank-hours", ""],
        [
            [
                str(each.batch_size),
                str(each.micro_batch_size),
                str(each.world_size),
                f"{1e3 * each.step_s:,.1f}",
                format_time(each.run_s),
                f"{each.rank_hours:.3g}",
                "fits" if cost(each) <= limit else "",
            ]
            for each in best
        ],
    )
    if memory:
        print_table("memory per rank", *build_memory(memory))
        print(NOTE)
    within = format_count(limit, "hour" if rank_hours is None else "rank-hour")
    if chosen is None:
        least = min(best, key=cost)
        print(f"nothing fits into {within}: the nearest is {describe_choice(least)}")
        return 1
    print(f"use {describe_choice(chosen)}, within {within}")
    return 0


def describe_choice(choice: Choice) -> str:
    """Return the choice in words."""
    return (
        f"batch_size {choice.batch_size} and micro_batch_size {choice.micro_batch_size} on "
        f"{format_ranks(choice.world_size)}, which takes {format_time(choice.run_s)} and {choice.rank_hours:.3g} "
        "rank-hours"
    )


def read_scale(path: Path, *, is_given: bool = False) -> Mapping[str, Any]:
    """Read a file of `samestep scale --json`. `is_given` as in `read_bytes`. Raises Error if the file is not one."""
    try:
        result = parse_json(read_bytes(path, MAX_SCALE_BYTES, is_given=is_given))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise Error(
            f"{path} cannot be read ({reason}): name the output of samestep scale --json", code="SS112"
        ) from None
    if not isinstance(result, dict) or result.get("format") != 1 or not {"strong", "weak"} & {*result}:
        raise Error(f"{path} is not the output of samestep scale --json: name such a file", code="SS713")
    try:
        for kind in {"strong", "weak"} & {*result}:
            build_rows(result[kind]["sizes"])
            build_predictions(result[kind].get("predictions", []))
        read_sizes(result)
        result["script"], result["recommendation"]
    except (KeyError, TypeError, IndexError, ValueError, AttributeError, ArithmeticError):
        raise Error(f"{path} is damaged: write it again with samestep scale --json", code="SS713") from None
    return result


def list_choices(result: Mapping[str, Any], num_samples: int, most_ranks: int) -> Iterator[Choice]:
    """Yield choices for the measured batch size and several doublings of it, with 1, 2, 4 ... ranks each."""
    from samestep.tools.scale.step_model import StepModel

    if "model" not in result:
        raise Error(f"{result['script']} has no model: run samestep scale with 2 among --world-sizes", code="SS713")
    try:
        model = StepModel.from_json(result["model"])
        first = (result.get("strong") or result["weak"])["sizes"][0]
        base_size = int(first["batch_size"])
        micro_batch_size = int(first["facts"]["micro_batch_size"])
    except (KeyError, TypeError, IndexError, ValueError):
        raise Error(
            f"the model of {result['script']} is damaged: write it again with samestep scale --json", code="SS713"
        ) from None
    for batch_size in (base_size << k for k in range(NUM_BATCH_SIZES)):
        num = batch_size // micro_batch_size
        world_size = 1
        while world_size <= min(num, most_ranks):
            step_s = model.predict(num, world_size)
            run_s = step_s * math.ceil(num_samples / batch_size)
            yield Choice(batch_size, micro_batch_size, world_size, step_s, run_s)
            world_size *= 2
