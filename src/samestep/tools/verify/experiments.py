"""Further runs of a script that find the cause of a difference."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from samestep.tools.verify.fixed import CLOCK, ENTROPY, HASH, PLACES
from samestep.tools.verify.traces import find_difference
from samestep.tools.verify.trials import Outcome, Trials

MAX_NAMED = 4
OPERATOR = re.compile(r"(\S+) does not have a deterministic implementation")


@dataclass(frozen=True)
class Reads:
    """The result of reading samples twice, in one process and with the same seed.

    Attributes:
        differ: whether the two reads differ.
        changed: the data set's attributes that changed in between.
    """

    differ: bool
    changed: tuple[str, ...]


class Experiments:
    """Runs of one script that look for the cause of a difference.

    Args:
        size: the number of ranks of all runs.
        num_steps: steps of each run, enough to reach the difference.
    """

    def __init__(self, trials: Trials, size: int, num_steps: int) -> None:
        self._trials, self._size, self._num_steps = trials, size, num_steps

    def find_sources(self) -> dict[str, str]:
        """Find the sources that make two runs differ.

        Two runs with all sources fixed must be equal. Then one source after the other is not fixed.

        Returns:
            CLOCK, ENTROPY or HASH -> the places in the script that use it. {} if none is a cause.
        """
        first, second = self._run_without(), self._run_without()
        if not _are_same(first, second):
            return {}
        places = _read_places(first.place / PLACES)
        free = [kind for kind in (CLOCK, ENTROPY, HASH) if kind == HASH or kind in places]
        return {kind: places.get(kind, "") for kind in free if not _are_same(first, self._run_without(kind))}

    def _run_without(self, free: str = "") -> Outcome:
        fixed = [kind for kind in (CLOCK, ENTROPY) if kind != free]
        hash_seed = "1" if free == HASH else "0"
        return self._trials.run(self._size, num_steps=self._num_steps, fixed=fixed, hash_seed=hash_seed)

    def find_operator(self) -> str | None:
        """Run the script, and return the first operator that torch's deterministic mode refuses."""
        return find_operator(self._trials.run(self._size, overrides={"deterministic": True}).output)

    def read_twice(self) -> Reads:
        """Run the script with samples of each step read twice."""
        trace = self._trials.run(self._size, num_steps=self._num_steps, reread=True).trace
        rereads = [] if trace is None else [line["reread"] for line in trace.steps.values() if "reread" in line]
        changed = dict.fromkeys(name for reread in rereads for name in reread["changed"])
        return Reads(any(reread["differs"] for reread in rereads), tuple(changed))


def find_operator(output: str) -> str | None:
    """Return the operator that torch's deterministic mode has refused, from the output of a run."""
    found = OPERATOR.search(output)
    return None if found is None else found[1]


def _are_same(one: Outcome, other: Outcome) -> bool:
    if one.trace is None or other.trace is None:
        return False
    return one.trace.steps.keys() == other.trace.steps.keys() and find_difference(one.trace, other.trace) is None


def _read_places(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    pairs = list(dict.fromkeys(tuple(json.loads(line)) for line in path.read_text().splitlines()))
    kinds = dict.fromkeys(kind for kind, _ in pairs)
    return {kind: ", ".join([place for own, place in pairs if own == kind][:MAX_NAMED]) for kind in kinds}
