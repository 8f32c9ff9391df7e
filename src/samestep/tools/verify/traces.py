"""Reads the traces of a run's ranks, and finds the first difference between two runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from samestep.tools.traced_script import read_lines

# The facts of a step, on its way from samples to state.
STAGES = ("initial", "samples", "input", "losses", "draws", "gradient", "state", "value")
WHOLE = ("state", "value")  # written by rank 0 alone: one that a run lacks is a difference, too
Line = dict[str, Any]


@dataclass(frozen=True)
class Traced:
    """One start of a run.

    Attributes:
        settings: the first line of the trace: facts about the run.
        steps: step -> rank 0's line, in which "facts" are those of all ranks: (what, its name) -> its value.
    """

    settings: Line
    steps: Mapping[int, Line]

    @property
    def step_s(self) -> float:
        """Median seconds per step, including the checksums."""
        ends = [line["at_s"] for line in self.steps.values()]
        return median(b - a for a, b in pairwise(ends)) if len(ends) > 1 else 0.0

    def count_micro_batches(self) -> list[int]:
        """Return how many micro-batches each step has computed, over all passes."""
        return [sum(what == "samples" for what, _ in line["facts"]) for line in self.steps.values()]


def read_traces(directory: Path) -> Traced:
    """Read the traces of all ranks. They are empty if no step was begun."""
    settings: Line = {}
    facts: dict[int, dict[tuple[str, str], Any]] = {}
    steps: dict[int, Line] = {}
    for path in sorted(directory.glob("rank-*.jsonl")):
        for line in read_lines(path):
            if "step" not in line:
                settings = settings or line
                continue
            known = facts.setdefault(line["step"], {})
            known |= {(what, name): value for what, name, value in line["facts"]}
            if "digest" in line:
                steps[line["step"]] = line | {"facts": known}
    return Traced(settings, dict(sorted(steps.items())))


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        what: one of STAGES, or "loss" (of the step).
        name: name of the tensor, micro-batch, parameter or plain value.
        values: of both runs.
        tensors: names of the tensors of the state that differ at the end of that step.
    """

    step: int
    what: str
    name: str
    values: tuple[Any, Any]
    tensors: Sequence[str]


def find_difference(one: Traced, other: Traced) -> Difference | None:
    """Find the first step of both runs that differs, and the first difference on its way from samples to state.

    Returns:
        None if losses and digests are equal in all steps that both runs have.
    """
    for step in sorted(one.steps.keys() & other.steps.keys()):
        a, b = one.steps[step], other.steps[step]
        if (a["digest"], a["loss"]) == (b["digest"], b["loss"]):
            continue
        pairs = {key: (a["facts"].get(key), b["facts"].get(key)) for key in {**a["facts"], **b["facts"]}}
        found = [
            (*key, pair) for key, pair in pairs.items() if pair[0] != pair[1] and (None not in pair or key[0] in WHOLE)
        ]
        # Of the state, the tensors of models before those of optimizers.
        found.sort(key=lambda each: (STAGES.index(each[0]), each[0] == "state" and "/state/" in each[1]))
        tensors = [name for what, name, _ in found if what == "state"]
        what, name, values = (*found, ("loss", "", (a["loss"], b["loss"])))[0]
        return Difference(step, what, name, values, tensors)
    return None


def name_tensor(name: str) -> str:
    """Format a name as in a script: objects/model/0.weight -> model.0.weight."""
    return name.removeprefix("objects/").replace("/", ".")
