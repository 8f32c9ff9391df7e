"""A checksum of a few rows of a step's gradient for the ledger: the same at every number of ranks.

Each step reads one row of each of a few parameters, and the next step others. If two runs differ anywhere, the weights
differ after the step, and with them almost every word of the next step's gradient: so the ledger differs at this step
or soon after. A pass over the whole gradient costs one to two percent of a step (docs/dev/ledger.md), because most of
it is not in the caches after a backward pass.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from samestep.engine.control import copy_to_host
from samestep.torch_internals import find_first_row, get_local, is_sharded

NUM_ROWS = 2
ROW_BITS = 32
ROW_ELEMENTS = 1024  # of a longer row, only so many are read
_FACTOR = 0x9E3779B97F4A7C15  # 2**64 by the golden ratio: its multiples spread evenly (Knuth, vol. 3, 6.4)


def compute_checksum(grads: Sequence[Tensor | None], step: int) -> Callable[[], int]:
    """Read the rows of a step. Call it before the gradients change.

    A row that is on no rank, or on several, counts as one: `add_checksums` combines the results of all ranks.

    Args:
        grads: per parameter; None for an absent one, or one that another rank has.

    Returns:
        A function that returns the checksums of the rows (CRC-32), each in 32 bits. It waits for a GPU.
    """
    rows: dict[int, Tensor] = {}
    num_params = len(grads)
    num_rows = min(NUM_ROWS, num_params)
    for k in range(num_rows):
        grad = grads[(step + k * num_params // num_rows) % num_params]
        if grad is None:
            continue
        whole = grad if grad.ndim else grad.view(1)
        row = (step * _FACTOR % 2**64) * whole.shape[0] >> 64
        if is_sharded(whole):
            row -= find_first_row(whole)
            whole = get_local(whole)
        if 0 <= row < whole.shape[0]:
            rows[k] = whole.select(0, row).reshape(-1)[:ROW_ELEMENTS].clone().view(torch.uint8)
    return partial(_join, [*rows], copy_to_host(rows.values()))


def add_checksums(checksums: Sequence[int]) -> int:
    """Return the checksum of a step, from what `compute_checksum` gives on each rank: the sum over the rows.

    Ranks that have the same row have the same bits, and the others have 0 in its place.

    Example::

        >>> add_checksums([5, 7 << 32, 7 << 32]) == add_checksums([5 + (7 << 32)]) == 12
        True
    """
    joined = reduce(or_, checksums)
    return (joined + (joined >> ROW_BITS)) % (1 << ROW_BITS)


def _join(numbers: Sequence[int], wait: Callable[[], Sequence[Tensor]]) -> int:
    rows: Any = map(Tensor.numpy, wait())
    checksums = map(zlib.crc32, rows)  # noqa: TID251 as BLAKE2b takes four times as long
    return sum(checksum << ROW_BITS * k for k, checksum in zip(numbers, checksums, strict=True))
