"""One exchange of a gradient: from all ranks' parts to the sums of the whole batch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from samestep.engine import routes
from samestep.engine.buckets import Bucket
from samestep.engine.control import Control
from samestep.engine.exchange_memory import BucketMemory, ExchangeMemory
from samestep.engine.folding import MISSED, USED, Grads, RankParts, lay_out, list_present
from samestep.engine.reduction_plan import ReductionPlan
from samestep.torch_internals import add_to_all, multiply_all
from samestep.world.group import Group


@dataclass(frozen=True)
class Sums:
    """The sums of all ranks' gradients.

    Attributes:
        controls: every rank's control block.
        pieces: per bucket, its parameters and their sums. On ranks that do not get a bucket's sums, they are None.
        used: a byte per parameter, see `USED`.
    """

    controls: list[Control]
    pieces: Sequence[tuple[Sequence[int], Sequence[Tensor | None]]]
    used: bytes

    def average(self, inverse: float) -> Grads:
        """Return `sum * inverse`, computed in the sum; None if no micro-batch of the step used the parameter."""
        averages: Grads = [None] * len(self.used)
        for indices, grads in self.pieces:
            for i, grad in zip(indices, grads, strict=True):
                if self.used[i] & USED:
                    averages[i] = grad
        present = list_present(averages)
        if present and inverse != 1.0:
            multiply_all(present, inverse)
        if USED | MISSED in self.used:
            # The sign of a sum of -0.0 would otherwise depend on whether an absent gradient was sent as +0.0.
            marked = zip(averages, self.used, strict=True)
            if in_part := [grad for grad, marks in marked if grad is not None and marks & MISSED]:
                add_to_all(in_part, 0.0)
        return averages


class Exchange:
    """An exchange of this rank's parts with the other ranks. The buckets are sent in order.

    If another rank is gone, `finish` raises the error, so that the script's micro-batches complete.

    Attributes:
        waited_s: seconds that `send_complete` has waited for other ranks.
    """

    def __init__(self, plan: ReductionPlan, memory: ExchangeMemory, group: Group, parts: RankParts) -> None:
        self.waited_s = 0.0
        self._plan = plan
        self._memory = memory
        self._group = group
        self._parts = parts
        self._packed = bytearray(len(plan.params))
        # Per bucket, how many of its gradients the last micro-batch has not computed yet.
        self._missing = [sum(param.requires_grad for param in bucket.params) for bucket in plan.buckets]
        self._pending: list[routes.PendingOp] = []
        self._wait = group.wait_for
        self._failure: RuntimeError | None = None
        self._attempt(self._expect)

    def _expect(self) -> None:
        for tag, route in enumerate(self._memory.routes):
            route.expect(tag)

    def pack(self, i: int, grad: Tensor | None) -> Tensor:
        """Copy this rank's parts of parameter i into its bucket. Returns the view that holds the last part.

        Args:
            grad: the gradient in the last micro-batch.
        """
        self._packed[i] = 1
        return self._parts.pack(i, grad, self._memory.views[i])

    def send_complete(self, i: int) -> None:
        """Send the buckets that are complete with parameter i, which was packed."""
        missing = self._missing
        pending = self._pending
        missing[self._plan.bucket_of[i]] -= 1
        # The last bucket waits for the control block, in `finish`.
        while self._failure is None and len(pending) < len(missing) - 1 and not missing[len(pending)]:
            began_s = time.monotonic()
            self._attempt(lambda: self._send_next(None))
            self.waited_s += time.monotonic() - began_s

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

    def _send_next(self, grads: Grads | None) -> None:
        """Start the exchange of the next bucket, and advance that of the bucket before it.

        Args:
            grads: gradients of the last micro-batch that are not packed yet. None: there are none.
        """
        place = len(self._pending)
        route = self._memory.routes[place]
        if place < len(self._plan.buckets):
            if self._parts.held:
                for i in self._plan.buckets[place].indices:
                    if not self._packed[i]:
                        self.pack(i, None if grads is None else grads[i])
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
        rank = self._group.rank
        memory = self._memory
        used = self._parts.count_used()
        control.used = used.to_bytes(len(self._plan.params))
        memory.form.pack_into(memory.blocks[rank], control)
        while len(self._pending) < len(memory.routes):
            self._send_next(grads)
        routes.wait_all(self._pending)
        controls = [
            control if each == rank else memory.form.unpack_from(block, len(held))
            for each, (block, held) in enumerate(zip(memory.blocks, memory.layout.ranges, strict=True))
        ]
        for each in controls:
            used |= int.from_bytes(each.used)
        pieces = [
            (bucket.indices, _read_sum(bucket, of_bucket))
            for bucket, of_bucket in zip(self._plan.buckets, memory.buckets, strict=True)
        ]
        return Sums(controls, pieces, used.to_bytes(len(self._plan.params)))


def _read_sum(bucket: Bucket, memory: BucketMemory) -> Sequence[Tensor | None]:
    """Return the sums of a bucket in the dtype of its parameters; None on a rank that does not get them."""
    if not memory.has_sum:
        return [None] * len(bucket.indices)
    dtype = bucket.params[0].dtype
    return memory.grads if bucket.dtype == dtype else bucket.views(memory.route.root.to(dtype))


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
    return Sums([control], [(range(len(sums)), sums)], parts.count_used().to_bytes(len(plan.params)))
