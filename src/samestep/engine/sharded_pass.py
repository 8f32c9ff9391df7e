"""Sums the gradients of sharded parameters over a step's micro-batches on all ranks, along the canonical tree.

The ranks work in rounds: round j brings the gradients of the micro-batches from j * world_size on, one of each rank,
which are folded at once. So a rank keeps at most log2(micro-batches) + 1 sums of the size of its chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from samestep.engine.chunk_sums import ChunkExchange, ChunkSum
from samestep.engine.control import Control
from samestep.engine.exchange import Exchange, Sums
from samestep.engine.exchange_memory import ExchangeMemory
from samestep.engine.folding import Grads, RankParts
from samestep.engine.reduction_plan import ReductionPlan
from samestep.engine.routes import PendingOp, wait_all
from samestep.engine.script_guards import ParameterGuard
from samestep.engine.shards import Shards
from samestep.errors import UsageError
from samestep.hashing import hash_short
from samestep.torch_internals import shard_like
from samestep.world.group import Group


class ShardedPass:
    """Same interface as `ReductionPass`, for sharded parameters. All ranks open the same number of micro-batches.

    Args:
        memory: for the control blocks.
        guard: checks the parameters at the end of each micro-batch.
    """

    waited_s = 0.0

    def __init__(
        self,
        plan: ReductionPlan,
        shards: Shards,
        group: Group,
        memory: ExchangeMemory,
        guard: ParameterGuard,
    ) -> None:
        self._plan = plan
        self._numbers = shards.numbers
        self._models = shards.models
        self._guard = guard
        self._world_size = group.world_size
        self._parts = RankParts(plan, memory.layout, group.rank)
        self._exchange = Exchange(plan, memory, group, self._parts)
        num_micro_batches = memory.layout.num_micro_batches
        self._chunks = ChunkExchange(num_micro_batches, group.rank, group.world_size, self._models.block_size)
        self._sums = [ChunkSum(num_micro_batches) for _ in self._models.units]
        self._dtypes: dict[int, torch.dtype] = {}  # of the gradients, per unit
        self._order: list[int] = []  # of the units, in all backward passes
        self._under_way: list[PendingOp] = []  # exchanges of chunks
        self._round = -1
        # Of the open micro-batch:
        self._wanted: Sequence[bool] = ()  # per unit, whether its gradients are exchanged
        self._counts = False  # whether the gradients of the current backward pass are added to the sums
        self._fired = bytearray(len(plan.params))  # 1: the parameter has a gradient
        self._reduced: set[int] = set()  # units
        self._models.free_gathered()

    def open(self, v: int) -> None:
        """Begin the micro-batch of the next round."""
        self._round += 1
        self._wanted = ()
        self._fired[:] = bytes(len(self._fired))
        self._reduced.clear()

    def backward(self, v: int, wanted: set[int] | None, run: Callable[[], None], *, has_weight: bool) -> None:
        """Run the backward pass. `wanted`: numbers of the parameters that get gradients; None: all."""
        self._wanted = [wanted is None or not wanted.isdisjoint(numbers) for numbers in self._numbers]
        self._counts = has_weight and v in self._parts.held
        self._models.direct(self)
        try:
            run()
        finally:
            self._models.direct(None)

    def complete(self, k: int) -> None:
        """Note which parameters of a unit have a gradient, and complete the others."""
        self._order.append(k)
        had = self._models.units[k].complete_grads(keep=self._counts)
        for i, has_grad in zip(self._numbers[k], had, strict=True):
            if has_grad and i is not None:
                self._fired[i] = 1

    def reduce(self, k: int, flat: Tensor, process_group: Any) -> None:
        """Begin to exchange the chunks of a unit's gradients, and advance the exchanges of units before."""
        if not self._wanted[k]:  # of another model
            return
        if k in self._reduced:
            raise UsageError(
                f'{self._models.names[k]} ran twice in one micro-batch, which shard="fsdp2" does not support: leave it '
                "out of shard_blocks",
                code="SS609",
            )
        self._reduced.add(k)
        self._dtypes[k] = flat.dtype
        first = self._round * self._world_size
        op = PendingOp(self._chunks.run(self._plan.narrow(flat), first, self._sums[k], process_group))
        if flat.is_cuda:
            wait_all([op])  # makes this stream wait, not the host
        else:
            self._under_way = [*(each for each in self._under_way if each.advance()), op]

    def take(self, i: int, grad: Tensor) -> None:
        """Drop what `fully_shard` leaves in `.grad` of parameter i."""
        self._plan.params[i].grad = None

    def close(self, v: int) -> None:
        """End a micro-batch.

        Raises:
            UsageError: a unit was not used, so that other ranks wait for it; or the script has changed a parameter.
        """
        self._models.free_gathered()
        wait_all(self._under_way)
        self._under_way.clear()
        for param in self._plan.untrained:
            param.grad = None
        models = self._models
        for k, numbers in enumerate(self._numbers):
            is_wanted = not self._wanted or self._wanted[k]
            is_trained = any(i is not None and self._plan.params[i].requires_grad for i in numbers)
            if is_wanted and is_trained and k not in self._reduced:
                what = f"{models.names[k]} was not used" if self._wanted else "step.backward was not called"
                raise UsageError(
                    f'{what} in micro-batch {v}, and with shard="fsdp2" all ranks wait for its gradients: use all of '
                    "the model in every micro-batch, with weight=0 for one that does not count",
                    code="SS609",
                )
        self._guard.check()
        if v in self._parts.held:
            self._parts.mark(self._fired)

    def finish(self, control: Control) -> Sums:
        """Complete the sums. Returns them with every rank's control block.

        Raises:
            UsageError: the ranks have used other units, or in another order.
        """
        sums = self._exchange.finish([], replace(control, order=hash_short(repr(self._order).encode())))
        orders = [each.order for each in sums.controls]
        other = next((rank for rank, order in enumerate(orders) if order != orders[0]), None)
        if other is not None:
            raise UsageError(
                f"rank {other} has used other parts of the model than rank 0, or in another order, so that gathered "
                'parameters and gradients were mixed up: with shard="fsdp2", use the same parts in every micro-batch',
                code="SS609",
            )
        pieces = []
        for k, (unit, numbers, each_sum) in enumerate(zip(self._models.units, self._numbers, self._sums, strict=True)):
            total = each_sum.total
            if total is not None:
                total = total.to(self._dtypes[k])
            parts = [None] * len(numbers) if total is None else unit.split(total)
            trained = [(i, part) for i, part in zip(numbers, parts, strict=True) if i is not None]
            pieces.append(([i for i, _ in trained], [part for _, part in trained], total))
        return replace(sums, pieces=pieces)

    def release(self) -> None:
        """Release the messages of an exchange that has failed."""
        self._under_way.clear()

    def assign(self, grads: Grads) -> None:
        """Leave gradients in `.grad`: None for a parameter without one."""
        for param, grad in zip(self._plan.params, grads, strict=True):
            param.grad = None if grad is None else shard_like(param, grad)
