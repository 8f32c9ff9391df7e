"""Lists of gradients, folded into sums: a tensor per parameter, None where it was not used."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

USED, MISSED = 1, 2  # by some micro-batch of the step, by some other: bits of a parameter's byte
Grads = list[Tensor | None]


@dataclass
class Further:
    """What a rank has of a further loss in a pass. It is added up apart, since its weights have a total of their own.

    Attributes:
        held: the sums of earlier micro-batches, as in `Reducer`.
        grads: of the present micro-batch.
        used: a byte per parameter.
    """

    held: list[Grads]
    grads: Grads
    used: int = 0

    def close(self, num_merges: int | None) -> None:
        """The micro-batch is done: `fold`s it, unless it is the rank's last (None)."""
        self.used |= int.from_bytes(bytes(MISSED if grad is None else USED for grad in self.grads))
        if num_merges is not None:
            fold(self.held, self.grads, num_merges)
            self.grads = [None] * len(self.grads)


def fold(held: list[Grads], grads: Grads, num_merges: int) -> None:
    """Adds a micro-batch's gradients to as many of the sums held, and puts the result in their place."""
    for _ in range(num_merges):
        grads = [add(left, right) for left, right in zip(held.pop(), grads, strict=True)]
    held.append(grads)


def add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """left + right into left; an absent gradient is the identity."""
    if left is None:
        return right
    return left if right is None else left.add_(right)


def put(grad: Tensor | None, view: Tensor) -> None:
    """Copies a gradient into a view; zeros for an absent one."""
    if grad is None:
        view.zero_()
    else:
        view.copy_(grad)


def lay_out(grad: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy in these strides."""
    return torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)
