"""Values of `step.log`: from the calls in one rank's micro-batches to averages over the batch."""

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from samestep.engine.control import NOT_CALLED, Control
from samestep.errors import Error
from samestep.train.evaluate import add_up
from samestep.train.tally import Value
from samestep.world.group import Group

Calls = list[dict[str, tuple[Value, int]]]  # per micro-batch: name -> the sum of so many calls
Means = list[dict[str, tuple[float, float]]]  # per micro-batch: name -> the mean of so many calls


def read_number(name: str, given: object) -> Value:
    """A value of step.log, without waiting for a GPU. Raises Error where it is no number."""
    if not (given.numel() == 1 if isinstance(given, Tensor) else isinstance(given, Real)):
        raise Error(f"step.log needs a number as {name}, not {describe(given)}: take its mean")
    if isinstance(given, Tensor):
        given = given.detach()
        return float(given) if given.device.type == "cpu" else given.double().reshape(())
    return float(given)  # type: ignore[arg-type]


def describe(value: object) -> str:
    """A value in a few words, for a sentence."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a gradient")


def settle(calls: Calls) -> Means:
    """The mean of each micro-batch's calls, with a single read-back from a GPU."""
    remote = [total for values in calls for total, _ in values.values() if isinstance(total, Tensor)]
    numbers = iter(torch.stack(remote).tolist() if remote else ())
    return [
        {
            name: ((next(numbers) if isinstance(total, Tensor) else total) / count, count)
            for name, (total, count) in values.items()
        }
        for values in calls
    ]


def collect(means: Means, controls: Sequence[Control], names: list[str], group: Group) -> Means:
    """The means of all ranks' micro-batches.

    Args:
        means: this rank's.
        names: those that have a place in the control block. Those that some rank has used for the first time are added:
            their values travel in an exchange of their own.
    """
    if any(told.has_new_names for told in controls):
        collected = [values for of_rank in group.gather(means) for values in of_rank]
        names += sorted({name for values in collected for name in values} - {*names})
        return collected
    return [
        {name: (value, count) for name, value, count in zip(names, values, counts, strict=True) if count}
        for told in controls
        for values, counts in zip(told.values, told.counts, strict=True)
    ]


def average(means: Means, weights: list[list[float]], sizes: list[int]) -> dict[str, tuple[float, float]]:
    """name -> the average over the batch, and the total of its weights.

    Args:
        weights: per micro-batch, those of step.backward; the first one counts.
        sizes: samples per micro-batch, for those without step.backward.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for values, row, size in zip(means, weights, sizes, strict=True):
        weight = next((weight for weight in row if weight != NOT_CALLED), float(size))
        for name, (value, count) in values.items():
            pairs.setdefault(name, []).append((value, weight * count))
    totals = {name: math.fsum(weight for _, weight in of_name) for name, of_name in pairs.items()}
    return {
        name: (add_up([v * w for v, w in of_name if w]) / totals[name] if totals[name] else 0.0, totals[name])
        for name, of_name in pairs.items()
    }
