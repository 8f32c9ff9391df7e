"""Further runs of a script that find the cause of a difference.

Each experiment takes a function that runs the script again, on as many ranks as the reference, up to the difference.
"""

import re
from collections.abc import Callable
from pathlib import Path

from samestep.files import parse_json, read_text
from samestep.tools.verify.fixed import CLOCK, ENTROPY, HASH, PLACES, RANK
from samestep.tools.verify.traces import find_difference
from samestep.tools.verify.trials import Outcome

MAX_NAMED = 4
OPERATOR = re.compile(r"(\S+) does not have a deterministic implementation")

RunAgain = Callable[..., Outcome]


def find_sources(run_again: RunAgain) -> dict[str, str]:
    """Find the sources that make two runs differ.

    Two runs with all sources fixed must be equal. Then the sources are released, one at a time.

    Returns:
        CLOCK, ENTROPY or HASH -> the places in the script that use it; {} if none is a cause.
    """

    def run_without(free: str = "") -> Outcome:
        fixed = [kind for kind in (CLOCK, ENTROPY) if kind != free]
        return run_again(fixed=fixed, hash_seed="1" if free == HASH else "0")

    first, second = run_without(), run_without()
    if not _are_same(first, second):
        return {}
    places = _read_places(first.place / PLACES)
    free = [kind for kind in (CLOCK, ENTROPY, HASH) if kind == HASH or kind in places]
    return {kind: places.get(kind, "") for kind in free if not _are_same(first, run_without(kind))}


def find_rank_reads(run_again: RunAgain, run_other: RunAgain) -> str | None:
    """Run the script on both numbers of ranks, where it reads rank 0 of 1 everywhere.

    Args:
        run_other: runs the script on the number of ranks at which it differs.

    Returns:
        The places in the script that read a rank or a number of ranks; None if the runs differ nevertheless.
    """
    one, other = run_again(fixed=[RANK]), run_other(fixed=[RANK])
    return name_rank_reads(other) if _are_same(one, other) else None


def name_rank_reads(outcome: Outcome) -> str:
    """Return the places in the script that have read a rank or a number of ranks in a run with fixed ones."""
    return _read_places(outcome.place / PLACES).get(RANK, "")


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


def _are_same(one: Outcome, other: Outcome) -> bool:
    steps = one.trace.steps.keys()
    return bool(steps) and steps == other.trace.steps.keys() and find_difference(one.trace, other.trace) is None


def _read_places(path: Path) -> dict[str, str]:
    lines = dict.fromkeys(read_text(path).splitlines()) if path.exists() else {}
    places: dict[str, list[str]] = {}
    for kind, place in map(parse_json, lines):
        places.setdefault(kind, []).append(place)
    return {kind: ", ".join(found[:MAX_NAMED]) for kind, found in places.items()}
