"""Sums the gradients of sharded parameters over a step's micro-batches on all ranks, along the canonical tree.

The ranks work in rounds: round j brings the gradients of the micro-batches from j * world_size on, one of each rank,
which are folded at once. So a rank keeps at most log2(micro-batches) + 1 sums of the size of its chunk.

A reduce-scatter of the backend adds the ranks' gradients in an order that depends on their number. Here, each rank
gets its chunk of every rank's gradient (an all-to-all, with the bytes of a ring's reduce-scatter) and adds them itself.
If the ranks of a host hold subtrees, they add these first, so fewer bytes leave the host.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samestep.engine.control import Control
from samestep.engine.exchange import Exchange, ReductionPlan
from samestep.engine.leaf import Grads, PartialSums, drop_grads, run_backward_alone
from samestep.engine.routes import Counts, Messages, PendingOp, start_all_to_all, wait_all
from samestep.errors import UsageError
from samestep.hashing import hash_short
from samestep.plan.tree import Node, count_merges, cover


class ChunkSum:
    """The sums of a chunk of gradients, folded along the canonical tree.

    Args:
        num_micro_batches: of the step.
        first: the first micro-batch that is added.

    Attributes:
        sums: of the largest subtrees so far.
    """

    def __init__(self, num_micro_batches: int, first: int = 0) -> None:
        self.sums: list[Tensor] = []
        self._num_micro_batches = num_micro_batches
        self._first = first

    def add(self, nodes: Sequence[Node], rows: Tensor) -> None:
        """Add the chunks of the next nodes, in the first rows. Overwrites them."""
        n = self._num_micro_batches
        num_kept = len(self.sums)
        for (lo, hi), row in zip(nodes, rows[: len(nodes)], strict=True):
            total = row
            for _ in range(count_merges(n, self._first, lo, hi)):
                total = self.sums.pop().add_(total)
            self.sums.append(total)
            num_kept = min(num_kept, len(self.sums) - 1)
        # A view would keep all rows.
        self.sums[num_kept:] = [total.clone() for total in self.sums[num_kept:]]

    @property
    def total(self) -> Tensor | None:
        """The sum of all micro-batches; None if none was added."""
        return self.sums[0] if self.sums else None


class ChunkExchange:
    """Brings each rank its chunk of the gradients of a round: one micro-batch of each rank.

    With blocks of B ranks on one host, rank k of each block first adds the block's gradients of chunks k W / B to
    (k + 1) W / B - 1, as far as the tree permits, and then sends the sums to the owners of the chunks.

    Args:
        num_micro_batches: of the step.
        block_size: B; see `world.host.find_block_size`.
    """

    def __init__(self, num_micro_batches: int, rank: int, world_size: int, block_size: int) -> None:
        self._num_micro_batches = num_micro_batches
        self._rank = rank
        self._world_size = world_size
        self._block_size = block_size
        self._block = rank // block_size
        self._num_chunks = world_size // block_size
        within = [self._num_chunks if each // block_size == self._block else 0 for each in range(world_size)]
        self._within = (within, within)

    def run(self, chunks: Tensor, first: int, total: ChunkSum, process_group: Any) -> Messages:
        """Exchange a round's gradients, and add this rank's chunk of them to `total`.

        Args:
            chunks: [W, n], the gradient of this rank's micro-batch; row k belongs to rank k.
            first: the first micro-batch of the round.
        """
        last = min(first + self._world_size, self._num_micro_batches)
        starts = range(first, first + self._world_size, self._block_size)
        of_blocks = [cover(self._num_micro_batches, each, min(each + self._block_size, last)) for each in starts]
        nodes = [node for of_block in of_blocks for node in of_block]
        flat = chunks.view(-1)
        num_elements = chunks.shape[1]
        folds = len(nodes) < last - first  # else each node is a micro-batch
        rows = torch.empty_like(flat)
        yield [start_all_to_all(rows, flat, process_group, self._within if folds else None)]
        del chunks, flat
        if folds:
            folded = self._fold(rows, first)
            rows = rows.new_empty(len(nodes) * num_elements)
            counts = self._count_between([*map(len, of_blocks)])
            yield [start_all_to_all(rows, folded, process_group, counts)]
        total.add(nodes, rows.view(-1, num_elements))

    def _fold(self, rows: Tensor, first: int) -> Tensor:
        """Add the gradients of the block's micro-batches. Returns this rank's chunks of the sums, by their owners."""
        start = first + self._block * self._block_size
        held = range(start, min(start + self._block_size, self._num_micro_batches))
        folded = ChunkSum(self._num_micro_batches, start)
        folded.add([(v, v + 1) for v in held], rows.view(self._block_size, -1))
        sums = [total.view(self._num_chunks, -1) for total in folded.sums]
        return torch.stack(sums, dim=1) if sums else rows[:0]

    def _count_between(self, num_nodes: Sequence[int]) -> Counts:
        """Return how many chunks this rank receives from each rank, and sends to each, after the blocks were folded.

        Args:
            num_nodes: per block, its nodes.
        """
        ranks = range(self._world_size)
        sender = self._rank // self._num_chunks  # its number in each block
        number = self._rank % self._block_size
        received = [num_nodes[each // self._block_size] if each % self._block_size == sender else 0 for each in ranks]
        sent = [num_nodes[self._block] if each // self._num_chunks == number else 0 for each in ranks]
        return received, sent


class ShardedSum:
    """Same interface as `TreeSum`, for sharded parameters. All ranks open the same number of micro-batches.

    Args:
        exchange: of the control blocks.
    """

    def __init__(self, plan: ReductionPlan, partial_sums: PartialSums, exchange: Exchange) -> None:
        assert plan.models is not None
        self._plan = plan
        self._numbers = plan.unit_numbers
        self._models = plan.models
        self.used = 0
        self._partial_sums = partial_sums
        self._exchange = exchange
        num_micro_batches = partial_sums.layout.num_micro_batches
        rank, self._world_size = plan.group.rank, plan.group.world_size
        self._chunks = ChunkExchange(num_micro_batches, rank, self._world_size, self._models.block_size)
        self._sums = [ChunkSum(num_micro_batches) for _ in self._models.units]
        self._order: list[int] = []  # of the units, in all backward passes
        self._under_way: list[PendingOp] = []  # exchanges of chunks
        self._models.free_gathered()
        self._fired = bytearray(len(plan.params))  # 1: the parameter has got a gradient
        self._first = -self._world_size  # micro-batch of the round
        self._begin_round()

    def _begin_round(self) -> None:
        self._first += self._world_size
        self._is_called = False  # step.backward was called
        # Units whose gradients are not on their way yet, and those whose gradients are.
        is_trained = [param.requires_grad for param in self._plan.params]
        self._missing = {
            k for k, numbers in enumerate(self._numbers) if any(i is not None and is_trained[i] for i in numbers)
        }
        self._sent = set[int]()

    def backward(self, v: int, loss: Tensor, factor: float | Tensor | None, wanted: set[int] | None) -> float:
        """Run the backward pass, also of a loss that does not count: all ranks take part in the exchange.

        Args:
            factor: of the loss; None: the micro-batch does not count.
            wanted: numbers of the parameters that get gradients; None: all.
        """
        self._is_called = True
        if wanted is not None:
            self._missing = {k for k in self._missing if not wanted.isdisjoint(self._numbers[k])}
        reduce = partial(self._reduce, factor is not None and v in self._partial_sums.held)
        self._models.direct(reduce)
        try:
            run_backward_alone(self._plan.params, loss, 1.0 if factor is None else factor)
        finally:
            self._models.direct(None)
        for k, unit in enumerate(self._models.units):
            if unit.has_grads:  # the end of its backward pass was not found, such as without differentiable inputs
                reduce(k)
        return 0.0

    def _reduce(self, counts: bool, k: int) -> None:
        """Begin to exchange the gradients of a unit, and advance the exchanges of units before.

        Args:
            counts: whether the gradients are added to the sums.
        """
        unit = self._models.units[k]
        grads = unit.take_grads()
        if k in self._sent:
            raise UsageError(
                f'{unit.name} ran twice in one micro-batch, which shard="fsdp2" does not support: leave it out of '
                "shard_blocks",
                code="SS609",
            )
        if k in self._missing:
            self._send(k, grads if counts else [None] * len(grads))

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
            op = PendingOp(self._chunks.run(chunks, self._first, self._sums[k], self._models.process_group))
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
        self._plan.guard.check()
        self.used = int.from_bytes(self._fired)
        self._begin_round()

    def finish(self, control: Control) -> tuple[list[Control], Grads]:
        """Complete the sums, see `Exchange.finish`.

        Raises:
            UsageError: the ranks have used other units, or in another order.
        """
        controls, sums = self._exchange.finish(control._replace(order=hash_short(repr(self._order).encode())))
        orders = [each.order for each in controls]
        other = next((rank for rank, order in enumerate(orders) if order != orders[0]), None)
        if other is not None:
            raise UsageError(
                f"rank {other} has used other parts of the model than rank 0, or in another order, so that gathered "
                'parameters and gradients were mixed up: with shard="fsdp2", use the same parts in every micro-batch',
                code="SS609",
            )
        for unit, numbers, folded in zip(self._models.units, self._numbers, self._sums, strict=True):
            if (total := folded.total) is not None:
                for i, own in zip(numbers, unit.split(total.to(unit.dtype)), strict=True):
                    if i is not None:
                        sums[i] = own
        return controls, sums
