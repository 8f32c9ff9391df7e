"""A checksum of a step's gradient for the ledger: the same number at every number of ranks, in one pass over memory.

The gradient is seen as 64-bit words in rows of `NUM_COLUMNS`. The columns are added up modulo 2**64 at the speed of
memory, and each column's sum then counts with a weight of its own. One word that differs always changes the checksum.
Differences that cancel each other do not change it only if they are in the same column: of two words that differ by
opposite amounts, about one pair in a thousand. A plain sum would miss all of these, and a cryptographic hash is ten
times slower.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

NUM_COLUMNS = 1024
LEAST_BYTES = 1 << 16  # smaller gradients are copied into one tensor: an operation on each would cost more
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd; the golden ratio as in Knuth, "The Art of Computer Programming", 6.4


class GradientChecksum:
    """Computes checksums of the gradients of one run's parameters. Never waits for a GPU."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, Tensor] = {}

    def compute(self, grads: Iterable[Tensor | None]) -> Tensor:
        """Return the checksum of gradients in order: an int64 scalar on the device of the first; 0 for none."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for grad in grads:
            if grad is not None:
                kinds.setdefault((grad.dtype, grad.device), []).append(grad)
        total = torch.zeros((), dtype=torch.int64)
        for number, group in enumerate(kinds.values()):
            part = self._compute(group)
            total = part if not number else total * _FACTOR + part.to(total.device, non_blocking=True)
        return total

    def _compute(self, grads: list[Tensor]) -> Tensor:
        """Return the checksum of gradients of one dtype and device."""
        if grads[0].is_complex():
            grads = [torch.view_as_real(grad.resolve_conj()) for grad in grads]
        columns: Tensor | None = None
        small = []
        for grad in grads:
            flat = grad.reshape(-1)
            if flat.nbytes >= LEAST_BYTES:
                num_whole = flat.nbytes // 8 * 8 // flat.element_size()
                columns = _add(columns, flat[:num_whole])
                flat = flat[num_whole:]
            small.append(flat)
        flat = torch.cat(small)
        if missing := -flat.nbytes % 8:
            flat = torch.cat([flat, flat.new_zeros(missing // flat.element_size())])
        columns = _add(columns, flat)
        columns = columns ^ (columns >> 32)  # the highest bit of a word would otherwise count without its weight
        return columns.mul_(self._get_weights(columns.device)[: len(columns)]).sum()

    def _get_weights(self, device: torch.device) -> Tensor:
        if device not in self._weights:
            powers = [1]
            for _ in range(NUM_COLUMNS - 1):
                powers.append((powers[-1] * _FACTOR + 2) % 2**64)  # odd, so that no bit of a word is lost
            signed = [power - 2**64 * (power >> 63) for power in powers]
            self._weights[device] = torch.tensor(signed, device=device)
        return self._weights[device]


def _add(columns: Tensor | None, flat: Tensor) -> Tensor:
    """Return the sums of the columns with those of another tensor, whose place counts. May return its memory."""
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    words = flat.view(torch.int64)
    num_rows = len(words) // NUM_COLUMNS
    if columns is None and not num_rows:
        return words
    sums = words[: num_rows * NUM_COLUMNS].view(num_rows, NUM_COLUMNS).sum(0)
    if rest := len(words) - num_rows * NUM_COLUMNS:
        sums[:rest] += words[num_rows * NUM_COLUMNS :]
    return sums if columns is None else sums.add_(columns, alpha=_FACTOR)
