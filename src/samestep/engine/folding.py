"""Adds up the gradients of one rank: a tensor per parameter, None for a parameter that was not used."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import compress, repeat
from operator import is_, is_not
from typing import Any

import torch
from torch import Tensor

from samestep.engine.reduction_plan import ReductionPlan
from samestep.plan.tree import Layout
from samestep.torch_internals import add_all

Grads = list[Tensor | None]


class RankParts:
    """This rank's parts of a gradient: the sums of its micro-batches so far, along the canonical tree.

    Attributes:
        held: this rank's micro-batches.
        used: the parameters that the micro-batches have used, a byte of 1 for each; as one number.
    """

    def __init__(self, plan: ReductionPlan, layout: Layout, rank: int) -> None:
        self.held = layout.ranges[rank]
        self.used = 0
        self._narrow = plan.narrow if plan.exchange_dtype is not None else None
        self._layout = layout
        self._rank = rank
        self._parts: list[Grads] = []

    def note_used(self, used: Iterable[int]) -> None:
        """Note which parameters a micro-batch has used: 1 for each of these, 0 for each other one."""
        self.used |= int.from_bytes(bytes(used))

    def fold(self, v: int, grads: Grads) -> None:
        """Add the gradients of micro-batch v, unless it is the last one: the parts that it completes become one."""
        if self._narrow is not None:
            grads = narrow_all(grads, self._narrow)
        for _ in range(self._layout.count_merges(self._rank, v)):
            grads = add_grads(self._parts.pop(), grads)
        self._parts.append(grads)

    @cached_property
    def _split(self) -> tuple[list[Grads], list[Grads]]:
        """The parts that the last micro-batch leaves as they are, and those that become one with it, in order."""
        num_merged = self._layout.count_merges(self._rank, self.held[-1])
        num_stay = len(self._parts) - num_merged
        return self._parts[:num_stay], self._parts[num_stay:][::-1]

    def pack(self, i: int, grad: Tensor | None, views: Sequence[Tensor]) -> Tensor:
        """Copy the parts of parameter i to `views`, and add `grad`, of the last micro-batch. Returns the last view."""
        if self._narrow is not None and grad is not None:
            grad = self._narrow(grad)
        stay, merged = self._split
        for part, view in zip(stay, views, strict=False):
            put(part[i], view)
        view = views[len(stay)]
        for part in merged[:-1]:
            grad = add(part[i], grad)
        left = merged[-1][i] if merged else None
        if left is not None and grad is not None:
            torch.add(left, grad, out=view)
        else:
            put(grad if left is None else left, view)
        return view

    def complete(self, grads: Grads) -> Grads:
        """Return the sum of all parts and `grads`, of the last micro-batch, if there is no other rank."""
        if self._narrow is not None:
            grads = narrow_all(grads, self._narrow)
        for part in reversed(self._parts):
            grads = add_grads(part, grads)
        return grads


def narrow_all(grads: Grads, narrow: Callable[[Tensor], Tensor]) -> Grads:
    """Return gradients in the dtype in which they are exchanged, see `ReductionPlan.narrow`."""
    return [None if grad is None else narrow(grad) for grad in grads]


def add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return left + right, computed in left. An absent gradient counts as zero."""
    if left is None:
        return right
    return left if right is None else left.add_(right)


def add_grads(left: Grads, right: Grads) -> Grads:
    """Return the sums of pairs, see `add`."""
    if not left or any(map(is_, (*left, *right), repeat(None))):
        return [*map(add, left, right)]
    add_all(left, right)
    return left


def list_present(grads: Grads) -> list[Tensor]:
    """Return the gradients of the parameters that were used."""
    present: list[Any] = [*compress(grads, map(is_not, grads, repeat(None)))]
    return present


def put(grad: Tensor | None, view: Tensor) -> None:
    """Copy a gradient into a view. An absent one becomes -0.0, which changes no sum."""
    if grad is None:
        view.zero_().neg_()
    else:
        view.copy_(grad)


def lay_out(grad: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a copy with these strides."""
    return torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)
