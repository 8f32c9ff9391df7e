"""What this rank reports of the micro-batches of a pass: losses, their weights, and values of `step.log`."""

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

from torch import Tensor

from samestep.engine.control import NOT_CALLED, MicroBatchReport
from samestep.engine.host_copies import HostValue, read_later
from samestep.errors import InvalidValue, UsageError
from samestep.plan.tree import Layout

# outside, products of weights and gradients can leave the range of float32
MIN_WEIGHT = 1e-20
MAX_WEIGHT = 1e20

Means = Mapping[str, tuple[float, float]]  # of a micro-batch: name -> the mean of its logged values, and their number
Value = float | Tensor  # a tensor only on a GPU: float64, not copied to the host yet


class PassReports:
    """Collects what this rank's micro-batches report.

    Args:
        step: number of the step, for messages.
        sizes: number of samples of each micro-batch of the step.
        held: this rank's micro-batches.

    Attributes:
        terms: micro-batch -> its loss and its weight.
    """

    def __init__(self, step: int, sizes: Sequence[int], held: range) -> None:
        self._step = step
        self._sizes = sizes
        self._held = held
        self.terms: dict[int, tuple[float | HostValue, float | HostValue]] = {}
        self._logged: dict[int, dict[str, list[float | HostValue]]] = {}  # micro-batch -> name -> values

    def add_loss(self, v: int, loss: Tensor, weight: float | Tensor | None) -> float | Tensor:
        """Note the loss of a step.backward. Returns its weight; arguments and errors as for it."""
        if v in self.terms:
            raise UsageError(
                f"step.backward was called twice in micro-batch {v} of step {self._step}: add the losses and call it "
                "once, dividing each by its own number of units (step.total); for another model, loop over the step "
                "once more",
                code="SS202",
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad or loss.is_complex():
            hint = "compute it as a tensor from the model's output, outside of torch.no_grad()"
            if isinstance(loss, Tensor) and loss.numel() > 1:
                hint = "take its mean"
            raise InvalidValue(
                f"step.backward needs a scalar loss that depends on the model, not {describe_value(loss)}: {hint}",
                code="SS203",
            )
        own: float | Tensor = self._sizes[v]
        if weight is not None:
            is_on_device = isinstance(weight, Tensor) and weight.device.type != "cpu"
            own = weight if is_on_device else self._check_weight(v, weight)
        # Before the backward pass, see `HostValue`.
        self.terms[v] = read_later(loss), read_later(own) if isinstance(own, Tensor) else own
        return own

    def _check_weight(self, v: int, weight: Any) -> float:
        try:
            number = float(weight)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if number != 0 and not MIN_WEIGHT <= number <= MAX_WEIGHT:
            raise InvalidValue(
                f"step.backward got weight {weight} in micro-batch {v} of step {self._step}: a weight is 0, or a "
                f"number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}",
                code="SS203",
            )
        return number

    def log(self, v: int, name: str, value: Value) -> None:
        """Note a value of step.log."""
        values = self._logged.setdefault(v, {}).setdefault(name, [])
        values.append(read_later(value) if isinstance(value, Tensor) else value)

    def read_logged(self) -> list[Means]:
        """Return the logged values per micro-batch. Waits for a GPU to compute them."""
        means: list[Means] = [{}] * len(self._held)
        for k, v in enumerate(self._held) if self._logged else ():
            # The built-in sum differs: since Python 3.12 it compensates for rounding.
            means[k] = {
                name: (reduce(add, map(float, values), 0.0) / len(values), len(values))
                for name, values in self._logged.get(v, {}).items()
            }
        return means

    def build(
        self, fingerprints: Sequence[int], logged: Sequence[Means], names: Sequence[str]
    ) -> list[MicroBatchReport]:
        """Return the reports. Waits for a GPU to compute the losses, not for the backward passes.

        Args:
            logged: the result of `read_logged`.
            names: the known names of logged values.

        Raises:
            InvalidValue: a weight on a GPU is out of range.
        """
        reports = []
        for v, fingerprint, means in zip(self._held, fingerprints, logged, strict=True):
            loss, weight = self.terms.get(v, (0.0, NOT_CALLED))
            if isinstance(weight, HostValue):
                weight = self._check_weight(v, weight)
            numbers: list[float] = []
            for name in names:
                numbers += means.get(name, (0.0, 0.0))
            reports.append(MicroBatchReport(fingerprint, float(loss) if weight else 0.0, weight, numbers))
        return reports


def find_logged(report: MicroBatchReport, names: Sequence[str]) -> Means:
    """Return the logged values of a micro-batch."""
    pairs = zip(report.logged[::2], report.logged[1::2], strict=True)
    return {name: (mean, count) for name, (mean, count) in zip(names, pairs, strict=True) if count}


def average_losses(reports: Sequence[MicroBatchReport], step: int, layout: Layout) -> tuple[float, float | None]:
    """Return the total weight of all ranks' losses, and their average; None without weight.

    Raises:
        InvalidValue: a loss is not finite.
    """
    weights: list[float] = []
    weighted: list[float] = []
    for v, (_, loss, weight, _) in enumerate(reports):
        if not math.isfinite(loss):
            rank = next(rank for rank, held in enumerate(layout.ranges) if v in held)
            raise InvalidValue(
                f"the loss of step {step} is {loss} in micro-batch {v} (rank {rank}): nothing of this step is saved; "
                "check that batch, the learning rate and the precision",
                code="SS206",
            )
        if weight != NOT_CALLED:
            weights.append(weight)
            weighted.append(loss * weight)
    total = math.fsum(weights)
    return (total, math.fsum(weighted) / total) if total else (0.0, None)


def describe_value(value: object) -> str:
    """Describe a value in a few words, for a message."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a gradient")
