"""`samestep scale`: measures how a script scales with the number of ranks."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

import click

from samestep.command_line import JSON, print_json
from samestep.config import OPTIONS, Option, Shard, whole
from samestep.console import print_table, say, show_activity
from samestep.errors import Error
from samestep.launch.flags import FLAGS as LAUNCH_FLAGS
from samestep.launch.flags import parse_sizes
from samestep.launch.launcher import check_target
from samestep.launch.script_command import ScriptCommand
from samestep.launch.target import Target
from samestep.plan.memory import ParamSize, RankMemory, compute_memory
from samestep.tools.scale.fit import StepFit, fit_steps
from samestep.tools.scale.measurement import Size, Starts
from samestep.tools.traced_script import exiting_on_sigterm
from samestep.units import format_bytes, format_ranks, format_time
from samestep.world.workdir import open_workdir

_OF_RUN = ("batch_size", "micro_batch_size", "seed", "num_threads", "precision", "device", "backend")
FLAGS: dict[str, Option] = {
    "world_sizes": Option(str, "N,N", "numbers of ranks to measure, 1 among them; default: 1,2,4"),
    "steps": Option(int, "N", "measured steps of each start; default: 30", whole(2)),
    "warm_up": Option(int, "N", "steps of each start before the measured ones; default: 5", whole(1)),
    "repeats": Option(int, "N", "starts at each number of ranks; default: 3", whole(1)),
    "for_steps": Option(int, "N", "also print the time to finish a run of N steps", whole(1)),
    "json": JSON,
    **{name: LAUNCH_FLAGS[name] for name in _OF_RUN},
}
SHARDS: tuple[str | None, ...] = (None, *get_args(Shard))
NOTE = (
    "memory: the sizes of the tensors are measured on 1 rank, their division is computed; without activations, "
    "messages, buffers of the model and copies for snapshots"
)
Row = dict[str, Any]


@click.command("scale", cls=ScriptCommand, flags=FLAGS)
def run_scale(target: Target, values: Mapping[str, Any]) -> int:
    """Trains for a few steps on several numbers of ranks of this machine, in turns, each in a temporary run directory.
    Fits the time of a step to them, and prints speed-up, efficiency and the time to finish, with their standard errors,
    also of more ranks than were measured. A second table has the memory of a rank for each value of shard.
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
        say(f"{sizes[-1]} ranks share {num_cores} cores: separate machines would not lose what they take each other")
    with exiting_on_sigterm(), open_workdir("scale-") as work:
        overrides = {name: value for name, value in values.items() if name in OPTIONS and name in _OF_RUN}
        num_steps = values.get("steps", 30)
        starts = Starts(target, overrides, work, num_steps, values.get("warm_up", 5))
        measured = measure(starts, sizes, values.get("repeats", 3))
    if (found := min(size.num_steps for size in measured.values())) < num_steps:
        say(f"{found} steps were measured, not {num_steps}: after the warm-up, the script trains for no more")
    alone = measured[1]
    fit = fit_steps(
        alone.batch_size // alone.micro_batch_size, {w: (size.step_s, size.error) for w, size in measured.items()}
    )
    rows = build_rows(fit, measured)
    num_run_steps = values.get("for_steps", 0)
    if num_run_steps:
        rows = [
            {**row, "finish_s": num_run_steps * row["step_s"], "finish_error_s": num_run_steps * row["step_error_s"]}
            for row in rows
        ]
    memory = list_memory(alone.memory, [row["world_size"] for row in rows])
    if values.get("json"):
        facts = {"script": " ".join(target.to_words()), "num_cores": num_cores, "fit": asdict(fit)}
        print_json({**facts, "sizes": rows, "memory": memory})
    else:
        print_result(fit, rows, memory, num_run_steps)
    return 0


def measure(starts: Starts, sizes: Sequence[int], repeats: int) -> dict[int, Size]:
    """Start all sizes in turns, so that a change of the machine's speed affects all. Returns size -> result."""
    measured: dict[int, Size] = {}
    for number in range(repeats):
        for size in sizes:
            if measured and size > (most := measured[1].batch_size // measured[1].micro_batch_size):
                continue
            show_activity(f"{format_ranks(size)}, start {number + 1} of {repeats} ...")
            starts.run(measured.setdefault(size, Size(size)))
    show_activity("")
    if len(measured) == 1:
        raise Error(
            f"the micro-batches of a step are work for {format_ranks(most)} only, so no sizes can be compared: give "
            f"a smaller --micro-batch-size than {measured[1].micro_batch_size}",
            code="SS109",
        )
    if skipped := [size for size in sizes if size not in measured]:
        left_out = ", ".join(map(str, skipped))
        say(f"left out: {left_out} ranks, because the micro-batches of a step are work for {format_ranks(most)} only")
    return measured


def build_rows(fit: StepFit, measured: Mapping[int, Size]) -> list[Row]:
    """Return a row for each measured size, and for each larger power of two that a step has work for.

    If more ranks are not faster, by the fit, larger sizes are left out: the ranks share what limits them.
    """
    largest = fit.num_micro_batches if fit.micro_batch_s > 0 else 0
    powers = [2**k for k in range(largest.bit_length()) if 2**k > max(measured)]
    alone = measured[1]
    rows = []
    for size in [*sorted(measured), *powers]:
        fitted_s, fitted_error_s = fit.predict(size)
        found = measured.get(size)
        step_s = found.step_s if found else fitted_s
        error = found.error if found else fitted_error_s / fitted_s
        speed_up = alone.step_s / step_s
        speed_up_error = speed_up * math.hypot(error, alone.error) if size > 1 else 0.0
        rows.append(
            {
                "world_size": size,
                "is_measured": found is not None,
                "step_s": step_s,
                "step_error_s": step_s * error,
                "fitted_step_s": fitted_s,
                "samples_per_s": alone.batch_size / step_s,
                "speed_up": speed_up,
                "speed_up_error": speed_up_error,
                "efficiency": speed_up / size,
                "efficiency_error": speed_up_error / size,
            }
        )
    return rows


def list_memory(sizes: Sequence[ParamSize], world_sizes: Sequence[int]) -> list[Row]:
    """Return the memory of a rank at each number of ranks, for each value of `shard`. One rank divides nothing."""
    return [
        {"world_size": world_size, "shard": shard or "none", **asdict(memory), "total": memory.total}
        for world_size in world_sizes
        for shard in (SHARDS if world_size > 1 else SHARDS[:1])
        for memory in [compute_memory(sizes, shard, world_size)]
    ]


def print_result(fit: StepFit, rows: Sequence[Row], memory: Sequence[Row], num_steps: int | None) -> None:
    """Print the tables and sentences."""
    header = ["ranks", "samples/s", "ms per step", "fitted", "speed-up", "efficiency"]
    cells = []
    for row in rows:
        step = f"{1e3 * row['step_s']:,.1f} +- {1e3 * row['step_error_s']:,.1f}"
        cell = [
            str(row["world_size"]),
            f"{row['samples_per_s']:,.0f}",
            step if row["is_measured"] else "",
            f"{1e3 * row['fitted_step_s']:,.1f}"
            + ("" if row["is_measured"] else f" +- {1e3 * row['step_error_s']:,.1f}"),
            f"{row['speed_up']:.2f} +- {row['speed_up_error']:.2f}",
            f"{row['efficiency']:.0%} +- {row['efficiency_error']:.0%}",
        ]
        if num_steps:
            cell.append(f"{format_time(row['finish_s'])} +- {format_time(row['finish_error_s'])}")
        cells.append(cell)
    print_table("scaling", [*header, "to finish"] if num_steps else header, cells)
    if fit.micro_batch_s > 0:
        sums = f"{1e3 * fit.fixed_s:,.1f} ms + {1e3 * fit.micro_batch_s:,.1f} ms"
        print(f"fitted: {sums} for each of the slowest rank's micro-batches, of {fit.num_micro_batches} per step")
    else:
        print("fitted: more ranks are not faster here, so more than were measured are not estimated")
    if num_steps:
        print(f"to finish: {num_steps:,} steps, without the start of the ranks, snapshots and validation")
    if memory:
        kinds = [*RankMemory.__dataclass_fields__, "total"]
        header = ["ranks", "shard", *(each.replace("_", " ") for each in kinds)]
        table = [[str(row["world_size"]), row["shard"], *(format_bytes(row[each]) for each in kinds)] for row in memory]
        print_table("memory per rank", header, table)
        print(NOTE)
