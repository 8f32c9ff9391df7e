"""Sums the gradients of this rank's micro-batches along the canonical tree, and exchanges them with the other ranks.

The gradients of all parameters are read by functions in C: a call in Python per parameter would cost more than a step
of a small model.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, count
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch import Tensor

from samestep.engine.control import Control
from samestep.engine.exchange import Exchange, Sums, sum_alone
from samestep.engine.exchange_memory import ExchangeMemory
from samestep.engine.folding import RankParts
from samestep.engine.leaf import (
    NONE,
    ParameterGuard,
    drop_grads,
    passing_gradients,
    read_grad,
    refuse_other_backward,
    run_backward_alone,
)
from samestep.engine.reduction_plan import ReductionPlan
from samestep.errors import UsageError
from samestep.plan.tree import Layout
from samestep.torch_internals import get_storage, list_storages, read_version
from samestep.world.group import Group

read_layout: Callable[[Tensor], torch.layout] = attrgetter("layout")


class TreeSum:
    """Sums the gradients that backward passes leave in `.grad`.

    During the backward of this rank's last micro-batch, each gradient is packed into its bucket, and complete buckets
    are sent. Such an overlap with the exchange is what DDP does, too (Li et al. 2020, "PyTorch Distributed: Experiences
    on Accelerating Data Parallel Training").

    Args:
        memory: for the exchange; None if there is no other rank.
        guard: of the parameters.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        layout: Layout,
        group: Group,
        memory: ExchangeMemory | None,
        guard: ParameterGuard,
    ) -> None:
        self._plan = plan
        self._guard = guard
        self._parts = RankParts(plan, layout, group.rank)
        self._exchange: Exchange | None = None
        if memory is not None:
            self._exchange = Exchange(plan, memory, group, self._parts)
        # Of the open micro-batch:
        self._v = 0
        self._is_last = False  # of this rank
        self._grads: list[Any] = []  # what step.backward has left in `.grad`
        self._versions: dict[int, int] = {}  # of these gradients, by the number of the parameter

    def open(self, v: int) -> None:
        """Begin micro-batch v."""
        held = self._parts.held
        self._v = v
        self._is_last = v == held.stop - 1 and v in held
        self._grads = [None] * len(self._plan.params)
        self._versions = {}
        if v not in held:  # after the exchange, `.grad` may still hold gradients of this rank
            drop_grads(self._plan.params)

    def backward(self, loss: Tensor, factor: float | Tensor, wanted: set[int] | None, *, has_weight: bool) -> float:
        """Run the backward pass. Returns the seconds in which it waited for other ranks.

        Args:
            wanted: numbers of the parameters that get gradients; None: all.
        """
        if not has_weight:
            return 0.0
        params = self._plan.params
        if self._exchange is None or not self._is_last:
            run_backward_alone(params, loss, factor)
            self._note_all(wanted)
            return 0.0
        with passing_gradients(params, partial(self._send, self._exchange, wanted)):
            run_backward_alone(params, loss, factor)
        return self._exchange.waited_s

    def _note_all(self, wanted: set[int] | None) -> None:
        """Note all gradients after the backward pass, as dense tensors that share no memory."""
        params = self._plan.params
        if wanted is not None:
            drop_grads([param for i, param in enumerate(params) if i not in wanted])
        grads: list[Any] = [*map(read_grad, params)]
        numbers = [*compress(count(), map(is_not, grads, NONE))]
        present = [*map(grads.__getitem__, numbers)]
        storages = list_storages(present) if {*map(read_layout, present)} == {torch.strided} else []
        if len({*storages}) < len(present):
            self._separate(grads, numbers)
        self._grads = grads
        self._versions = dict(zip(numbers, map(read_version, map(grads.__getitem__, numbers)), strict=True))

    def _separate(self, grads: list[Any], numbers: Sequence[int]) -> None:
        """Make gradients dense, and copy those that share memory with another one. `numbers`: those present."""
        seen = set[int]()
        for i in numbers:
            grad = grads[i]
            if grad.layout is not torch.strided:
                grad = grad.to_dense()  # a sparse one has other rows on each rank
            elif get_storage(grad) in seen:  # one tensor for two parameters, or views that may overlap
                grad = grad.clone()
            seen.add(get_storage(grad))
            self._plan.params[i].grad = grads[i] = grad

    def _send(self, exchange: Exchange, wanted: set[int] | None, i: int, grad: Tensor) -> None:
        """Send the gradient of parameter i, when its bucket is complete."""
        param = self._plan.params[i]
        if wanted is not None and i not in wanted:
            param.grad = None
            return
        if i in self._versions:
            raise UsageError(
                f"{self._plan.names[i]} got two gradients in one micro-batch (reentrant activation checkpointing?): "
                "use torch.utils.checkpoint with use_reentrant=False",
                code="SS209",
            )
        if grad.layout is not torch.strided:
            param.grad = grad = grad.to_dense()  # a sparse one has other rows on each rank
        # Packed now, while it is in the cache, so that its memory is reused for the next gradient. `.data`, because
        # views of one bucket would share a version.
        packed = exchange.send(i, grad)
        if packed.dtype == grad.dtype:  # else it was rounded, and `.grad` cannot hold it
            param.grad = grad = packed.data
        self._grads[i] = grad
        self._versions[i] = read_version(grad)

    def close(self) -> None:
        """End a micro-batch, and fold it unless it is the last of this rank or another rank's.

        Raises:
            UsageError: the script has changed a gradient, or a parameter since the pass began.
        """
        grads: list[Any] = [*map(read_grad, self._plan.params)]
        versions = [*map(read_version, map(self._grads.__getitem__, self._versions))]
        if versions != [*self._versions.values()] or not all(map(is_, grads, self._grads)):
            self._refuse_changes(grads)
        drop_grads(self._plan.untrained if self._is_last else self._plan.all)
        if self._v not in self._parts.held:
            return
        self._parts.note_used(map(is_not, grads, NONE))
        if not self._is_last:
            self._parts.fold(self._v, grads)
            return
        self._guard.check()  # `finish` folds it, bucket by bucket, while sending
        if self._exchange is not None and self._plan.exchange_dtype is not None:
            drop_grads(self._plan.params)  # all are packed

    def _refuse_changes(self, grads: Sequence[Tensor | None]) -> None:
        for i, (name, grad) in enumerate(zip(self._plan.names, grads, strict=True)):
            if i not in self._versions:
                if grad is not None:
                    refuse_other_backward()
            elif grad is None or grad is not self._grads[i] or read_version(grad) != self._versions[i]:
                raise UsageError(
                    f"the gradient of {name} was changed in micro-batch {self._v} (by loss.backward(), zero_grad or "
                    "clipping?), while it is only a partial sum: remove zero_grad(), which is not needed, and change "
                    "gradients after the micro-batch loop",
                    code="SS207",
                )

    def finish(self, control: Control) -> Sums:
        """Complete the sums. Returns them with every rank's control block."""
        grads = [*map(read_grad, self._plan.params)]
        if self._exchange is None:
            return sum_alone(self._plan, self._parts, grads, control)
        return self._exchange.finish(grads, control)
