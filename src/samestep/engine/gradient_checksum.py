"""A checksum of pieces of a step's gradient for the ledger: the same at every number of ranks.

Each step reads different pieces of a few kilobytes, spread over all parameters; gradients of up to 16 KiB are read
whole. If two runs differ anywhere, the weights differ after the step, and with them almost every word of the next
step's gradient: the difference is in the ledger at its own step, or at the next one. A pass over the whole gradient
costs one to two percent of a step (docs/decisions/ledger.md), because most of it is not in the caches after a backward
pass. The checksum is CRC-32, which the ledger's format has and which takes a quarter of the time of BLAKE2b.
"""

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

NUM_PIECES = 4
PIECE_BYTES = 4096
_FACTOR = 0x9E3779B97F4A7C15  # 2**64 by the golden ratio: its multiples spread evenly (Knuth, vol. 3, 6.4)


class GradientChecksum:
    """Computes checksums of the gradients of some parameters."""

    def __init__(self) -> None:
        self._ends: dict[tuple[bool, ...], list[int]] = {}

    def compute(self, grads: Sequence[Tensor | None], step: int) -> tuple[Callable[[], int], bool]:
        """Read the pieces of a step. Call it before the gradients change, always for the same parameters.

        Returns:
            A function that returns the checksum (CRC-32), and whether it may wait for a GPU.
        """
        found = [grad for grad in grads if grad is not None]
        key = tuple([grad is None for grad in grads])
        if key not in self._ends:
            self._ends[key] = [*accumulate(grad.nbytes for grad in found)]
        pieces = _read(found, self._ends[key], step)
        if not any(grad.is_cuda for grad in found):
            checksum = _sum_up(pieces)
            return lambda: checksum, False
        wait = _copy(pieces)
        return lambda: _sum_up(wait()), True


def find_zero(grads: Sequence[Tensor | None]) -> Callable[[], bool]:
    """Read the beginning of each gradient. Returns a function that returns whether all are 0, which may wait for a GPU.

    Call it before the gradients change.
    """
    pieces = [grad.detach().flatten()[:PIECE_BYTES] for grad in grads if grad is not None]
    if not any(piece.is_cuda for piece in pieces):
        is_zero = not any(bool(piece.any()) for piece in pieces)
        return lambda: is_zero
    wait = _copy(pieces)
    return lambda: not any(bool(piece.any()) for piece in wait())


def _copy(pieces: Iterable[Tensor]) -> Callable[[], list[Tensor]]:
    """Begin to copy pieces to the host. Returns a function that waits for the copies."""
    copies: list[Tensor] = []
    events: list[Any] = []
    for piece in pieces:
        copies.append(piece.to("cpu", non_blocking=True))
        if piece.is_cuda:
            events.append(event := torch.cuda.Event())  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(piece.device))

    def wait() -> list[Tensor]:
        for event in events:
            event.synchronize()
        return copies

    return wait


def choose_windows(num_bytes: int, step: int) -> list[tuple[int, int]]:
    """Return the ranges of bytes that are read in a step."""
    if num_bytes <= NUM_PIECES * PIECE_BYTES:
        return [(0, num_bytes)]
    distance = num_bytes // NUM_PIECES
    first = (step * _FACTOR % 2**64) * distance >> 64
    return [(first + k * distance, min(first + k * distance + PIECE_BYTES, num_bytes)) for k in range(NUM_PIECES)]


def _read(grads: Sequence[Tensor], ends: Sequence[int], step: int) -> Iterator[Tensor]:
    """Yield pieces of dense gradients, flat and in memory order. `ends`: of the gradients, in bytes."""
    for start, stop in choose_windows(ends[-1] if ends else 0, step):
        i = bisect_right(ends, start)
        while start < stop:
            grad = grads[i]
            offset = ends[i] - grads[i].nbytes
            flat = grad.view(-1) if grad.is_contiguous() else grad.as_strided((grad.numel(),), (1,))
            if flat.dtype is not torch.float32:
                flat = flat.view(torch.uint8)  # NumPy does not have all types
            size = flat.element_size()
            yield flat[(start - offset) // size : -(-(min(stop, ends[i]) - offset) // size)]
            start = ends[i]
            i = i + 1


def _sum_up(pieces: Iterable[Tensor]) -> int:
    total = 0
    for piece in pieces:
        total = zlib.crc32(piece.numpy(), total)  # type: ignore[arg-type]  # noqa: TID251 as the ledger has it
    return total
