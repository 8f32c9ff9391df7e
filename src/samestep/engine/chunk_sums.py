"""Sums the chunk of a sharded gradient that this rank owns, along the canonical tree.

A reduce-scatter of the backend adds the ranks' gradients in an order that depends on their number. Here, each rank
gets its chunk of every rank's gradient (an all-to-all, with the bytes of a ring's reduce-scatter) and adds them itself.
If the ranks of a host hold subtrees, they add these first, so fewer bytes leave the host.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.engine.routes import Counts, Messages, start_all_to_all
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
            num_within = count_merges(n, lo, hi - 1)
            for _ in range(count_merges(n, self._first, hi - 1) - num_within):
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
