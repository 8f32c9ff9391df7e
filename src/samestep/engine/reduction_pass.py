"""Sums of the gradients over a step's micro-batches on all ranks.

All passes have one interface: `open` a micro-batch, `take` each of its gradients, `close` it. Those that sum gradients
then `finish`.
"""

from collections.abc import Sequence

from torch import Tensor

from samestep.engine.backward import GradientHooks
from samestep.engine.control import Control
from samestep.engine.exchange import Exchange, Sums, sum_alone
from samestep.engine.exchange_memory import ExchangeMemory
from samestep.engine.folding import Grads, RankParts
from samestep.engine.reduction_plan import ReductionPlan
from samestep.engine.script_guards import ParameterGuard, check_gradients
from samestep.errors import UsageError
from samestep.plan.tree import Layout
from samestep.torch_internals import get_storage, read_version
from samestep.world.group import Group


class ReductionPass:
    """Sums the gradients that backward passes leave in `.grad`.

    During the backward of this rank's last micro-batch, each gradient is packed into its bucket, and complete buckets
    are sent. Such an overlap with the exchange is what DDP does, too (Li et al. 2020, "PyTorch Distributed: Experiences
    on Accelerating Data Parallel Training").

    Args:
        memory: None if there is no other rank.
        guard: checks the parameters at the end of this rank's last micro-batch.
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
        self._exchange = None if memory is None else Exchange(plan, memory, group, self._parts)
        # Of the open micro-batch:
        self._sender: Exchange | None = None  # only in the last one
        self._fired = bytearray(len(plan.params))  # 1: the parameter has a gradient
        self._found: list[tuple[int, Tensor, int]] = []  # the gradients, see `check_gradients`

    @property
    def waited_s(self) -> float:
        """Seconds that backward passes have waited for exchanges, and so for other ranks."""
        return 0.0 if self._exchange is None else self._exchange.waited_s

    @property
    def is_sending(self) -> bool:
        """Whether `take` gets each gradient of the open micro-batch; otherwise `take_all` gets them at the end."""
        return self._sender is not None

    def open(self, v: int) -> None:
        """Begin micro-batch v of this rank."""
        self._sender = self._exchange if v == self._parts.held.stop - 1 else None
        self._fired[:] = bytes(len(self._fired))

    def take(self, i: int, grad: Tensor) -> None:
        """Take the gradient of parameter i, which is in its `.grad`, in the last micro-batch."""
        if self._fired[i]:
            raise UsageError(
                f"{self._plan.names[i]} got two gradients in one micro-batch (reentrant activation checkpointing?): "
                "use torch.utils.checkpoint with use_reentrant=False",
                code="SS209",
            )
        self._fired[i] = 1
        sender = self._sender
        assert sender is not None
        # Packed now, while it is in the cache, so that its memory is reused for the next gradient. `.data`, because
        # views of one bucket would share a version.
        packed = sender.pack(i, grad)
        if packed.dtype == grad.dtype:  # else it was rounded, and `.grad` cannot hold it
            grad = packed.data
            self._plan.params[i].grad = grad
        self._found.append((i, grad, read_version(grad)))
        sender.send_complete(i)

    def take_all(self) -> None:
        """Take the gradients in `.grad` of all parameters, after the backward pass."""
        params = self._plan.params
        found = [(i, grad) for i, param in enumerate(params) if (grad := param.grad) is not None]
        storages = [*map(get_storage, [grad for _, grad in found])]
        if len({*storages}) < len(storages):  # one tensor for two parameters, or views that may overlap
            seen = set[int]()
            for (i, grad), storage in zip(found, storages, strict=True):
                if storage in seen:
                    params[i].grad = grad.clone()
                seen.add(storage)
            found = [(i, grad) for i, _ in found if (grad := params[i].grad) is not None]
        for i, _ in found:
            self._fired[i] = 1
        self._found = [(i, grad, read_version(grad)) for i, grad in found]

    def close(self, v: int) -> None:
        """End micro-batch v, and fold it unless it is the last of this rank.

        Raises:
            UsageError: the script has changed a gradient, or a parameter since the pass began.
        """
        _drop(self._plan.untrained)
        GradientHooks.check_empty(
            [param for param, fired in zip(self._plan.params, self._fired, strict=True) if not fired]
        )
        check_gradients(self._plan.names, self._plan.params, self._found, v)
        self._found.clear()  # views of buckets, to which no reference may remain when the next pass begins
        self._parts.mark(self._fired)
        if v == self._parts.held.stop - 1:
            self._guard.check()  # `finish` folds it, bucket by bucket, while sending
            if self._exchange is not None and self._plan.exchange_dtype is not None:
                _drop(self._plan.params)  # all are packed
            return
        grads = [param.grad for param in self._plan.params]
        _drop(self._plan.params)
        self._parts.fold(v, grads)

    def finish(self, control: Control) -> Sums:
        """Complete the sums. Returns them with every rank's control block."""
        grads = [param.grad for param in self._plan.params]
        if self._exchange is None:
            return sum_alone(self._plan, self._parts, grads, control)
        return self._exchange.finish(grads, control)

    def release(self) -> None:
        """Release the messages of an exchange that has failed."""
        self._exchange = self._sender = None

    def assign(self, grads: Grads) -> None:
        """Leave gradients in `.grad`: None for a parameter without one."""
        for param, grad in zip(self._plan.params, grads, strict=True):
            param.grad = grad


class InspectingPass:
    """Drops the gradients of micro-batches of other ranks, which are computed only to be inspected."""

    def __init__(self, plan: ReductionPlan) -> None:
        self._plan = plan

    def open(self, v: int) -> None:
        """Begin micro-batch v. After the exchange, `.grad` may still hold gradients of this rank."""
        _drop(self._plan.params)

    def close(self, v: int) -> None:
        """End micro-batch v."""
        _drop(self._plan.untrained)
        _drop(self._plan.params)


def _drop(params: Sequence[Tensor]) -> None:
    for param in params:
        param.grad = None
