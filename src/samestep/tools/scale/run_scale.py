"""`samestep scale`: measures how a script scales with the number of ranks."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from samestep.config import OPTIONS, Option, name_flag, whole
from samestep.console import print_table, say, show_activity
from samestep.decoding import parse_json
from samestep.errors import Error
from samestep.files import read_bytes
from samestep.launch.flags import FLAGS as LAUNCH_FLAGS
from samestep.launch.flags import parse_sizes
from samestep.launch.launcher import check_target
from samestep.launch.script_command import ScriptCommand
from samestep.launch.target import Target
from samestep.tools.scale.cpu_quota import LEAST_CORES, open_quota
from samestep.tools.scale.laws import find_break_even, fit_amdahl, fit_gustafson
from samestep.tools.scale.measurement import Size, Starts
from samestep.tools.scale.tables import build_predictions, build_rows, format_time
from samestep.tools.submit import FLAGS as SUBMIT_FLAGS
from samestep.tools.submit import render_script, run_sbatch
from samestep.tools.traced_script import exiting_on_sigterm
from samestep.units import format_count, format_ranks
from samestep.world.workdir import WorkDir

_OF_RUN = ("batch_size", "micro_batch_size", "seed", "num_threads", "precision", "reduction", "device", "backend")
_OF_SLURM = ("partition", "account", "time", "cpus_per_rank", "gpus_per_node", "sbatch")
FLAGS: dict[str, Option] = {
    "world_sizes": Option(str, "N,N", "numbers of ranks, 1 among them; default: 1,2,4"),
    "strong": Option(bool, "", "measure strong scaling; the default, unless --weak is given"),
    "weak": Option(bool, "", "measure weak scaling; --strong --weak measures both"),
    "steps": Option(int, "N", "measured steps of each start; default: 30", whole(2)),
    "warm_up": Option(int, "N", "steps of each start before the measured ones; default: 5", whole(1)),
    "repeats": Option(int, "N", "starts at each number of ranks; default: 3", whole(1)),
    "least_gain": Option(
        float, "PCT", "a further rank is worthwhile if it saves this share of the time; default: 5 (%)"
    ),
    "cpu_quota": Option(
        float, "CORES", "limit each rank to this many cores, such as 0.5, as if it had its own machine"
    ),
    "for_steps": Option(int, "N", "also print the time to finish a run of N steps", whole(1)),
    "slurm": Option(bool, "", "add Slurm's estimate of the queue time; needs --for-steps"),
    "ranks_per_node": Option(int, "N", "ranks on one node, for --slurm and --predict; default: all", whole(1)),
    "predict": Option(str, "N,N", "also predict these numbers of ranks, such as 8,64,512, by simulating the exchange"),
    "link_mbit": Option(float, "MBIT", "predict: speed of a node's link to the others, as samestep doctor measures it"),
    "doctor": Option(str, "FILE", "predict: take the links between nodes from this output of samestep doctor --json"),
    "link_us": Option(float, "US", "predict: time of a small message between nodes in microseconds; default: 50"),
    "json": Option(bool, "", "print one JSON object"),
    **{name: LAUNCH_FLAGS[name] for name in _OF_RUN},
    **{name: replace(SUBMIT_FLAGS[name], help=f"slurm: {SUBMIT_FLAGS[name].help}") for name in _OF_SLURM},
}
Row = dict[str, Any]


@click.command("scale", cls=ScriptCommand, flags=FLAGS)
def run_scale(target: Target, values: Mapping[str, Any]) -> int:
    """Trains for a few steps on several numbers of ranks of this machine, in turns, each in a temporary run directory.
    Prints samples/s, speed-up and efficiency with their standard errors, where the time of a step goes, the serial
    fraction by the laws of Amdahl and Gustafson, the number of ranks beyond which another one is not worthwhile, and a
    recommendation.
    Strong scaling: the batch is the same at all numbers of ranks. Weak scaling: it grows with the number of ranks.
    """
    check_target(target)
    sizes = check_options(values)
    remote = find_remote(values)
    predicted = parse_sizes("--predict", values["predict"]) if "predict" in values else []
    quota = values.get("cpu_quota")
    num_cores = len(os.sched_getaffinity(0))
    # First, because Slurm may refuse a size: then no time is spent on measurements.
    queues_s = {size: estimate_queue_s(target, values, size) for size in sizes} if values.get("slurm") else {}
    warn_of_sharing(max(sizes), num_cores, quota)
    kinds = [kind for kind in ("strong", "weak") if values.get(kind)] or ["strong"]
    with exiting_on_sigterm(), WorkDir("scale-") as work, ExitStack() as stack:
        starts = Starts(
            target,
            {name: value for name, value in values.items() if name in OPTIONS and name in _OF_RUN},
            work.path,
            values.get("steps", 30),
            values.get("warm_up", 5),
            None if quota is None else stack.enter_context(open_quota(quota, max(sizes))),
            work.lock.fileno(),
        )
        measured = measure(starts, sizes, kinds, values.get("repeats", 3))
    num_steps = min(found.num_steps for of_kind in measured.values() for found in of_kind.values())
    if num_steps < starts.num_steps:
        wanted = starts.num_steps
        say(f"{num_steps} steps were measured, not {wanted}: after the warm-up, the script trains for no more")
    result: Row = {
        "format": 1,
        "script": " ".join(target.to_command()[1]),
        "num_cores": num_cores,
        "cpu_quota": quota,
        "steps": num_steps,
        "repeats": values.get("repeats", 3),
    }
    for kind, found in measured.items():
        result[kind] = summarize(kind, found, values.get("least_gain", 5.0) / 100)
    if "for_steps" in values and "strong" in result:
        add_finish(result["strong"]["sizes"], values["for_steps"], queues_s)
    add_predictions(result, predicted, remote, values.get("ranks_per_node"))
    result["recommendation"] = recommend(result, values.get("least_gain", 5.0))
    if values.get("json"):
        print(json.dumps(result))
    else:
        print_result(result, values.get("for_steps"))
    return 0


def check_options(values: Mapping[str, Any]) -> list[int]:
    """Return the numbers of ranks. Raises Error if an option is invalid."""
    sizes = sorted(parse_sizes("--world-sizes", values.get("world_sizes", "1,2,4")))
    if sizes[0] != 1 or len(sizes) < 2:
        raise Error(
            "--world-sizes needs 1, to which all is compared, and at least one other number, such as 1,2,4",
            code="SS101",
        )
    if not 0 < values.get("least_gain", 5.0) < 100:
        raise Error(f"--least-gain is a percentage between 0 and 100, not {values['least_gain']:g}", code="SS101")
    if not LEAST_CORES <= values.get("cpu_quota", 1.0) < math.inf:
        raise Error(f"--cpu-quota takes at least {LEAST_CORES} cores, not {values['cpu_quota']:g}", code="SS101")
    if values.get("slurm") and "for_steps" not in values:
        raise Error("--slurm compares times to finish: give the length of the run, --for-steps N", code="SS104")
    if ("link_mbit" in values or "doctor" in values) != ("ranks_per_node" in values and "predict" in values):
        raise Error(
            "--predict for several nodes needs --ranks-per-node N, and --link-mbit MBIT or --doctor FILE", code="SS104"
        )
    if not 0 < values.get("link_mbit", 1.0) < math.inf or not 0 <= values.get("link_us", 0.0) < math.inf:
        raise Error("--link-mbit is a number above 0, and --link-us is at least 0", code="SS101")
    if "doctor" in values and ("link_mbit" in values or "link_us" in values):
        raise Error("--doctor names a file with the links: leave out --link-mbit and --link-us", code="SS104")
    wrong = [name for name in _OF_SLURM if name in values and not values.get("slurm")]
    if wrong:
        raise Error(f"{name_flag(wrong[0])} needs --slurm: add it, or leave {name_flag(wrong[0])} out", code="SS104")
    if "for_steps" in values and values.get("weak") and not values.get("strong"):
        raise Error("--for-steps compares steps of the same size: add --strong", code="SS104")
    if "predict" in values and 2 not in sizes:
        raise Error("--predict needs a measurement on 2 ranks: add 2 to --world-sizes", code="SS104")
    return sizes


def warn_of_sharing(most: int, num_cores: int, quota: float | None) -> None:
    """Warn if the ranks need more cores than there are."""
    needed = most * (1.0 if quota is None else quota)
    if needed > num_cores:
        say(
            f"{most} ranks {'' if quota is None else f'of {quota:g} cores '}share {num_cores} cores: what they lose to "
            "each other is counted as a cost of scaling, which separate machines would not have; for their efficiency, "
            f"give each rank --cpu-quota {max(LEAST_CORES, math.floor(10 * num_cores / most) / 10):g} or less"
        )


def measure(starts: Starts, sizes: Sequence[int], kinds: Sequence[str], repeats: int) -> dict[str, dict[int, Size]]:
    """Start all sizes in turns, so that a change of the machine's speed affects all. Returns kind -> size -> result."""
    measured: dict[str, dict[int, Size]] = {kind: {} for kind in kinds}
    skipped: set[int] = set()
    for number in range(repeats):
        for size in sizes:
            for kind in kinds:
                show_activity(f"{kind} scaling, {format_ranks(size)}, start {number + 1} of {repeats} ...")
                if size == 1 and kind != kinds[0]:  # the same
                    measured[kind][1] = measured[kinds[0]][1]
                    continue
                alone = measured[kind].get(1)
                batch_size, micro = (alone.facts["batch_size"], alone.facts["micro_batch_size"]) if alone else (0, 1)
                num = batch_size // micro
                if alone and kind == "strong" and size > num:
                    if sizes[1] > num:
                        raise Error(
                            f"the micro-batches of a step are work for {format_ranks(num)} only, so no sizes can be "
                            f"compared: give a smaller --micro-batch-size than {micro}, or --weak without --strong",
                            code="SS109",
                        )
                    skipped.add(size)
                    continue
                found = measured[kind].setdefault(size, Size(size, batch_size * (size if kind == "weak" else 1)))
                fixed = {"batch_size": batch_size * size, "micro_batch_size": micro} if kind == "weak" and alone else {}
                starts.run(found, fixed)
                found.batch_size = found.facts["batch_size"]
    show_activity("")
    if skipped:
        left_out = ", ".join(map(str, sorted(skipped)))
        say(f"left out: {left_out} ranks, because the micro-batches of a step are work for {format_ranks(num)} only")
    return measured


def summarize(kind: str, measured: Mapping[int, Size], least_gain: float) -> Row:
    """Return speed-ups and efficiencies of all sizes, the serial fraction, and the break-even."""
    alone = measured[1]
    rows = []
    for size, found in measured.items():
        speed_up = found.samples_per_s / alone.samples_per_s
        error = math.hypot(found.error, alone.error) if size > 1 else 0.0
        rows.append(
            found.to_json()
            | {
                "speed_up": speed_up,
                "speed_up_error": speed_up * error,
                "efficiency": speed_up / size,
                "efficiency_error": speed_up / size * error,
            }
        )
    if kind == "weak":
        return {"sizes": rows, "serial": fit_gustafson({w: found.samples_per_s for w, found in measured.items()})}
    # By the law, more ranks never make a step slower: larger sizes than the fastest are outside of it.
    steps_s = {size: found.step_s for size, found in measured.items()}
    fastest = min(steps_s, key=lambda size: steps_s[size])
    serial = fit_amdahl({w: step_s for w, step_s in steps_s.items() if w <= fastest}) if fastest > 1 else 1.0
    most = alone.facts["batch_size"] // alone.facts["micro_batch_size"]
    even = find_break_even(serial, least_gain, most)
    even = min(even, fastest) if fastest < max(measured) else even
    return {"sizes": rows, "serial": serial, "most": most, "break_even": even}


def add_finish(rows: Sequence[Row], num_steps: int, queues_s: Mapping[int, float]) -> None:
    """Add the time to finish, and the time in the queue, if it is known, to the rows."""
    for row in rows:
        row["queue_s"] = queues_s.get(row["world_size"])
        row["finish_s"] = (row["queue_s"] or 0.0) + num_steps * row["step_s"]


def estimate_queue_s(target: Target, values: Mapping[str, Any], size: int) -> float:
    """Return the seconds until Slurm would start such a job. Raises Error if Slurm refuses it or gives no estimate."""
    per_node = min(values.get("ranks_per_node", size), size)
    shape = {"nodes": -(-size // per_node), "nproc_per_node": per_node}
    options = {name: values[name] for name in _OF_SLURM if name in values} | shape
    script = render_script(target, options)
    try:
        lines = run_sbatch(["--test-only"], script).stderr.splitlines()
    except Error as error:
        where = f"{format_ranks(size)} on {format_count(shape['nodes'], 'node')}"
        raise Error(f"--slurm has no queue time of {where}: {error}", code="SS512") from None
    found = re.search(r"to start at (\S+)", " ".join(lines))
    if found is None:
        words = " ".join(lines) or "it said nothing"
        raise Error(f"sbatch --test-only gives no start for {format_ranks(size)}: {words}", code="SS512")
    return max(0.0, (datetime.fromisoformat(found[1]) - datetime.now()).total_seconds())


def find_remote(values: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the seconds of a small message between two nodes, and the seconds per byte. None: all ranks share a node.

    From a file of `samestep doctor`, takes the values of the slowest link, because a step waits for it.

    Raises:
        Error: the file cannot be read, or contains no links.
    """
    if (file := values.get("doctor")) is None:
        return (values.get("link_us", 50.0) * 1e-6, 8e-6 / values["link_mbit"]) if "link_mbit" in values else None
    try:
        findings = parse_json(read_bytes(Path(file)))["findings"]
        links = [link for each in findings if each["check"] == "links" for link in each["measured"] or []]
        return max(float(link["latency_s"]) for link in links), 1 / min(float(link["bytes_per_s"]) for link in links)
    except OSError as error:
        raise Error(
            f"--doctor {file} cannot be read ({error.strerror}): name a file of samestep doctor", code="SS112"
        ) from None
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise Error(
            f"--doctor {file} has no links: write it by samestep doctor --json on two nodes or more", code="SS713"
        ) from None


def add_predictions(
    result: Row, others: Sequence[int], remote: tuple[float, float] | None, ranks_per_host: int | None
) -> None:
    """Add a model of the step, fitted to 1 and 2 ranks, and its predictions for the measured and other sizes.

    Args:
        others: numbers of ranks that were not measured.
        remote: result of `find_remote`.

    Raises:
        Error: the measurements are not sufficient for predictions.
    """
    kind = "strong" if "strong" in result else "weak"
    rows = {row["world_size"]: row for row in result[kind]["sizes"]}
    if 2 not in rows or rows[2]["facts"]["reduction"] != "exact":
        if others:
            raise Error("--predict needs a measurement on 2 ranks with reduction='exact': leave it out", code="SS104")
        return
    from samestep.tools.scale.step_model import LinkSpeed, count_micro_batches, fit_model

    model = fit_model(rows[1], rows[2], result["cpu_quota"] or result["num_cores"] / 2)
    if remote is not None:
        model = replace(model, remote=LinkSpeed(*remote), ranks_per_host=ranks_per_host)
    result["model"] = model.to_json()
    num = count_micro_batches(rows[1])
    for kind in ("strong", "weak"):
        if kind not in result:
            continue
        measured = {row["world_size"]: row for row in result[kind]["sizes"]}
        predicted = result[kind]["predictions"] = []
        for size in sorted({*measured, *others}):
            if (count := num * size if kind == "weak" else num) < size:
                continue  # there are no micro-batches for so many ranks
            step_s = model.predict(count, size)
            found = measured.get(size)
            predicted.append(
                {
                    "world_size": size,
                    "step_s": step_s,
                    "samples_per_s": count * rows[1]["facts"]["micro_batch_size"] / step_s,
                    "measured_step_s": found and found["step_s"],
                    "error": found and step_s / found["step_s"] - 1,
                }
            )


def recommend(result: Row, least_gain: float) -> str:
    """Return a sentence that recommends a number of ranks, with the reason."""
    if "strong" not in result:
        last = result["weak"]["sizes"][-1]
        return (
            f"with a batch that grows with the ranks, each of {last['world_size']} ranks does "
            f"{last['efficiency']:.0%} of the work of one alone"
        )
    strong = result["strong"]
    rows = strong["sizes"]
    most = strong["most"]
    even = strong["break_even"]
    if "finish_s" in rows[0]:
        best = min(rows, key=lambda row: row["finish_s"])
        why = f"it finishes first, after {format_time(best['finish_s'])}"
    else:
        best = rows[0]
        too_slow = []
        for row in rows[1:]:
            gained = 1 - row["step_s"] / best["step_s"]
            if gained > 2 * math.hypot(row["error"], best["error"]):
                if row["world_size"] <= even:
                    best = row
                else:
                    too_slow.append(row)
        if best is not rows[0]:
            why = f"{best['speed_up']:.2f} times as fast as 1, at {best['efficiency']:.0%} efficiency"
        elif too_slow:
            why = f"{too_slow[0]['world_size']} were only {too_slow[0]['speed_up']:.2f} times as fast"
        else:
            why = "more were not faster by more than the error"
    limit = (
        f"a step has {most} micro-batches, so that no more than {most} ranks have work"
        if even == most
        else f"beyond {format_ranks(even)}, one more saves less than {least_gain:g} % of the time"
    )
    return f"use {format_ranks(best['world_size'])}: {why}; {limit}"


def print_result(result: Row, for_steps: int | None) -> None:
    """Print the tables and sentences."""
    for kind in ("strong", "weak"):
        if kind not in result:
            continue
        found = result[kind]
        title = f"{kind} scaling of {result['script']}" + (
            f", {result['cpu_quota']:g} cores per rank" if result["cpu_quota"] else ""
        )
        header, rows = build_rows(found["sizes"])
        print_table(title, header, rows)
        law = "Amdahl's" if kind == "strong" else "Gustafson's"
        shown = "none is measurable" if found["serial"] <= 0 else f"{found['serial']:.1%}"
        if found["serial"] >= 1:
            shown = "all of the step, because more ranks were not faster"
        print(f"serial fraction by {law} law: {shown}")
        if found.get("predictions"):
            print_table(f"predicted from 1 and 2 ranks, {kind} scaling", *build_predictions(found["predictions"]))
    if for_steps:
        print(f"time to finish: for {for_steps:,} steps, without the start of the ranks, snapshots and validation")
    print(result["recommendation"])
