"""Values of `step.log`: from the calls in one rank's micro-batches to averages over the batch."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from samestep.engine.control import NOT_CALLED, Means, MicroBatchReport, Value, describe_value
from samestep.errors import InvalidType


def collect_values(what: str, values: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a call such as `step.log({"a": 1}, b=2)`. Raises InvalidType if `values` is not a dict."""
    if values is not None and not isinstance(values, Mapping):
        raise InvalidType(f"{what} takes a dict of name -> value or keyword arguments, not {values!r}", code="SS102")
    return {**(values or {}), **named}


def read_number(name: str, given: object, num_samples: int = 1) -> Value:
    """Return a value of step.log without waiting for a GPU; for a tensor with `num_samples` values, their mean.

    Raises Error if the value is not a number.
    """
    if isinstance(given, Tensor) and given.shape == (num_samples,) and num_samples > 1:
        given = given.detach().double().mean()
    if not (given.numel() == 1 if isinstance(given, Tensor) else isinstance(given, Real)):
        raise InvalidType(
            f"step.log needs a number as {name}, not {describe_value(given)}: take its mean", code="SS102"
        )
    if isinstance(given, Tensor):
        given = given.detach()
        return float(given) if given.device.type == "cpu" else given.to(torch.float64, copy=True).reshape(())
    return float(given)  # type: ignore[arg-type]


def average(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean (0 without weight) of (value, weight) pairs and the total weight, from exactly rounded sums."""
    total = math.fsum(weight for _, weight in pairs)
    try:
        return (math.fsum(value * weight for value, weight in pairs if weight) / total if total else 0.0), total
    except ValueError:  # infinities of both signs
        return math.nan, total
    except OverflowError:
        return math.inf, total


def average_batch(
    logged: Sequence[Means], reports: Sequence[MicroBatchReport], sizes: Sequence[int]
) -> dict[str, tuple[float, float]]:
    """Return name -> the average over the batch, and the total weight. The arguments are per micro-batch.

    Args:
        sizes: samples, the weights of those without step.backward.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for means, report, size in zip(logged, reports, sizes, strict=True):
        weight = float(size) if report.weight == NOT_CALLED else report.weight
        for name, (value, count) in means.items():
            pairs.setdefault(name, []).append((value, weight * count))
    return {name: average(of_name) for name, of_name in pairs.items()}
