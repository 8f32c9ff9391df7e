"""A checksum of a few rows of a step's gradient for the ledger: the same at every number of ranks.

Each step reads one row of each of a few parameters, and the next step others. If two runs differ anywhere, the weights
differ after the step, and with them almost every word of the next step's gradient: so the ledger differs at this step
or soon after. A pass over the whole gradient costs one to two percent of a step (docs/dev/ledger.md), because most of
it is not in the caches after a backward pass.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import attrgetter, or_
from typing import Any

import torch
from torch import Tensor

from samestep.engine.control import copy_to_host
from samestep.torch_internals import find_first_row, get_local, is_sharded

NUM_ROWS = 2
ROW_BITS = 32
ROW_ELEMENTS = 1024  # of a longer row, only so many are read
_compute_crc: Callable[[Any], int] = zlib.crc32  # noqa: TID251 as BLAKE2b takes four times as long
_is_on_gpu: Callable[[Tensor], bool] = attrgetter("is_cuda")
_FACTOR = 0x9E3779B97F4A7C15  # 2**64 by the golden ratio: its multiples spread evenly (Knuth, vol. 3, 6.4)


def compute_checksum(grads: Sequence[Tensor | None], step: int, *, is_divided: bool = False) -> Callable[[], int]:
    """Read the rows of a step, on a GPU later than the call. Call it before the gradients change.

    Args:
        grads: per parameter; None for an absent one, or one that another rank has.
        is_divided: whether other ranks have other gradients. A row that is on several ranks counts as one.

    Returns:
        A function that returns the checksum of the rows: the sum of their CRC-32. If the gradients are divided, it
        returns the checksums of this rank's rows instead, each in 32 bits, for `add_checksums`. It waits for a GPU.
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
        if is_divided and is_sharded(whole):
            row -= find_first_row(whole)
            whole = get_local(whole)
        if 0 <= row < whole.shape[0]:
            values = whole[row : row + 1]
            if values.numel() > ROW_ELEMENTS:
                values = values.flatten()[:ROW_ELEMENTS]
            rows[k] = values.contiguous().view(torch.uint8)
    wait = copy_to_host(rows.values())
    read = partial(_join, [*rows], wait) if is_divided else partial(_sum_up, wait)
    return read if any(map(_is_on_gpu, rows.values())) else partial(int, read())


def add_checksums(checksums: Sequence[int]) -> int:
    """Return the checksum of a step whose gradients are divided, from what `compute_checksum` gives on each rank.

    Ranks that have the same row have the same bits, and the others have 0 in its place.

    Example::

        >>> add_checksums([5, 7 << 32, 7 << 32]) == add_checksums([5 + (7 << 32)]) == 12
        True
    """
    joined = reduce(or_, checksums)
    return (joined + (joined >> ROW_BITS)) % (1 << ROW_BITS)


def _sum_up(wait: Callable[[], Sequence[Tensor]]) -> int:
    return sum(map(_compute_crc, map(Tensor.numpy, wait()))) % (1 << ROW_BITS)


def _join(numbers: Sequence[int], wait: Callable[[], Sequence[Tensor]]) -> int:
    checksums = map(_compute_crc, map(Tensor.numpy, wait()))
    return sum(checksum << ROW_BITS * k for k, checksum in zip(numbers, checksums, strict=True))
