"""A checksum of a few rows of a step's gradient for the ledger: the same at every number of ranks.

Each step reads one row of each of a few parameters, and the next step others. If two runs differ anywhere, the weights
differ after the step, and with them almost every word of the next step's gradient: so the ledger differs at this step
or soon after. A pass over the whole gradient costs one to two percent of a step (docs/dev/ledger.md), because most of
it is not in the caches after a backward pass.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samestep.engine.control import copy_to_host
from samestep.torch_internals import find_first_row, get_local, is_sharded

NUM_ROWS = 2
ROW_ELEMENTS = 1024  # of a longer row, only so many are read
_FACTOR = 0x9E3779B97F4A7C15  # 2**64 by the golden ratio: its multiples spread evenly (Knuth, vol. 3, 6.4)


def compute_checksum(grads: Sequence[Tensor | None], step: int) -> Callable[[], int]:
    """Read the rows of a step. Call it before the gradients change.

    Each row is on one rank. So the checksum of gradients that are divided among ranks is the sum of theirs.

    Args:
        grads: per parameter; None for an absent one, or one that another rank has.

    Returns:
        A function that returns the checksum (CRC-32). It waits for a GPU.
    """
    rows: list[Tensor] = []
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
            rows.append(whole.select(0, row).reshape(-1)[:ROW_ELEMENTS].clone().view(torch.uint8))
    return partial(_sum_up, copy_to_host(rows))


def add_checksums(checksums: Sequence[int]) -> int:
    """Return the checksum of several rows, or of the rows of several ranks."""
    return sum(checksums) % 2**32


def _sum_up(wait: Callable[[], Sequence[Tensor]]) -> int:
    rows: Any = map(Tensor.numpy, wait())
    return add_checksums([*map(zlib.crc32, rows)])  # noqa: TID251 as BLAKE2b takes four times as long
