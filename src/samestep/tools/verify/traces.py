"""Reads the traces of a run's ranks, and finds the first difference between two runs."""

from collections.abc import Mapping, Sequence
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
        settings: the first line of the trace: facts about the run.
        steps: step -> rank 0's line.
        micro_batches: step -> (pass, micro-batch) -> the record of the rank that computed it.
    """

    settings: Line
    steps: Mapping[int, Line]
    micro_batches: Mapping[int, Mapping[tuple[int, int], Line]]

    @property
    def step_s(self) -> float:
        """Median seconds per step, including the checksums."""
        ends = [line["at_s"] for line in self.steps.values()]
        return median(b - a for a, b in pairwise(ends)) if len(ends) > 1 else 0.0


def read_traces(directory: Path) -> Traced:
    """Read the traces of all ranks. They are empty if no step was begun."""
    settings: Line = {}
    steps: dict[int, Line] = {}
    notes: dict[int, dict[tuple[int, int], Line]] = {}
    gradients: dict[int, dict[str, str | None]] = {}
    for path in sorted(directory.glob("rank-*.jsonl")):
        for line in read_lines(path):
            if "step" not in line:
                settings = settings or (line if "world_size" in line else {})
                continue
            for note in line["micro_batches"]:
                notes.setdefault(line["step"], {})[note["pass"], note["v"]] = note
            known = gradients.setdefault(line["step"], {})  # a rank may have those of its own parameters only
            known |= {name: known.get(name) or each for name, each in line["gradients"].items()}
            if "digest" in line:
                steps[line["step"]] = line
    steps = {step: line | {"gradients": gradients[step]} for step, line in steps.items()}
    return Traced(settings, dict(sorted(steps.items())), notes)


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        what: "initial" (a tensor before the first step), "samples", "input", "losses" or "draws" (of a micro-batch),
            "gradient", "state" (a tensor), "value" (a plain value of the state) or "loss" (of the step).
        name: name of the parameter, tensor, value or micro-batch.
        tensor: the first tensor of the state that differs at the end of that step, if any does.
        num_tensors: number of tensors that differ.
    """

    step: int
    what: str
    name: str
    tensor: str | None = None
    num_tensors: int = 0
    values: tuple[Any, Any] = (None, None)


def find_difference(one: Traced, other: Traced) -> Difference | None:
    """Find the first step of both runs that differs, and the first difference on its way from samples to state.

    Returns:
        None if losses and digests are equal in all steps that both runs have.
    """
    for step in sorted(one.steps.keys() & other.steps.keys()):
        a = one.steps[step]
        b = other.steps[step]
        if (a["digest"], a["loss"]) != (b["digest"], b["loss"]):
            before = [run.settings["tensors"] if run.settings["begin"] == step else {} for run in (one, other)]
            return _locate(step, a, b, before, one.micro_batches[step], other.micro_batches[step])
    return None


def _locate(
    step: int,
    a: Line,
    b: Line,
    before: Sequence[Mapping[str, str]],
    notes: Mapping[tuple[int, int], Line],
    others: Mapping[tuple[int, int], Line],
) -> Difference:
    tensors = [name for name in a["tensors"] if a["tensors"][name] != b["tensors"].get(name)]
    tensors.sort(key=lambda name: "/state/" in name)  # those of models before those of optimizers
    tensors += [name for name in b["tensors"] if name not in a["tensors"]]
    first = tensors[0] if tensors else None
    count = len(tensors)
    for name, value in before[0].items():
        if before[1].get(name, value) != value:
            return Difference(step, "initial", name, first, count)
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


def name_tensor(name: str) -> str:
    """Format a name as in a script: objects/model/0.weight -> model.0.weight."""
    return name.removeprefix("objects/").replace("/", ".")
