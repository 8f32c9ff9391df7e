"""Checks that losses and scores are correct averages, and that schedules advance once."""

from dataclasses import dataclass, field
from typing import Any

from samestep.tools.traced_script import read_lines
from samestep.tools.verify.traces import Traced
from samestep.tools.verify.trials import Trials

REFERENCE = "samestep.tools.verify.reference:Reference"
TOLERANCE = 1e-6  # between sums in float64


@dataclass
class Averages:
    """The findings.

    Attributes:
        faults: wrong averages.
        notes: averages that are correct or could not be checked.
        failure: why the script could not be checked; "" if it could.
    """

    seconds: float
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str = ""


def check_gradients(trials: Trials) -> Averages:
    """Run the first steps on one rank in float64, with a few samples one by one."""
    outcome = trials.run(1, num_steps=2, overrides={"precision": "fp32"}, interceptor=REFERENCE)
    found = Averages(outcome.seconds)
    if outcome.code:
        words = outcome.last_words.splitlines()[-1:] or [""]
        found.failure = (
            f"averages were not checked: the script ends with exit code {outcome.code} in float64 ({words[0]})"
        )
        return found
    lines = read_lines(outcome.place / "rank-0.jsonl")
    for probe in (line["probe"] for line in lines if "probe" in line):
        _judge_probe(probe, found)
    _judge_scores(lines, found)
    return found


def check_schedules(trace: Traced) -> list[str]:
    """Find schedules that advanced more than once between two steps."""
    faults: dict[str, str] = {}
    before: dict[str, int] = {}
    for step, line in trace.steps.items():
        for name, count in line["schedules"].items():
            if (advanced := count - before.get(name, 0)) > 1:
                faults.setdefault(
                    name,
                    f"{name} advanced by {advanced} in step {step}: call {name}.step() once, after each step or after "
                    "each epoch, not in both places",
                )
        before = line["schedules"]
    return [*faults.values()]


def _judge_probe(probe: dict[str, Any], found: Averages) -> None:
    """Compare the loss of several samples together with their single losses."""
    weights = probe["weights"]
    shares = probe["shares"]
    draws = probe["has_drawn"]
    count = len(weights)
    total = sum(shares)
    if abs(probe["weight"] - sum(weights)) > TOLERANCE * max(probe["weight"], 1.0) and not draws:
        # A loop that draws its mask has another number of tokens each time.
        found.faults.append(
            f"step.backward got weight {probe['weight']:g} for {count} samples together, and weights that add up to "
            f"{sum(weights):g} for them one by one: pass the number of items that the loss averages (samples, or "
            "tokens without padding)"
        )
    elif probe["error"] <= TOLERANCE:
        found.notes.append(f"the loss of {count} samples is the weighted mean of their {count} losses")
    elif draws or probe["rest"] > TOLERANCE:
        why = "draws random numbers (besides dropout)" if draws else "mixes the samples of a micro-batch"
        found.notes.append(f"whether the loss is a mean was not checked: the model, or the loss, {why}")
    elif count > 1 and all(abs(share - 1) < 1e-3 for share in shares):
        found.faults.append(
            f"the loss is a sum over the micro-batch: of {count} samples together it is {count} times the mean, so "
            "the gradient depends on micro_batch_size: pass a mean to step.backward"
        )
    else:
        shown = ", ".join(f"{share / total if total else share:.3g}" for share in shares)
        given = ", ".join(f"{weight / (sum(weights) or 1):.3g}" for weight in weights)
        found.faults.append(
            f"wrong weights: in the loss of {count} samples together they count {shown}, but by weight= they would "
            f"count {given}: pass the number of items that the loss averages, step.backward(loss, weight=number of "
            "tokens)"
        )


def _judge_scores(lines: list[dict[str, Any]], found: Averages) -> None:
    if not any("evaluate" in line for line in lines):
        found.notes.append("run.evaluate was not called in the first 2 steps, and not checked")
    scores = {name: values for line in lines for name, values in line.get("evaluate", {}).items()}
    num_right = 0
    for name, (score, again, single) in scores.items():
        scale = TOLERANCE * max(abs(score), abs(single), 1e-12)
        if abs(score - again) > scale:
            found.notes.append(f"score {name!r} of run.evaluate draws random numbers: its average was not checked")
        elif abs(score - single) > scale:
            found.faults.append(
                f"score {name!r} of run.evaluate depends on the micro-batch size ({score:.6g}, and {single:.6g} one "
                "sample at a time): it counts padding, or does not average over samples; return "
                "(mean, number of items that it averages)"
            )
        else:
            num_right += 1
    if num_right:
        others = "other " if num_right < len(scores) else ""
        found.notes.append(f"the {others}scores of run.evaluate are the same one sample at a time")
