"""One exchange of a gradient: from all ranks' partial sums to the sums of the whole batch."""

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from samestep.engine import routes
from samestep.engine.control import Control
from samestep.engine.exchange_memory import ExchangeMemory
from samestep.engine.folding import Grads, PartialSums
from samestep.engine.reduction_plan import ReductionPlan
from samestep.world.group import Group


class Exchange:
    """An exchange of this rank's partial sums with the other ranks. The buckets are sent in order.

    If another rank is gone, `finish` raises the error, so that the script's micro-batches complete.

    Attributes:
        waited_s: seconds that `send` has waited for other ranks.
    """

    def __init__(self, plan: ReductionPlan, memory: ExchangeMemory, group: Group, partial_sums: PartialSums) -> None:
        self.waited_s = 0.0
        self._plan = plan
        self._memory = memory
        self._group = group
        self._partial_sums = partial_sums
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
        """Copy this rank's sums of parameter i into its bucket. Returns the view that holds the last sum.

        Args:
            grad: the gradient in the last micro-batch.
        """
        self._packed[i] = 1
        return self._partial_sums.pack(i, grad, self._memory.views[i])

    def send(self, i: int, grad: Tensor) -> Tensor:
        """Same as `pack`. Sends the buckets that are complete then."""
        packed = self.pack(i, grad)
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
        """Begin to communicate. `finish` raises its error."""
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
        number = len(self._pending)
        route = self._memory.routes[number]
        if self._partial_sums.held and number < len(self._plan.buckets):
            for i in self._plan.buckets[number].indices:
                if not self._packed[i]:
                    self.pack(i, None)
        self._pending.append(routes.PendingOp(route.run(tag=number), self._wait))
        # At this fixed point, so that all ranks issue their messages in the same order.
        if number and self._memory.routes[number - 1].has_rounds:
            self._pending[number - 1].advance()

    def finish(self, control: Control) -> tuple[list[Control], Grads]:
        """Send all that is left. Returns every rank's control block, and the sums; None for one of another rank.

        Args:
            control: this rank's control block.

        Raises:
            RuntimeError: another rank is gone.
        """
        if self._failure is not None:
            raise self._pop_failure()
        rank = self._group.rank
        memory = self._memory
        memory.form.pack_into(memory.blocks[rank], control)
        while len(self._pending) < len(memory.routes):
            self._send_next()
        routes.wait_all(self._pending)
        controls = [
            control if each == rank else memory.form.unpack_from(block, len(held))
            for each, (block, held) in enumerate(zip(memory.blocks, memory.layout.ranges, strict=True))
        ]
        return controls, memory.read_sums()


class Exchanges:
    """The exchanges of a plan, one after the other. Only the memory of the last one is kept."""

    def __init__(self, plan: ReductionPlan, group: Group) -> None:
        self._plan = plan
        self._group = group
        self._memory: ExchangeMemory | None = None
        self._key: tuple[Any, ...] = ()

    def begin(self, partial_sums: PartialSums, num_buffers: int = 0, num_names: int = 0) -> Exchange:
        """Begin an exchange with other ranks. Arguments as for `Exchange` and `ControlFormat`."""
        key = (
            partial_sums.layout,
            num_buffers,
            num_names,
            self._group.generation,
        )  # it refers to the group's connections
        if self._memory is None or key != self._key or self._memory.is_kept:
            self._memory = None  # first, so that there is only one: the last step of an epoch is shorter
            self._memory = ExchangeMemory(self._plan, partial_sums.layout, self._group, num_buffers, num_names)
            self._key = key
        return Exchange(self._plan, self._memory, self._group, partial_sums)

    def forget(self) -> None:
        """Release the memory, and the messages in it that have not arrived."""
        self._memory = None
