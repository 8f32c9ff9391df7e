"""Checks that the gradient of a step and the scores are correct averages, and that schedules advance once."""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from samestep.tools.verify.traces import Traced, name_tensor
from samestep.tools.verify.trials import Outcome, Trials

TOLERANCE = 1e-6  # between sums in float64
FLOAT32_TOLERANCE = 1e-2  # of a gradient in float32 against float64; BatchNorm over two samples loses 3 digits
Findings = tuple[list[str], list[str]]  # faults; notes


@dataclass
class Averages:
    """The findings.

    Attributes:
        faults: wrong averages.
        notes: correct averages, and those that could not be checked.
        failure: why the script could not be checked; "" if it was.
    """

    seconds: float
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str = ""


def check_gradients(trials: Trials, size: int) -> Averages:
    """Run the first steps on one rank in float64, and the first one on `size` ranks, and compare."""
    overrides = {"precision": "fp32"}
    double = trials.run(1, num_steps=2, overrides=overrides, reference="float64")
    single = trials.run(size, num_steps=1, overrides=overrides, reference="float32")
    found = Averages(double.seconds + single.seconds)
    if double.code or single.code:
        failed, where = (double, "in float64") if double.code else (single, f"on {size} ranks")
        words = failed.last_words.splitlines()[-1:] or [""]
        found.failure = f"averages were not checked: the script ends with exit code {failed.code} {where} ({words[0]})"
        return found
    lines = _read_extra(double.place / "rank-0.jsonl")
    for faults, notes in (_compare_gradients(double, single, lines), _judge_probes(lines), _judge_scores(lines)):
        found.faults += faults
        found.notes += notes
    return found


def check_schedules(trace: Traced) -> list[str]:
    """Find schedules that advanced more than once between two steps."""
    faults = []
    for place, name in enumerate(trace.settings["schedules"]):
        numbers = [-1, *trace.steps]
        counts = [0, *(line["schedules"][place] for line in trace.steps.values())]
        for (_, before), (step, after) in pairwise(zip(numbers, counts, strict=True)):
            if after - before > 1:
                faults.append(
                    f"{name} advanced by {after - before} in step {step}: call {name}.step() once, after each "
                    "step or after each epoch, not in both places"
                )
                break
    return faults


def _read_extra(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "step" not in line and "world_size" not in line]


def _compare_gradients(double: Outcome, single: Outcome, lines: list[dict[str, Any]]) -> Findings:
    from samestep.snapshot.serialization import read_tensors

    expected = read_tensors(double.place / "gradients.safetensors")
    found = read_tensors(single.place / "gradients.safetensors")
    total = max(float(sum(gradient.double().pow(2).sum() for gradient in expected.values())) ** 0.5, 1e-300)
    worst, error = "", 0.0
    for name, gradient in expected.items():
        difference = gradient - found[name].double() if name in found else gradient
        relative = float(difference.norm()) / max(float(gradient.norm()), 1e-3 * total)
        if not relative <= error:
            worst, error = name, relative
    if error <= FLOAT32_TOLERANCE:
        return [], [f"the gradient of step 0 on {single.world_size} ranks is the float64 average, to {error:.0e}"]
    if any(line.get("draws") for line in lines):
        return [], [
            f"the gradient on {single.world_size} ranks was not compared: the loop's body draws random numbers "
            "(besides dropout), and float64 draws other values"
        ]
    return [
        f"the gradient of step 0 on {single.world_size} ranks is not the average over the batch: that of "
        f"{name_tensor(worst)} is off by {error:.1e} of its norm (reduction in float32 is accurate to 1e-5)"
    ], []


def _judge_probes(lines: list[dict[str, Any]]) -> Findings:
    faults: list[str] = []
    notes: list[str] = []
    for probe in (line["probe"] for line in lines if "probe" in line):
        count, shares = len(probe["weights"]), probe["shares"]
        total = sum(shares)
        is_off = abs(probe["weight"] - sum(probe["weights"])) > TOLERANCE * max(probe["weight"], 1.0)
        if is_off and not probe["draws"]:  # a loop that draws its mask has another number of tokens each time
            faults.append(
                f"step.backward got weight {probe['weight']:g} for {count} samples together, and weights that add up "
                f"to {sum(probe['weights']):g} for them one by one: pass the number of items that the loss averages "
                "(samples, or tokens without padding)"
            )
        elif probe["error"] <= TOLERANCE:
            notes.append(f"the loss of {count} samples is the weighted mean of their {count} losses")
        elif probe["draws"] or probe["rest"] > TOLERANCE:
            why = "draws random numbers (besides dropout)" if probe["draws"] else "mixes the samples of a micro-batch"
            notes.append(f"whether the loss is a mean was not checked: the model, or the loss, {why}")
        elif count > 1 and all(abs(share - 1) < 1e-3 for share in shares):
            faults.append(
                f"the loss is a sum over the micro-batch: of {count} samples together it is {count} times the mean, so "
                "the gradient depends on micro_batch_size: pass a mean to step.backward"
            )
        else:
            weights = probe["weights"]
            shown = ", ".join(f"{share / total if total else share:.3g}" for share in shares)
            given = ", ".join(f"{weight / (sum(weights) or 1):.3g}" for weight in weights)
            faults.append(
                f"wrong weights: in the loss of {count} samples together they count {shown}, but by weight= they "
                f"would count {given}: pass the number of items that the loss averages, "
                "step.backward(loss, weight=number of tokens)"
            )
    return faults, notes


def _judge_scores(lines: list[dict[str, Any]]) -> Findings:
    faults: list[str] = []
    notes: list[str] = []
    scores = {name: values for line in lines for name, values in line.get("evaluate", {}).items()}
    for name, (found, again, single) in scores.items():
        scale = TOLERANCE * max(abs(found), abs(single), 1e-12)
        if abs(found - again) > scale:
            notes.append(f"score {name!r} of run.evaluate draws random numbers: its average was not checked")
        elif abs(found - single) > scale:
            faults.append(
                f"score {name!r} of run.evaluate depends on the micro-batch size ({found:.6g}, and {single:.6g} one "
                "sample at a time): it counts padding, or does not average over samples; return "
                "(mean, number of items that it averages)"
            )
    if len(scores) > len(faults) + len(notes):
        others = "other " if faults or notes else ""
        notes.append(f"the {others}scores of run.evaluate are the same one sample at a time")
    if not any("evaluate" in line for line in lines):
        notes.append("run.evaluate was not called in the first 2 steps, and not checked")
    return faults, notes
