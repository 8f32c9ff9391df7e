"""Sums the gradients of sharded parameters over a step's micro-batches on all ranks, along the canonical tree.

The ranks work in rounds: round j brings the gradients of the micro-batches from j * world_size on, one of each rank,
which are folded at once. So a rank keeps at most log2(micro-batches) + 1 sums of the size of its chunk.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from samestep.engine.chunk_sums import ChunkExchange, ChunkSum
from samestep.engine.control import Control
from samestep.engine.exchange import Exchange
from samestep.engine.folding import Grads, PartialSums
from samestep.engine.leaf import ParameterGuard, drop_grads, run_backward_alone
from samestep.engine.reduction_plan import ReductionPlan
from samestep.engine.routes import PendingOp, wait_all
from samestep.engine.sharded_unit import ShardedModels
from samestep.errors import UsageError
from samestep.hashing import hash_short
from samestep.world.group import Group


class ShardedSum:
    """Same interface as `TreeSum`, for sharded parameters. All ranks open the same number of micro-batches.

    Args:
        exchange: of the control blocks.
        guard: checks the parameters at the end of each micro-batch.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        models: ShardedModels,
        group: Group,
        partial_sums: PartialSums,
        exchange: Exchange,
        guard: ParameterGuard,
    ) -> None:
        self._plan = plan
        self._numbers = plan.unit_numbers
        self._models = models
        self._guard = guard
        self.used = 0
        self._world_size = group.world_size
        self._partial_sums = partial_sums
        self._exchange = exchange
        num_micro_batches = partial_sums.layout.num_micro_batches
        self._chunks = ChunkExchange(num_micro_batches, group.rank, group.world_size, self._models.block_size)
        self._sums = [ChunkSum(num_micro_batches) for _ in self._models.units]
        self._order: list[int] = []  # of the units, in all backward passes
        self._under_way: list[PendingOp] = []  # exchanges of chunks
        self._round = -1
        self._models.free_gathered()
        self._fired = bytearray(len(plan.params))  # 1: the parameter has got a gradient
        self._counts = False  # whether the gradients of the current backward pass are added to the sums
        self._begin_round()

    def _begin_round(self) -> None:
        self._round += 1
        self._is_called = False  # step.backward was called
        # Units whose gradients are not on their way yet, and those whose gradients are.
        self._missing = {k for k, numbers in enumerate(self._numbers) if any(map(self._is_trained, numbers))}
        self._sent = set[int]()

    def _is_trained(self, i: int | None) -> bool:
        return i is not None and self._plan.params[i].requires_grad

    def backward(self, v: int, loss: Tensor, factor: float | Tensor | None, wanted: set[int] | None) -> float:
        """Run the backward pass, also of a loss that does not count: all ranks take part in the exchange.

        Args:
            factor: of the loss; None: the micro-batch does not count.
            wanted: numbers of the parameters that get gradients; None: all.
        """
        self._is_called = True
        if wanted is not None:
            self._missing = {k for k in self._missing if not wanted.isdisjoint(self._numbers[k])}
        self._counts = factor is not None and v in self._partial_sums.held
        self._models.direct(self._reduce)
        try:
            run_backward_alone(self._plan.params, loss, 1.0 if factor is None else factor)
        finally:
            self._models.direct(None)
        for k, unit in enumerate(self._models.units):
            if unit.has_grads:  # the end of its backward pass was not found, such as without differentiable inputs
                self._reduce(k)
        return 0.0

    def _reduce(self, k: int) -> None:
        """Begin to exchange the gradients of a unit, and advance the exchanges of units before."""
        unit = self._models.units[k]
        grads = unit.take_grads()
        if k in self._sent:
            raise UsageError(
                f'{unit.name} ran twice in one micro-batch, which shard="fsdp2" does not support: leave it out of '
                "shard_blocks",
                code="SS609",
            )
        if k in self._missing:
            self._send(k, grads if self._counts else [None] * len(grads))

    def _send(self, k: int, grads: Sequence[Tensor | None]) -> None:
        self._missing.remove(k)
        self._sent.add(k)
        self._order.append(k)
        for i, grad in zip(self._numbers[k], grads, strict=True):
            if i is not None and grad is not None:
                self._fired[i] = 1
        stream = self._models.stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            for grad in grads:
                if grad is not None:
                    grad.record_stream(stream)
        with torch.cuda.stream(stream):
            (chunks,) = self._plan.narrow([self._models.units[k].pack(grads)])
            first = self._round * self._world_size
            op = PendingOp(self._chunks.run(chunks, first, self._sums[k], self._models.process_group))
            if stream is not None:
                wait_all([op])  # makes the stream wait, not the host
                return
        self._under_way = [*(each for each in self._under_way if each.advance()), op]

    def close(self, v: int) -> None:
        """End micro-batch v.

        Raises:
            UsageError: other ranks wait for gradients; or the script has changed a parameter.
        """
        self._models.free_gathered()
        if self._missing and not self._is_called:
            raise UsageError(
                f'step.backward was not called in micro-batch {v}, and with shard="fsdp2" all ranks wait '
                "for its gradients: call it in every micro-batch, with weight=0 for one that does not count",
                code="SS609",
            )
        for k in sorted(self._missing):  # parts of the model that were not used
            self._send(k, [None] * len(self._numbers[k]))
        wait_all(self._under_way)
        self._under_way.clear()
        if (stream := self._models.stream) is not None:
            torch.cuda.current_stream().wait_stream(stream)
        drop_grads(self._plan.untrained)
        self._guard.check()
        self.used = int.from_bytes(self._fired)
        self._begin_round()

    def finish(self, control: Control) -> tuple[list[Control], Grads]:
        """Complete the sums, see `Exchange.finish`.

        Raises:
            UsageError: the ranks have used other units, or in another order.
        """
        controls, sums = self._exchange.finish(replace(control, order=hash_short(repr(self._order).encode())))
        orders = [each.order for each in controls]
        other = next((rank for rank, order in enumerate(orders) if order != orders[0]), None)
        if other is not None:
            raise UsageError(
                f"rank {other} has used other parts of the model than rank 0, or in another order, so that gathered "
                'parameters and gradients were mixed up: with shard="fsdp2", use the same parts in every micro-batch',
                code="SS609",
            )
        for unit, numbers, each_sum in zip(self._models.units, self._numbers, self._sums, strict=True):
            if (total := each_sum.total) is not None:
                for i, own in zip(numbers, unit.split(total.to(unit.dtype)), strict=True):
                    if i is not None:
                        sums[i] = own
        return controls, sums
