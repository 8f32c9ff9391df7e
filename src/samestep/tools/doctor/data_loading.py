"""Compares the data loader with the model: trains a script for a moment, and measures the phases of its steps."""

import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.config import NO_INTERCEPTORS, to_variables
from samestep.files import read_tail
from samestep.launch.target import COMMAND
from samestep.tools.doctor.facts import FAIL, WARN, CheckFacts, Context, Finding, well
from samestep.tools.traced_script import build_trace, exiting_on_sigterm, read_lines, start
from samestep.units import format_ranks
from samestep.waiting import wait_until
from samestep.world.workdir import WorkDir

INTERCEPTOR = "samestep.tools.phase_timing:PhaseTiming"
WARM_UP = 3  # steps: it compiles, opens files, starts workers
MEASURED_S = 3.0
MAX_STEPS = 1000
LIMIT_S = 60.0  # for the first steps of the script
LEAVE_S = 5.0
POLL_S = 0.1
MODEL = ("forward", "backward", "reducing", "updating")
# fraction of a step, with workers and without
MAX_WAITING = 0.1
MAX_LOADING = 0.2
SHOWN_LINES = 3


def look_at_data_loading(context: Context) -> dict[str, Any] | None:
    """On rank 0: train the script on as many ranks as this node has, in a temporary directory."""
    if context.environment.rank != 0:
        return None
    options = context.options
    num_ranks = context.environment.local_world_size
    context.doing = f"training {' '.join(options.script)}"
    with exiting_on_sigterm(), WorkDir("doctor-") as home:
        overrides = {
            "run_dir": str(home.path / "run"),
            "max_steps": MAX_STEPS,
            "snapshot_every": "never",
            "resume": "never",
            "compare_every": "never",
            **NO_INTERCEPTORS,
            "device": options.device,
            "num_threads": options.num_threads,
            "batch_size": options.batch_size,
            "micro_batch_size": options.micro_batch_size,
        }
        command = [*COMMAND, "launch", "--nproc-per-node", str(num_ranks), *options.script]
        code = _train(command, build_trace(INTERCEPTOR, home.path, to_variables(overrides)), home.path)
        ranks = [measure_rank(read_lines(home.path / f"rank-{rank}.jsonl")) for rank in range(num_ranks)]
        output = read_tail(home.path / "output").rstrip().splitlines()
    return {
        "script": " ".join(options.script),
        "code": code,
        "ranks": ranks,
        "last_words": output[-SHOWN_LINES:],
        "num_cores": len(os.sched_getaffinity(0)),
    }


def _train(command: Sequence[str], variables: Mapping[str, str], home: Path) -> int | None:
    """Start the script and end it after enough steps. Returns its exit code; None if it was ended."""
    with start(command, variables, home / "output") as process:

        def has_measured() -> bool:
            lines = read_lines(home / "rank-0.jsonl")[WARM_UP:]
            return len(lines) > 1 and lines[-1]["at_s"] - lines[0]["at_s"] > MEASURED_S

        wait_until(lambda: process.poll() is not None or has_measured(), LIMIT_S, every_s=POLL_S)
        code = process.poll()
        for _ in range(2):  # after the first, the run saves; the second makes the launcher kill its ranks
            process.send_signal(signal.SIGTERM)
            time.sleep(POLL_S)
        process.end(LEAVE_S)
        return code


def measure_rank(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return samples and seconds of the steps after the warm-up; None if there are none."""
    lines = lines[WARM_UP:]
    if len(lines) < 2:
        return None
    first = lines[0]
    last = lines[-1]

    def passed_s(phase: str) -> float:
        return float(last["spent_s"].get(phase, 0.0) - first["spent_s"].get(phase, 0.0))

    return {
        "num_steps": len(lines) - 1,
        "num_samples": sum(line["num_samples"] for line in lines[1:]),
        "num_workers": last["num_workers"],
        "loading_s": passed_s("loading"),
        "model_s": sum(passed_s(phase) for phase in MODEL),
    }


def judge_data_loading(facts: CheckFacts) -> Iterator[Finding]:
    """Return the finding. With workers, the loading time is the time that the model waits for them."""
    if 0 not in facts.by_rank:
        return
    fact = facts.by_rank[0]
    ranks = [rank for rank in fact["ranks"] if rank is not None]
    num_samples = sum(rank["num_samples"] for rank in ranks)
    if not num_samples:
        output = " / ".join(line.strip() for line in fact["last_words"]) or "no output"
        how = f"ended with exit code {fact['code']}" if fact["code"] is not None else f"was busy for {LIMIT_S:g} s"
        found = f"{fact['script']} {how}, before it had done {WARM_UP + 2} steps: {output}"
        advice = "start it with samestep launch; it must train with samestep.Run, for some steps"
        yield Finding(FAIL if fact["code"] else WARN, found, advice, fact)
        return
    loading_s, model_s = (sum(rank[name] for rank in ranks) / len(ranks) for name in ("loading_s", "model_s"))
    num_workers = ranks[0]["num_workers"]
    used_per_s = num_samples / max(model_s, 1e-9)
    # Workers load while the model computes: if it waits for them, they determine the time of the whole step.
    loaded_per_s = num_samples / max(loading_s + (model_s if num_workers else 0.0), 1e-9)
    waiting = loading_s / max(loading_s + model_s, 1e-9)
    measured = {
        **fact,
        "feeds_per_s": loaded_per_s,
        "eats_per_s": used_per_s,
        "waiting": waiting,
        "num_workers": num_workers,
    }
    share = f"{waiting:.0%} of a step goes to waiting for data"
    if waiting <= (MAX_WAITING if num_workers else MAX_LOADING):
        yield well(
            f"the data loader keeps up with the model, which uses {used_per_s:,.0f} samples/s: {share}", measured
        )
    else:
        found = f"the data loader delivers {loaded_per_s:,.0f} samples/s, the model uses {used_per_s:,.0f}: {share}"
        yield Finding(WARN, found, _advise(fact, num_workers, used_per_s / loaded_per_s), measured)


def _advise(fact: Mapping[str, Any], num_workers: int, lack: float) -> str:
    num_ranks = len(fact["ranks"])
    num_cores = fact["num_cores"]
    needed = math.ceil(lack * max(num_workers, 1)) + (1 if num_workers else 0)
    room = num_cores // num_ranks - 1  # one core computes
    if room < 1 or num_workers >= room:
        with_them = f"and their {num_workers * num_ranks} workers " if num_workers else ""
        return (
            f"{num_cores} cores for {format_ranks(num_ranks)} {with_them}leave none free to load: "
            "make a sample cheaper to load (decode and resize once, beforehand), or take a machine with more cores"
        )
    give = min(needed, room)
    more = f"{give}, not {num_workers}" if num_workers else str(give)
    rest = "" if give == needed else f" ({num_cores} cores have no room for the {needed} it would take)"
    return f"give it workers: run.epochs(..., num_workers={more}){rest}"
