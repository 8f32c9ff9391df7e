"""A checksum of a row of a step's gradient for the ledger: the same at every number of ranks.

Each step reads one row of the gradient of one parameter, and the next step another one. If two runs differ anywhere,
the weights differ after the step, and with them almost every word of the next step's gradient: so the ledger differs at
this step or soon after. A pass over the whole gradient costs one to two percent of a step (docs/dev/ledger.md), because
most of it is not in the caches after a backward pass.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samestep.engine.control import copy_to_host
from samestep.torch_internals import find_first_row, get_local, is_sharded

ROW_ELEMENTS = 1024  # of a longer row, only so many are read
_compute_crc: Callable[[Any], int] = zlib.crc32  # noqa: TID251 as BLAKE2b takes four times as long
_FACTOR = 0x9E3779B97F4A7C15  # 2**64 by the golden ratio: its multiples spread evenly (Knuth, vol. 3, 6.4)


def compute_checksum(grads: Sequence[Tensor | None], step: int) -> Callable[[], int]:
    """Read the row of a step, on a GPU later than the call. Call it before the gradients change.

    Args:
        grads: per parameter; None for an absent one, or one that another rank has.

    Returns:
        A function that returns the CRC-32 of the row; 0 if this rank does not have it. It waits for a GPU.
    """
    grad = grads[step % len(grads)] if grads else None
    if grad is None:
        return int
    whole = grad if grad.ndim else grad.view(1)
    row = (step * _FACTOR % 2**64) * whole.shape[0] >> 64
    if is_sharded(whole):
        row -= find_first_row(whole)
        whole = get_local(whole)
    if not 0 <= row < whole.shape[0]:
        return int
    values = whole[row : row + 1]
    if values.numel() > ROW_ELEMENTS:
        values = values.flatten()[:ROW_ELEMENTS]
    data = values.contiguous().view(torch.uint8)
    if data.is_cpu:
        return partial(int, _compute_crc(data.numpy()))
    wait = copy_to_host(data)
    return lambda: _compute_crc(wait().numpy())
