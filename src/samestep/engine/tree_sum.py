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
from samestep.engine.exchange import Exchange, ReductionPlan
from samestep.engine.leaf import (
    NONE,
    Grads,
    PartialSums,
    RunBackward,
    drop_grads,
    list_present,
    read_grad,
    refuse_other_backward,
    run_backward_alone,
)
from samestep.errors import UsageError
from samestep.torch_internals import get_storage, list_storages, read_version

read_layout: Callable[[Tensor], torch.layout] = attrgetter("layout")


class TreeSum:
    """Sums the gradients that backward passes leave in `.grad`.

    During the backward of this rank's last micro-batch, each gradient is packed into its bucket, and complete buckets
    are sent. Such an overlap with the exchange is what DDP does, too (Li et al. 2020, "PyTorch Distributed: Experiences
    on Accelerating Data Parallel Training").

    Args:
        exchange: with the other ranks; None if there are none.
        run_backward: runs a backward pass, as `run_backward_alone`.

    Attributes:
        used: the parameters that this rank's micro-batches have used, a byte of 1 for each; as one number.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        partial_sums: PartialSums,
        exchange: Exchange | None,
        run_backward: RunBackward = run_backward_alone,
    ) -> None:
        self._plan = plan
        self._partial_sums = partial_sums
        self._exchange = exchange
        self._sender = exchange if partial_sums.layout.world_size > 1 else None  # of gradients, to other replicas
        self._run_backward = run_backward
        self.used = 0
        self._grads: dict[int, Tensor] = {}  # what step.backward has left in `.grad`, by the number of the parameter
        self._versions: list[int] = []  # of these gradients

    def backward(self, v: int, loss: Tensor | None, factor: float | Tensor | None, wanted: set[int] | None) -> float:
        """Run the backward pass of micro-batch v. Returns the seconds in which it waited for other ranks.

        Args:
            loss: None if another rank has it.
            factor: of the loss; None: the micro-batch does not count.
            wanted: numbers of the parameters that get gradients; None: all.
        """
        if factor is None:
            return 0.0
        params = self._plan.params
        sender = self._sender
        if sender is None or v not in self._partial_sums.held[-1:]:
            self._run_backward(params, loss, factor)
            self._note_all(wanted)
            return 0.0
        with self._plan.hooks.passing_to(partial(self._send, sender, wanted)):
            self._run_backward(params, loss, factor)
        return sender.waited_s

    def _note_all(self, wanted: set[int] | None) -> None:
        """Note all gradients after the backward pass, as dense tensors that share no memory."""
        params = self._plan.params
        if wanted is not None:
            drop_grads([param for i, param in enumerate(params) if i not in wanted])
        grads: list[Any] = [*map(read_grad, params)]
        self._grads = dict(compress(enumerate(grads), map(is_not, grads, NONE)))
        present = [*self._grads.values()]
        storages = list_storages(present) if {*map(read_layout, present)} == {torch.strided} else []
        if len({*storages}) < len(present):
            self._separate()
        self._versions = [*map(read_version, self._grads.values())]

    def _separate(self) -> None:
        """Make gradients dense, and copy those that share memory with another one."""
        seen = set[int]()
        for i, grad in self._grads.items():
            if grad.layout is not torch.strided:
                grad = grad.to_dense()  # a sparse one has other rows on each rank
            elif get_storage(grad) in seen:  # one tensor for two parameters, or views that may overlap
                grad = grad.clone()
            seen.add(get_storage(grad))
            self._plan.params[i].grad = self._grads[i] = grad

    def _send(self, exchange: Exchange, wanted: set[int] | None, i: int, grad: Tensor) -> None:
        """Send the gradient of parameter i, when its bucket is complete."""
        param = self._plan.params[i]
        if wanted is not None and i not in wanted:
            param.grad = None
            return
        if i in self._grads:
            raise UsageError(
                f"{self._plan.names[i]} got two gradients in one micro-batch (reentrant activation checkpointing?): "
                "use torch.utils.checkpoint with use_reentrant=False",
                code="SS209",
            )
        if grad.layout is not torch.strided:
            param.grad = grad = grad.to_dense()  # a sparse one has other rows on each rank
        # Packed now, while it is in the cache, so that its memory is reused for the next gradient. `.data`, because
        # views of one bucket would share a version.
        if self._plan.exchange_dtype is None:
            param.grad = grad = exchange.send(i, grad).data
        else:  # `.grad` cannot hold what is rounded
            exchange.send(i, *self._plan.narrow([grad]))
        self._grads[i] = grad
        self._versions.append(read_version(grad))

    def close(self, v: int) -> None:
        """End micro-batch v, and fold it unless it is the last of this rank or another rank's.

        Raises:
            UsageError: the script has changed a gradient, or a parameter since the pass began.
        """
        grads: list[Any] = [*map(read_grad, self._plan.params)]
        versions = [*map(read_version, self._grads.values())]
        if versions != self._versions or not all(map(is_, grads, map(self._grads.get, count()))):
            self._refuse_changes(v, grads)
        held = self._partial_sums.held
        if v in held:
            self.used |= int.from_bytes(bytes(map(is_not, grads, NONE)))
        if v in held[-1:]:
            for param in self._plan.untrained:
                param.grad = None
            self._plan.guard.check()
            return  # `finish` folds it
        drop_grads(self._plan.all)
        self._grads.clear()
        self._versions.clear()
        if v in held:
            self._partial_sums.fold(v, self._plan.narrow(grads))

    def _refuse_changes(self, v: int, grads: Sequence[Tensor | None]) -> None:
        versions = dict(zip(self._grads, self._versions, strict=True))
        for i, (name, grad) in enumerate(zip(self._plan.names, grads, strict=True)):
            left = self._grads.get(i)
            if left is None and grad is not None:
                refuse_other_backward()
            if left is not None and (grad is not left or read_version(left) != versions[i]):
                raise UsageError(
                    f"the gradient of {name} was changed in micro-batch {v} (by loss.backward(), zero_grad or "
                    "clipping?), while it is only a partial sum: remove zero_grad(), which is not needed, and change "
                    "gradients after the micro-batch loop",
                    code="SS207",
                )

    def finish(self, control: Control) -> tuple[list[Control], Grads]:
        """Complete the sums, see `Exchange.finish`."""
        if self._exchange is None:
            return [control], self.complete_alone()
        if self._sender is None:
            return self._exchange.finish(control)[0], self.complete_alone()
        drop_grads(self._plan.params)  # all are packed, so no memory is needed for those that were rounded
        self._grads.clear()
        self._versions.clear()
        return self._exchange.finish(control)

    def complete_alone(self) -> Grads:
        """Return the sums of all micro-batches, without an exchange."""
        plan = self._plan
        sums = self._partial_sums.complete(plan.narrow([*map(read_grad, plan.params)]))
        if plan.exchange_dtype is None and [*map(Tensor.stride, list_present(sums))] == plan.strides:
            return sums
        return lay_out(sums, plan)


def lay_out(sums: Grads, plan: ReductionPlan) -> Grads:
    """Return sums with the strides and dtypes that they have after an exchange: norms sum in memory order."""
    return [*map(_lay_out, sums, plan.params, plan.strides)]


def _lay_out(grad: Tensor | None, param: Tensor, strides: Sequence[int]) -> Tensor | None:
    """Return a gradient with these strides and the parameter's dtype."""
    if grad is None or (grad.stride() == strides and grad.dtype == param.dtype):
        return grad
    return torch.empty_strided(grad.shape, strides, dtype=param.dtype, device=grad.device).copy_(grad)
