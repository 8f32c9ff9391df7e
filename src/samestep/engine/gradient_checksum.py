"""A checksum of pieces of a step's gradient for the ledger: the same at every number of ranks.

Each step reads different pieces of a few kilobytes, spread over all parameters; gradients of up to 16 KiB are read
whole. If two runs differ anywhere, the weights differ after the step, and with them almost every word of the next
step's gradient: the difference is in the ledger at its own step, or at the next one. A pass over the whole gradient
costs one to two percent of a step (docs/dev/ledger.md), because most of it is not in the caches after a backward
pass. The checksum is CRC-32, which the ledger's format has and which takes a quarter of the time of BLAKE2b.
"""

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from samestep.engine.host_copies import copy_to_host
from samestep.torch_internals import find_first_row, get_local, is_sharded

NUM_PIECES = 4
PIECE_BYTES = 4096
_FACTOR = 0x9E3779B97F4A7C15  # 2**64 by the golden ratio: its multiples spread evenly (Knuth, vol. 3, 6.4)


class GradientChecksum:
    """Computes checksums of the gradients of some parameters. One that is absent counts as zeros.

    Args:
        params: the parameters.

    Attributes:
        is_late: whether reading a checksum may wait for a GPU.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.is_late = any(param.is_cuda for param in params)
        self._are_sharded = [*map(is_sharded, params)]
        self._ends = [*accumulate(param.nbytes for param in params)]
        # Windows are widened to whole elements. NumPy does not have all types, so others are read as bytes.
        self._widths = [4 if param.dtype is torch.float32 else 1 for param in params]

    def compute(self, grads: Sequence[Tensor | None], step: int) -> Callable[[], int]:
        """Read the pieces of a step. Call it before the gradients change.

        Returns:
            A function that returns the checksum (CRC-32).
        """
        pieces = self._read(grads, step)
        if self.is_late:
            wait = copy_to_host(pieces)
            return lambda: _sum_up(wait())
        checksum = _sum_up(pieces)
        return lambda: checksum

    def combine(self, checksums: Sequence[int], step: int) -> int:
        """Return the checksum of gradients that are divided among ranks, from those of the ranks' parts.

        CRC-32 is affine: that of the XOR of an odd number of messages of one length is the XOR of theirs. An even
        number gets a message of zeros in addition.
        """
        total = 0
        for each in checksums:
            total ^= each
        if len(checksums) % 2 == 0:
            total ^= _sum_up(self._read([None] * len(self._ends), step))
        return total

    def _read(self, grads: Sequence[Tensor | None], step: int) -> list[Tensor]:
        """Return the pieces of a step, flat and in memory order. Gradients are dense."""
        ends = self._ends
        pieces: list[Tensor] = []
        for start, stop in choose_windows(ends[-1] if ends else 0, step):
            i = bisect_right(ends, start)
            while start < stop:
                grad = grads[i]
                width = self._widths[i]
                begin = ends[i - 1] if i else 0
                first = (start - begin) // width
                last = -(-(min(stop, ends[i]) - begin) // width)
                if grad is None:
                    pieces.append(torch.zeros((last - first) * width, dtype=torch.uint8))
                elif self._are_sharded[i]:
                    pieces.append(_read_sharded(grad, first * width, last * width))
                else:
                    flat = grad.view(-1) if grad.is_contiguous() else grad.as_strided((grad.numel(),), (1,))
                    pieces.append((flat if width == 4 else flat.view(torch.uint8))[first:last])
                start = ends[i]
                i = i + 1
        return pieces


def _read_sharded(grad: Tensor, start: int, stop: int) -> Tensor:
    """Return the bytes from `start` to `stop` of a gradient; zeros for those that other ranks hold."""
    local = get_local(grad).contiguous().view(-1).view(torch.uint8)
    begin = find_first_row(grad) * (grad.nbytes // len(grad) if len(grad) else 0)
    piece = torch.zeros(stop - start, dtype=torch.uint8, device=local.device)
    first = max(start, begin)
    last = min(stop, begin + local.numel())
    if first < last:
        piece[first - start : last - start] = local[first - begin : last - begin]
    return piece


class PartialChecksums:
    """The checksums of gradients that are divided among ranks. The exchange after each pass combines them."""

    def __init__(self) -> None:
        self._own: Callable[[], int] | None = None  # of the last pass, unless it is combined
        self._finish: Callable[[Sequence[int]], None] = lambda _: None

    def add(self, checksum: GradientChecksum, own: Callable[[], int], step: int) -> Callable[[], int | None]:
        """Note this rank's checksum of a pass.

        Returns:
            A function that returns the combined one; None before `resolve`.
        """
        combined: list[int] = []

        def finish(values: Sequence[int]) -> None:
            combined.append(checksum.combine(values, step))

        self._own = own
        self._finish = finish
        return lambda: combined[0] if combined else None

    def take_own(self) -> int:
        """Return this rank's checksum of the last pass, for an exchange of all ranks; 0 if it is combined."""
        return 0 if self._own is None else self._own()

    def resolve(self, values: Sequence[int]) -> None:
        """Combine the checksums of the last pass. `values`: the results of `take_own` on all ranks."""
        if self._own is not None:
            self._own = None
            self._finish(values)


def choose_windows(num_bytes: int, step: int) -> list[tuple[int, int]]:
    """Return the ranges of bytes that are read in a step."""
    if num_bytes <= NUM_PIECES * PIECE_BYTES:
        return [(0, num_bytes)]
    distance = num_bytes // NUM_PIECES
    first = (step * _FACTOR % 2**64) * distance >> 64
    return [(first + k * distance, min(first + k * distance + PIECE_BYTES, num_bytes)) for k in range(NUM_PIECES)]


def _sum_up(pieces: Iterable[Tensor]) -> int:
    total = 0
    for piece in pieces:
        total = zlib.crc32(piece.numpy(), total)  # type: ignore[arg-type]  # noqa: TID251 as the ledger has it
    return total
