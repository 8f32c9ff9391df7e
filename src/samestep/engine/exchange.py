"""One exchange of a gradient: from all ranks' parts to the sums of the whole batch."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from samestep.engine import routes
from samestep.engine.control import Control
from samestep.engine.exchange_memory import ExchangeMemory
from samestep.engine.folding import Grads, RankParts, lay_out, list_present
from samestep.engine.reduction_plan import ReductionPlan
from samestep.torch_internals import multiply_all
from samestep.world.group import Group


@dataclass(frozen=True)
class Sums:
    """The sums of all ranks' gradients.

    Attributes:
        controls: every rank's control block.
        grads: per parameter, its sum; None on ranks that do not get it.
        used: per parameter, whether a micro-batch of the step used it.
    """

    controls: list[Control]
    grads: Grads
    used: bytes

    def average(self, inverse: float) -> Grads:
        """Return `sum * inverse`, computed in the sum; None if no micro-batch of the step used the parameter."""
        averages = [grad if is_used else None for grad, is_used in zip(self.grads, self.used, strict=True)]
        present = list_present(averages)
        if present and inverse != 1.0:
            multiply_all(present, inverse)
        return averages


class Exchange:
    """An exchange of this rank's parts with the other ranks. The buckets are sent in order.

    If another rank is gone, `finish` raises the error, so that the script's micro-batches complete.

    Attributes:
        waited_s: seconds that `send` has waited for other ranks.
    """

    def __init__(self, plan: ReductionPlan, memory: ExchangeMemory, group: Group, parts: RankParts) -> None:
        self.waited_s = 0.0
        self._plan = plan
        self._memory = memory
        self._group = group
        self._parts = parts
        self._packed = bytearray(len(plan.params))
        self._left: Grads = [None] * len(plan.params)  # what the last micro-batch has left for `finish`
        # Per bucket, how many of its gradients the last micro-batch has not computed yet.
        self._missing = [sum(param.requires_grad for param in bucket.params) for bucket in plan.buckets]
        self._pending: list[routes.PendingOp] = []
        self._wait = group.wait_for
        self._failure: RuntimeError | None = None
        self._attempt(self._expect)

    def _expect(self) -> None:
        for tag, route in enumerate(self._memory.routes):
            route.expect(tag)

    def _pack(self, i: int, grad: Tensor | None) -> Tensor:
        """Copy this rank's parts of parameter i into its bucket. Returns the view that holds the last part."""
        self._packed[i] = 1
        return self._parts.pack(i, grad, self._memory.views[i])

    def send(self, i: int, grad: Tensor) -> Tensor:
        """Copy this rank's parts of parameter i into its bucket, and send the buckets that are complete with it.

        Args:
            grad: the gradient in the last micro-batch.

        Returns:
            The view that holds the last part.
        """
        packed = self._pack(i, grad)
        missing = self._missing
        pending = self._pending
        missing[self._plan.bucket_of[i]] -= 1
        # The last bucket waits for the control block, in `finish`.
        while self._failure is None and len(pending) < len(missing) - 1 and not missing[len(pending)]:
            began_s = time.monotonic()
            self._attempt(self._send_next)
            self.waited_s += time.monotonic() - began_s
        return packed

    def _attempt(self, communicate: Callable[[], None]) -> None:
        """Begin a part of the exchange. `finish` raises its error."""
        try:
            communicate()
        except RuntimeError as error:
            self._failure = error

    def _pop_failure(self) -> RuntimeError:
        """Return the error. Its traceback refers to this object: the cycle would keep the connections open."""
        failure, self._failure = self._failure, None
        assert failure is not None
        return failure

    def _send_next(self) -> None:
        """Start the exchange of the next bucket, and advance that of the bucket before it."""
        place = len(self._pending)
        route = self._memory.routes[place]
        if self._parts.held and place < len(self._plan.buckets):
            for i in self._plan.buckets[place].indices:
                if not self._packed[i]:
                    self._pack(i, self._left[i])
        self._pending.append(routes.PendingOp(route.run(tag=place), self._wait))
        # At this fixed point, so that all ranks issue their messages in the same order.
        if place and self._memory.routes[place - 1].has_rounds:
            self._pending[place - 1].advance()

    def finish(self, grads: Grads, control: Control) -> Sums:
        """Send all that is left, and wait for the sums.

        Args:
            grads: gradients of the last micro-batch.
            control: this rank's control block. Its entry `used` is set here.

        Raises:
            RuntimeError: another rank is gone.
        """
        if self._failure is not None:
            raise self._pop_failure()
        self._left = grads
        rank = self._group.rank
        memory = self._memory
        used = self._parts.used
        control.used = used.to_bytes(len(self._plan.params))
        memory.form.pack_into(memory.blocks[rank], control)
        while len(self._pending) < len(memory.routes):
            self._send_next()
        routes.wait_all(self._pending)
        controls = [
            control if each == rank else memory.form.unpack_from(block, len(held))
            for each, (block, held) in enumerate(zip(memory.blocks, memory.layout.ranges, strict=True))
        ]
        for each in controls:
            used |= int.from_bytes(each.used)
        return Sums(controls, memory.read_sums(), used.to_bytes(len(self._plan.params)))


def sum_alone(plan: ReductionPlan, parts: RankParts, grads: Grads, control: Control) -> Sums:
    """Return the sums if there is no other rank. Arguments as for `Exchange`."""
    sums = parts.complete(grads)
    if [*map(Tensor.stride, list_present(sums))] != plan.strides:
        # As with more ranks, gradients get the parameter's strides, because norms sum in memory order.
        sums = [
            grad if grad is None or grad.stride() == strides else lay_out(grad, strides)
            for grad, strides in zip(sums, plan.strides, strict=True)
        ]
    if plan.exchange_dtype is not None:
        sums = [None if each is None else each.to(param.dtype) for each, param in zip(sums, plan.params, strict=True)]
    return Sums([control], sums, parts.used.to_bytes(len(plan.params)))
