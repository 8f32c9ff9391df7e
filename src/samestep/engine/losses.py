"""The losses of a pass over a step's micro-batches, and their weights.

A slot groups losses: slot 0 holds those of all models together, slot i those of the i-th model alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from samestep.engine.control import NOT_CALLED, Control
from samestep.engine.host_copies import HostValue
from samestep.errors import InvalidValue, UsageError
from samestep.plan.tree import Layout

Losses = Tensor | Mapping[Tensor, float | Tensor]  # one, or several with their weights
Term = tuple[Tensor, float | Tensor]  # a loss and its weight
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
        num_losses: the largest number of losses passed to one step.backward on this rank.
    """

    def __init__(self, step: int, sizes: Sequence[int], layout: Layout, held: range, num_slots: int) -> None:
        self.num_losses = 1
        self._step = step
        self._sizes = sizes
        self._layout = layout
        self._held = held
        self._num_slots = num_slots
        # micro-batch -> slot -> losses and weights
        self._terms: dict[int, dict[int, list[tuple[HostValue, float | HostValue]]]] = {v: {} for v in held}

    @property
    def are_missing(self) -> bool:
        """Whether this rank has micro-batches, and step.backward was called in none of them."""
        return bool(self._terms) and not any(self._terms.values())

    def open(self, v: int) -> None:
        """Begin micro-batch v, which may be another rank's: its losses are checked, too, and do not count."""
        self._terms[v] = {}

    def add(self, v: int, slot: int, loss: Losses, weight: float | Tensor | None) -> list[Term]:
        """Note the losses of a step.backward. Returns them with their weights; arguments and errors as for it."""
        terms = self._terms[v]
        if terms and (slot in terms or slot == 0 or 0 in terms):
            raise UsageError(
                f"step.backward was called twice for one model in micro-batch {v} of step {self._step}: add the "
                "losses and call it once (or, if their weights differ, step.backward({loss: weight, ...})), or name "
                "the model of each, step.backward(loss, model=...)",
                code="SS202",
            )
        if isinstance(loss, Mapping) and (weight is not None or not loss):
            raise InvalidValue(
                "step.backward takes several losses as {loss: weight, ...}: at least one, and without weight=",
                code="SS203",
            )
        pairs = [*loss.items()] if isinstance(loss, Mapping) else [(loss, weight)]
        checked = [self._check_term(v, term, self._sizes[v] if own is None else own) for term, own in pairs]
        # Before the backward pass, see `HostValue`.
        terms[slot] = [(HostValue(term), HostValue(own) if isinstance(own, Tensor) else own) for term, own in checked]
        self.num_losses = max(self.num_losses, len(checked))
        return checked

    def _check_term(self, v: int, loss: Any, weight: Any) -> Term:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad or loss.is_complex():
            hint = "compute it as a tensor from the model's output, outside of torch.no_grad()"
            if isinstance(loss, Tensor) and loss.numel() > 1:
                hint = "take its mean"
            raise InvalidValue(
                f"step.backward needs a scalar loss that depends on the model, not {describe_value(loss)}: {hint}",
                code="SS203",
            )
        if not isinstance(weight, Tensor) or weight.device.type == "cpu":
            weight = self._check_weight(v, weight)
        return loss, weight

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

    def read(self, k: int) -> tuple[list[list[float]], list[list[float]]]:
        """Return the values and the weights of loss k, per micro-batch of this rank, per slot.

        Waits for a GPU to compute them, not for the backward passes.

        Raises:
            InvalidValue: a weight on a GPU is out of range.
        """
        values = [[0.0] * self._num_slots for _ in self._held]
        weights = [[NOT_CALLED] * self._num_slots for _ in self._held]
        for v, value_of, weight_of in zip(self._held, values, weights, strict=True):
            for slot, terms in self._terms[v].items():
                if k < len(terms):
                    weight_of[slot] = weight = self._check_weight(v, terms[k][1])
                    if weight:
                        value_of[slot] = float(terms[k][0])
        return values, weights

    def average(self, controls: Sequence[Control]) -> tuple[list[float], list[float]]:
        """Average the losses of all ranks.

        Returns:
            The total weights: of slot 0, and for each other slot that of its own losses and those of slot 0. The
            averages of the slots that have any.

        Raises:
            InvalidValue: a loss is not finite.
        """
        rows = [row for control in controls for row in zip(control.losses, control.weights, strict=True)]
        totals: list[float] = []
        means: list[float] = []
        for slot in range(self._num_slots):
            pairs = [(losses[slot], weights[slot]) for losses, weights in rows if weights[slot] != NOT_CALLED]
            total = math.fsum([weight for _, weight in pairs]) if pairs else 0.0
            totals.append(total)
            if total:
                weighted = [loss * weight for loss, weight in pairs]
                if not math.isfinite(sum(weighted)):
                    self._refuse_losses(controls)
                means.append(math.fsum(weighted) / total)
        shared = totals[0]
        return [shared] + [total + shared for total in totals[1:]], means

    def check_same_number(self, first: Sequence[Control], further: Sequence[Control]) -> None:
        """Raise UsageError if one step.backward got only the first loss, and another one also a further one.

        Args:
            first, further: the control blocks with the first and with the further loss.
        """
        rows = [
            (v, [(one == NOT_CALLED, other == NOT_CALLED) for one, other in zip(*pair, strict=True)])
            for held, before, after in zip(self._layout.ranges, first, further, strict=True)
            for v, pair in zip(held, zip(before.weights, after.weights, strict=True), strict=True)
        ]
        for v, row in rows:
            for slot, (is_first_missing, is_missing) in enumerate(row):
                if is_missing and not is_first_missing and any(not other[slot][1] for _, other in rows):
                    raise UsageError(
                        f"step.backward got fewer losses in micro-batch {v} of step {self._step} than in others: pass "
                        "all of them each time, with weight 0 for one that does not count",
                        code="SS202",
                    )

    def _refuse_losses(self, controls: Sequence[Control]) -> NoReturn:
        """Raise InvalidValue for the first micro-batch whose loss is not finite."""
        for rank, held in enumerate(self._layout.ranges):
            for v, losses in zip(held, controls[rank].losses, strict=True):
                for loss in losses:
                    if not math.isfinite(loss):
                        raise InvalidValue(
                            f"the loss of step {self._step} is {loss} in micro-batch {v} (rank {rank}): nothing of "
                            "this step is saved; check that batch, the learning rate and the precision",
                            code="SS206",
                        )
        raise InvalidValue(
            f"the losses of step {self._step} are too large to be added up: scale the loss down", code="SS206"
        )


def describe_value(value: object) -> str:
    """Describe a value in a few words, for a message."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a gradient")


def find_slot(modules: Mapping[str, nn.Module], model: nn.Module) -> int:
    """Return the slot of a prepared model, counted from 1. Raises Error for a model that was not prepared."""
    for slot, module in enumerate(modules.values(), start=1):
        if module is model or getattr(model, "_orig_mod", None) is module:
            return slot
    raise InvalidValue(
        "step.backward(model=...) got a model that was not passed to run.prepare: pass it there, too", code="SS203"
    )
