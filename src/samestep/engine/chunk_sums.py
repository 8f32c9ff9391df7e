"""Sums the chunk of a sharded gradient that this rank owns, along the canonical tree.

A reduce-scatter of the backend adds the ranks' gradients in an order that depends on their number. Here, each rank
gets its chunk of every rank's gradient (an all-to-all, with the bytes of a ring's reduce-scatter) and adds them itself.
"""

from typing import Any

import torch
from torch import Tensor

from samestep.engine.routes import Messages, start_all_to_all
from samestep.plan.tree import count_merges


class ChunkSum:
    """The sums of a chunk of gradients, folded along the canonical tree.

    Attributes:
        parts: the sums of the largest subtrees so far.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self.parts: list[Tensor] = []
        self._num_micro_batches = num_micro_batches

    def add(self, first: int, rows: Tensor) -> None:
        """Add the chunks of the micro-batches from `first` on, one per row. Overwrites them."""
        num_kept = len(self.parts)
        for v, part in zip(range(first, self._num_micro_batches), rows, strict=False):
            for _ in range(count_merges(self._num_micro_batches, 0, v)):
                part = self.parts.pop().add_(part)
            self.parts.append(part)
            num_kept = min(num_kept, len(self.parts) - 1)
        # A view would keep all rows.
        self.parts[num_kept:] = [part.clone() for part in self.parts[num_kept:]]

    @property
    def total(self) -> Tensor | None:
        """The sum of all micro-batches; None if none was added."""
        return self.parts[0] if self.parts else None


def exchange_chunks(chunks: Tensor, first: int, total: ChunkSum, process_group: Any) -> Messages:
    """Bring each rank its chunk of the gradients of a round, one micro-batch of each rank, and add them to `total`.

    Args:
        chunks: of the gradient of this rank's micro-batch, a row per rank.
        first: the first micro-batch of the round.
    """
    rows = torch.empty_like(chunks)
    yield [start_all_to_all(rows, chunks, process_group)]
    del chunks
    total.add(first, rows)
