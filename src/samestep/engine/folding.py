"""Adds up the gradients of one rank: a tensor per parameter, None for a parameter that was not used."""

from collections.abc import Sequence
from functools import cached_property
from itertools import compress, repeat
from operator import is_, is_not
from typing import Any

import torch
from torch import Tensor

from samestep.plan.tree import Layout
from samestep.torch_internals import add_all, multiply_all

Grads = list[Tensor | None]


class PartialSums:
    """The sums of this rank's micro-batches so far, along the canonical tree.

    Attributes:
        layout: which micro-batches the ranks have.
        held: this rank's micro-batches.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.held = layout.ranges[rank]
        self._rank = rank
        self._sums: list[Grads] = []

    def fold(self, v: int, grads: Grads) -> None:
        """Add the gradients of micro-batch v, unless it is the last one: the sums that it completes become one."""
        for _ in range(self.layout.count_merges(self._rank, v)):
            grads = add_grads(self._sums.pop(), grads)
        self._sums.append(grads)

    @cached_property
    def _split(self) -> tuple[list[Grads], list[Grads]]:
        """The sums that the last micro-batch leaves as they are, and those that become one with it, in order."""
        num_merged = self.layout.count_merges(self._rank, self.held[-1])
        num_stay = len(self._sums) - num_merged
        return self._sums[:num_stay], self._sums[num_stay:][::-1]

    def pack(self, i: int, grad: Tensor | None, views: Sequence[Tensor]) -> Tensor:
        """Copy the sums of parameter i to `views`, and add `grad`, of the last micro-batch. Returns the last view."""
        stay, merged = self._split
        for grads, view in zip(stay, views, strict=False):
            put(grads[i], view)
        view = views[len(stay)]
        for grads in merged[:-1]:
            grad = add(grads[i], grad)
        left = merged[-1][i] if merged else None
        if left is not None and grad is not None:
            torch.add(left, grad, out=view)
        else:
            put(grad if left is None else left, view)
        return view

    def complete(self, grads: Grads) -> Grads:
        """Return the sum of everything and `grads`, of the last micro-batch, if there is no other rank."""
        for left in reversed(self._sums):
            grads = add_grads(left, grads)
        return grads


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


def average(sums: Grads, used: bytes, inverse: float) -> Grads:
    """Return `sum * inverse`, computed in the sum; None for a parameter that no micro-batch of the step used."""
    averages = [grad if is_used else None for grad, is_used in zip(sums, used, strict=True)]
    present = list_present(averages)
    if present and inverse != 1.0:
        multiply_all(present, inverse)
    return averages


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
