"""What the ranks of a run wrote down, read again, and where two runs part."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from samestep.tools.traced_script import read_lines

Line = dict[str, Any]


@dataclass(frozen=True)
class Traced:
    """One start of a run.

    Attributes:
        settings: what the run said of itself.
        steps: rank 0's lines, by step.
        micro_batches: by step, all ranks' notes by (pass, micro-batch).
        threads: the thread counts that were seen at steps' ends.
        moved: generators of the script's own that drew in the steps.
    """

    settings: Line
    steps: Mapping[int, Line]
    micro_batches: Mapping[int, Mapping[tuple[int, int], Line]]
    threads: frozenset[int]
    moved: tuple[str, ...]

    @property
    def step_s(self) -> float:
        """How long a step takes, with its checksums."""
        ends = [line["at_s"] for line in self.steps.values()]
        return median(b - a for a, b in pairwise(ends)) if len(ends) > 1 else 0.0


def read_traces(directory: Path) -> Traced | None:
    """Reads what all ranks wrote. None: no step was begun."""
    settings: Line = {}
    steps: dict[int, Line] = {}
    notes: dict[int, dict[tuple[int, int], Line]] = {}
    threads: set[int] = set()
    moved: dict[str, None] = {}
    for path in sorted(directory.glob("rank-*.jsonl")):
        for line in read_lines(path):
            if "step" not in line:
                settings = settings or (line if "world_size" in line else {})
                continue
            threads.add(line["threads"])
            moved |= dict.fromkeys(line["moved"])
            for note in line["micro_batches"]:
                notes.setdefault(line["step"], {})[note["pass"], note["v"]] = note
            if "digest" in line:
                steps[line["step"]] = line
    if not settings:
        return None
    return Traced(settings, dict(sorted(steps.items())), notes, frozenset(threads), tuple(moved))


@dataclass(frozen=True)
class Difference:
    """The first thing that is not the same in two runs.

    Attributes:
        what: "samples", "input", "draws", "loss", "gradient" (of a micro-batch, or of the step), "state" (a tensor),
            "value" (a plain value of the state).
        name: of the parameter, tensor or value; of the micro-batch.
        tensor: the first tensor of the state that differs at the end of that step, if any does.
        num_tensors: how many do.
    """

    step: int
    what: str
    name: str
    tensor: str | None = None
    num_tensors: int = 0
    values: tuple[Any, Any] = (None, None)


def find_difference(one: Traced, other: Traced) -> Difference | None:
    """Where two runs first part, in a step that both have: what comes first within it, on the way from its samples to
    the state that it ends with. None: losses and digests are the same in all of them.
    """
    for step in sorted(one.steps.keys() & other.steps.keys()):
        a, b = one.steps[step], other.steps[step]
        if (a["digest"], a["loss"]) != (b["digest"], b["loss"]):
            return _locate(step, a, b, one.micro_batches[step], other.micro_batches[step])
    return None


def _locate(
    step: int, a: Line, b: Line, notes: Mapping[tuple[int, int], Line], others: Mapping[tuple[int, int], Line]
) -> Difference:
    tensors = order_tensors([name for name in a["tensors"] if a["tensors"][name] != b["tensors"].get(name)])
    tensors += [name for name in b["tensors"] if name not in a["tensors"]]
    first, count = (tensors[0] if tensors else None), len(tensors)
    for key in sorted(notes.keys() & others.keys()):
        for what in ("samples", "input", "losses", "draws"):
            found = notes[key].get(what), others[key].get(what)
            if found[0] != found[1]:
                return Difference(step, what, f"micro-batch {key[1]}", first, count, found)
    for name, value in a["gradients"].items():
        if value != b["gradients"].get(name):
            return Difference(step, "gradient", name, first, count)
    if first is not None:
        return Difference(step, "state", first, first, count)
    for name in {**a["values"], **b["values"]}:
        pair = a["values"].get(name), b["values"].get(name)
        if pair[0] != pair[1]:
            return Difference(step, "value", name, values=pair)
    return Difference(step, "loss", "", values=(a["loss"], b["loss"]))


def order_tensors(names: list[str]) -> list[str]:
    """Models' tensors before those of optimizers, else in the state's order."""
    return sorted(names, key=lambda name: "/state/" in name)


def name_tensor(name: str) -> str:
    """As a person would write it: objects/model/0.weight -> model.0.weight."""
    return name.removeprefix("objects/").replace("/", ".")
