"""Finds the cause of a difference: changes one value, runs the script again, and checks whether the difference remains.

Each experiment takes a function that runs the script again, on as many ranks as the reference, up to the difference.
In the ranks of some, `begin` fixes the clocks of `time`, or the rank, for calls from the script's own files. torch,
samestep and other libraries need the real ones.
"""

import json
import re
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from samestep.decoding import parse_json
from samestep.files import open_regular, read_text
from samestep.tools.verify.traces import Traced, find_difference
from samestep.tools.verify.trials import TrialOutcome
from samestep.world.environment import intercept_reads

CLOCK = "clock"
RANK = "rank"
START_S = 1_700_000_000
CLOCKS = ("time", "monotonic", "perf_counter", "process_time")  # and each with _ns
RANK_VALUES = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
LINES = "lines-with-fixed-values"
LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]))
MAX_NAMED = 4
OPERATOR = re.compile(r"(\S+) does not have a deterministic implementation")

RunAgain = Callable[..., TrialOutcome]


def is_hash_seed(run_again: RunAgain) -> bool:
    """Return whether two runs are the same with one hash seed, and differ with another."""
    first = run_again()
    return _are_same(first, run_again()) and not _are_same(first, run_again(hash_seed="1"))


def find_clock(run_again: RunAgain) -> str | None:
    """Return the places in the script that read the clock; None if two runs with a fixed clock still differ."""
    first = run_again(fixed=CLOCK)
    places = _read_places(first)
    return places if places and _are_same(first, run_again(fixed=CLOCK)) else None


def find_rank(run_again: RunAgain, run_other: RunAgain) -> str | None:
    """Run the script on both numbers of ranks, where it reads rank 0 of 1 everywhere.

    Args:
        run_other: runs the script on the number of ranks at which it differs.

    Returns:
        The places in the script that read a rank or a number of ranks; None if the runs still differ.
    """
    other = run_other(fixed=RANK)
    places = _read_places(other)
    return places if places and _are_same(run_again(fixed=RANK), other) else None


def is_of_shard(reference: Traced, last_step: int, run_other: RunAgain) -> bool:
    """Return whether the run that differs is the same as the reference up to `last_step` if nothing is divided.

    Args:
        run_other: runs the script where it differs.
    """
    undivided = run_other(shard="none").trace
    return last_step in undivided.steps and find_difference(reference, undivided) is None


def find_rank_of_drift(run_other: RunAgain, has_drifted: Callable[[TrialOutcome], bool]) -> str | None:
    """Return the places that read a rank; None if the models of the ranks still differ with a fixed one."""
    other = run_other(fixed=RANK)
    return None if has_drifted(other) else _read_places(other) or None


def find_operator(run_again: RunAgain) -> str | None:
    """Run the script, and return the first operator that torch's deterministic mode refuses."""
    found = OPERATOR.search(run_again(overrides={"deterministic": True}).output)
    return None if found is None else found[1]


def read_twice(run_again: RunAgain) -> list[str] | None:
    """Run the script with samples of each step read twice in one process, with the same seed.

    Returns:
        The attributes of the data set that changed between the reads; None if the reads are equal.
    """
    rereads = [line["reread"] for line in run_again(reread=True).trace.steps.values() if "reread" in line]
    changed = dict.fromkeys(name for reread in rereads for name in reread["changed"])
    return [*changed] if any(reread["differs"] for reread in rereads) else None


def _are_same(one: TrialOutcome, other: TrialOutcome) -> bool:
    steps = one.trace.steps.keys()
    return bool(steps) and steps == other.trace.steps.keys() and find_difference(one.trace, other.trace) is None


def _read_places(outcome: TrialOutcome) -> str:
    path = outcome.place / LINES
    lines = dict.fromkeys(map(parse_json, read_text(path).splitlines())) if path.exists() else {}
    return ", ".join([*lines][:MAX_NAMED])


def begin(options: dict[str, str]) -> None:
    """Fix the values of the kind `options["fixed"]`, and record the lines that read them. Called in each rank first."""
    script = Script(Path(options["dir"], LINES))
    if options["fixed"] == CLOCK:
        _fix_clock(script)
    else:
        _fix_rank(script)


class Script:
    """Distinguishes calls in the script's own files from calls in libraries, and records the calling lines."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._noted: set[str] = set()
        self.num_calls = 0

    def calls(self, name: str) -> bool:
        """Return whether the script has called the function that calls this."""
        frame: Any = sys._getframe(2)
        # os.environ is written in Python: its functions call on behalf of the script.
        while frame is not None and (
            frame.f_code.co_filename.startswith("<") or frame.f_globals.get("__name__") == intercept_reads.__module__
        ):
            frame = frame.f_back
        file = "" if frame is None else frame.f_code.co_filename
        if not file or file.startswith(LIBRARIES) or "-packages" in file:
            return False
        place = f"{name} in {Path(file).name}:{frame.f_lineno}"
        if place not in self._noted:
            self._noted.add(place)
            with open(self._file, "a", opener=open_regular) as lines:
                print(json.dumps(place), file=lines)
        self.num_calls += 1
        return True


def _fix_clock(script: Script) -> None:
    def wrap(name: str, real: Callable[[], Any]) -> Callable[[], Any]:
        def read() -> Any:
            if not script.calls(f"time.{name}"):
                return real()
            ns = START_S * 10**9 + script.num_calls * 10**6  # advances, because a script may wait for a time
            return ns if name.endswith("_ns") else ns / 1e9

        return read

    for name in (*CLOCKS, *(f"{name}_ns" for name in CLOCKS)):
        setattr(time, name, wrap(name, getattr(time, name)))


def _fix_rank(script: Script) -> None:
    import torch.distributed as dist

    def wrap(name: str, value: int, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **options: Any) -> Any:
            return value if script.calls(f"torch.distributed.{name}") else real(*args, **options)

        return read

    dist.get_rank = wrap("get_rank", 0, dist.get_rank)
    dist.get_world_size = wrap("get_world_size", 1, dist.get_world_size)

    def read_attribute(run: Any, name: str) -> Any:
        value = RANK_VALUES.get(name.upper())
        return object.__getattribute__(run, name) if value is None or not script.calls(f"run.{name}") else value

    resolve_name("samestep:Run").__getattribute__ = read_attribute  # as the script gets it: tools do not import train

    def read_variable(name: str, own: str) -> str:
        value = RANK_VALUES.get(name)
        return own if value is None or not script.calls(f"os.environ[{name!r}]") else str(value)

    intercept_reads(read_variable)
