"""The losses of a pass over a step's micro-batches, and their weights."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from samestep.engine.control import NOT_CALLED, Control
from samestep.engine.host_copies import HostValue, read_later
from samestep.errors import InvalidValue, UsageError
from samestep.plan.tree import Layout

# outside, products of weights and gradients can leave the range of float32
MIN_WEIGHT = 1e-20
MAX_WEIGHT = 1e20


class PassLosses:
    """Collects the losses of this rank, and averages those of all ranks.

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

    def add(self, v: int, loss: Tensor, weight: float | Tensor | None) -> float | Tensor:
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

    def read(self) -> tuple[list[float], list[float]]:
        """Return the losses and the weights of this rank's micro-batches.

        Waits for a GPU to compute them, not for the backward passes.

        Raises:
            InvalidValue: a weight on a GPU is out of range.
        """
        losses = [0.0] * len(self._held)
        weights = [NOT_CALLED] * len(self._held)
        for k, v in enumerate(self._held):
            if v in self.terms:
                loss, weight = self.terms[v]
                weights[k] = self._check_weight(v, weight) if isinstance(weight, HostValue) else weight
                if weights[k]:
                    losses[k] = float(loss)
        return losses, weights

    def average(self, controls: Sequence[Control], layout: Layout) -> tuple[float, float | None]:
        """Return the total weight of all ranks' losses, and their average; None without weight.

        Raises:
            InvalidValue: a loss is not finite.
        """
        weights: list[float] = []
        weighted: list[float] = []
        for rank, (control, held) in enumerate(zip(controls, layout.ranges, strict=True)):
            for v, loss, weight in zip(held, control.losses, control.weights, strict=True):
                if not math.isfinite(loss):
                    raise InvalidValue(
                        f"the loss of step {self._step} is {loss} in micro-batch {v} (rank {rank}): nothing of "
                        "this step is saved; check that batch, the learning rate and the precision",
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
