"""Sums lists of gradients: a tensor per parameter, None for a parameter that was not used."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

USED, MISSED = 1, 2  # bits of a parameter's byte: a micro-batch of the step used it, a micro-batch did not
Grads = list[Tensor | None]


@dataclass
class Further:
    """A rank's gradients of a further loss in a pass. They are summed separately, since their total weight differs.

    Attributes:
        held: the sums of earlier micro-batches, as in `Reducer`.
        grads: gradients of the current micro-batch.
        used: a byte per parameter.
    """

    held: list[Grads]
    grads: Grads
    used: int = 0

    def close(self, num_merges: int | None) -> None:
        """End the micro-batch, and `fold` it unless it is the rank's last (None)."""
        self.used |= int.from_bytes(bytes(MISSED if grad is None else USED for grad in self.grads))
        if num_merges is not None:
            fold(self.held, self.grads, num_merges)
            self.grads = [None] * len(self.grads)


def fold(held: list[Grads], grads: Grads, num_merges: int) -> None:
    """Add a micro-batch's gradients to the last `num_merges` sums in `held`, and replace these sums by the result."""
    for _ in range(num_merges):
        grads = [add(left, right) for left, right in zip(held.pop(), grads, strict=True)]
    held.append(grads)


def add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return left + right, computed in left. An absent gradient counts as zero."""
    if left is None:
        return right
    return left if right is None else left.add_(right)


def put(grad: Tensor | None, view: Tensor) -> None:
    """Copy a gradient into a view; zeros for an absent one."""
    if grad is None:
        view.zero_()
    else:
        view.copy_(grad)


def to_dense(grad: Tensor) -> Tensor:
    """Return the gradient as a dense tensor. A gradient of `nn.Embedding(sparse=True)` has other rows on each rank."""
    return grad if grad.layout is torch.strided else grad.to_dense()


def lay_out(grad: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a copy with these strides."""
    return torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)
