"""All that is random in a run: seeds, and the order of the samples in an epoch, with as little memory as possible.

Seeds are derived from `(seed, purpose, step, pass, micro-batch)`, never from the rank. The micro-batch is the unit of
randomness: every rank that computes it seeds its generators equally.

An order is a function of the data set's length, the run's seed and the epoch, never of the ranks. Any range of
positions can be read at any time, so resuming in the middle of an epoch costs nothing.
"""

import hashlib  # noqa: TID251 a step derives several seeds, and each call counts
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import cycle
from math import isqrt
from struct import Struct
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from samestep.errors import InvalidValue

Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]

MAX_SORTED_LENGTH = 65_536
WINDOW_SHARDS = 4  # shards whose samples are mixed
MAX_SORTED_WINDOW = 2048  # samples of a window: a start in mid-epoch has to shuffle a whole one
_BLOCK = 2048
_NUM_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


PURPOSES = ("init", "order", "epoch", "step", "data", "compute", "after", "evaluate")

# Copied for each seed, in half the time of a new one.
_HASHES = {purpose: hashlib.blake2b(digest_size=8, person=purpose.encode()) for purpose in PURPOSES}
_pack = Struct("<QQQQ").pack
_MASK_64 = 2**64 - 1


def derive(seed: int, purpose: str, *, step: int = 0, pass_: int = 0, micro_batch: int = 0, stage: int = 0) -> int:
    """Return a seed in 0..2**63-1 for one purpose at one point of a run. Takes about 1 us.

    BLAKE2b over the packed fields (Aumasson et al. 2013, "BLAKE2: simpler, smaller, fast as MD5"), with the
    purpose as its personalization: neighbouring steps and purposes share no structure, and the value is the
    same on every machine. The run's seed is taken modulo 2**64.

    torch's CPU generator uses only the low 32 bits of a seed, so the probability that two of 65,536 micro-batches share
    their random numbers there is 0.4.

    Args:
        purpose: one of `PURPOSES`.
        stage: of a pipeline.
    """
    fields = _pack(seed & _MASK_64, step, pass_, micro_batch | stage << 32)
    blake = _HASHES[purpose].copy()
    blake.update(fields)
    return int.from_bytes(blake.digest(), "little") >> 1


class Order(Protocol):
    """The samples of one epoch in the order in which a run uses them: an array, a range, or what computes slices."""

    def __len__(self) -> int:
        """Return the number of positions."""

    def __getitem__(self, span: slice, /) -> Any:
        """Return the sample indices at positions start..stop-1, 0 <= start < stop <= len. Do not write to them."""


def build_order(
    length: int, *, seed: int, epoch: int, shuffle: bool = True, shard_sizes: Sequence[int] | Indices = ()
) -> Order:
    """Build the order of one epoch over samples 0..length-1, each exactly once.

    Up to `MAX_SORTED_LENGTH` samples it is a stable argsort of hashes, above that a `FeistelOrder`. With more than
    `WINDOW_SHARDS` shards it is a `ShardedOrder`. The same arguments give the same order on every machine and in every
    later version.

    Args:
        shard_sizes: the samples of each shard, if the data set is stored in shards. They add up to `length`.
    """
    if not shuffle:
        return range(length)
    if np.count_nonzero(shard_sizes) > WINDOW_SHARDS:
        return ShardedOrder(shard_sizes, seed, epoch)
    return _shuffle(length, derive(seed, "order", step=epoch))


def _shuffle(length: int, key: int, most_sorted: int = MAX_SORTED_LENGTH) -> Order:
    return sort_hashes(length, key) if length <= most_sorted else FeistelOrder(length, key)


def check_order(indices: Iterable[int], num_samples: int, epoch: int) -> Indices:
    """Return the indices of a sampler for an epoch, as a new array. Samples may be repeated or omitted.

    Raises:
        InvalidValue: `indices` are not one-dimensional integers in 0..num_samples-1, or are empty.
    """
    is_lazy = isinstance(indices, Iterable) and not isinstance(indices, Sequence) and not hasattr(indices, "__array__")
    try:
        found = np.array([*indices] if is_lazy else indices)
    except ValueError:  # a ragged list
        found = np.empty(0)
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
        raise InvalidValue(
            f"sampler({epoch}) gave something else than indices: return a list of at least one whole number from 0 to "
            f"{num_samples - 1}",
            code="SS307",
        )
    wrong = np.flatnonzero((found < 0) | (found >= num_samples))
    if wrong.size:
        at = int(wrong[0])
        raise InvalidValue(
            f"sampler({epoch}) gave index {found[at]} at position {at}: the data set's samples are 0 to "
            f"{num_samples - 1}",
            code="SS307",
        )
    return found.astype(np.int64)


def sort_hashes(length: int, key: int) -> Indices:
    """Return a shuffle by a stable argsort of 64-bit hashes: unbiased at any length, but it stores all indices.

    The hash of sample i is output i of SplitMix64 seeded with `key`.
    """
    return np.argsort(_draw_hashes(key, length), kind="stable")


class ShardedOrder:
    """A shuffle of the shards, and of the samples within each window of `WINDOW_SHARDS` consecutive shards.

    All samples of a window are used before those of the next window, so a reader needs `WINDOW_SHARDS` shards at a
    time. Memory and start-up time depend on the number of shards, not on the number of samples.
    """

    def __init__(self, sizes: Sequence[int] | Indices, seed: int, epoch: int) -> None:
        of_shard = np.asarray(sizes, dtype=np.int64)
        shards = sort_hashes(len(of_shard), derive(seed, "order", step=epoch))
        shards = shards[of_shard[shards] > 0]
        self._seed = seed
        self._epoch = epoch
        self._sizes = of_shard[shards]
        self._firsts = (np.cumsum(of_shard) - of_shard)[shards]
        windows = np.add.reduceat(self._sizes, np.arange(0, len(shards), WINDOW_SHARDS))
        self._stops = np.cumsum(windows)  # position after each window
        self._open = lru_cache(maxsize=2)(self._open_window)

    def __len__(self) -> int:
        return int(self._stops[-1])

    def __getitem__(self, span: slice) -> Indices:
        first, last = np.searchsorted(self._stops, (span.start, span.stop - 1), side="right").tolist()
        taken: list[Indices] = []
        for window in range(first, last + 1):
            order, stops, shifts = self._open(window)
            offset = int(self._stops[window]) - len(order)
            # positions in the concatenated shards of the window
            positions = order[max(span.start - offset, 0) : min(span.stop - offset, len(order))]
            taken.append(positions + shifts[np.searchsorted(stops, positions, side="right")])
        return np.concatenate(taken)

    def _open_window(self, window: int) -> tuple[Order, Indices, Indices]:
        """Return the order of a window and, for each of its shards, its end in the window, and its first sample minus
        its start in the window.
        """
        held = slice(window * WINDOW_SHARDS, (window + 1) * WINDOW_SHARDS)
        sizes = self._sizes[held]
        firsts = self._firsts[held]
        stops = np.cumsum(sizes)
        key = derive(self._seed, "order", step=self._epoch, pass_=window + 1)
        return _shuffle(int(stops[-1]), key, MAX_SORTED_WINDOW), stops, firsts - (stops - sizes)


class FeistelOrder:
    """A shuffle that is computed on demand: constant start-up time and memory at any length.

    A keyed permutation by the generalised Feistel construction of Black & Rogaway 2002, "Ciphers with
    arbitrary finite domains" (CT-RSA): a position is written as two digits of mixed radix a and b with a * b
    >= length, and each round adds a hash of one digit to the other, modulo its radix. Each round is invertible,
    so all rounds together permute the a * b values. If the result is not a sample, the permutation is applied
    again ("cycle walking"). This terminates, because the cycle returns to the position itself at the latest.
    With a = ceil(sqrt(length)) fewer than a values are not samples, so walking is rare.

    At a dozen samples or fewer such shuffles are biased, so short orders are sorted.
    """

    def __init__(self, length: int, key: int) -> None:
        self._length = length
        radix_a = isqrt(length - 1) + 1
        radix_b = -(-length // radix_a)
        self._radices = np.uint64(radix_a), np.uint64(radix_b)
        self._keys = list(_draw_hashes(key, _NUM_ROUNDS))
        # Samples are mostly read a few at a time and in order, so one block serves many slices.
        self._get_block = lru_cache(maxsize=1)(self._compute_block)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, span: slice) -> Indices:
        first = span.start - span.start % _BLOCK
        blocks = [self._get_block(at) for at in range(first, span.stop, _BLOCK)]
        taken = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return taken[span.start - first : span.stop - first]

    def _compute_block(self, start: int) -> Indices:
        stop = min(start + _BLOCK, self._length)
        values = self._apply_rounds(np.arange(start, stop, dtype=np.uint64))
        outside = np.flatnonzero(values >= self._length)
        while outside.size:
            values[outside] = self._apply_rounds(values[outside])
            outside = outside[values[outside] >= self._length]
        return values.astype(np.int64)

    def _apply_rounds(self, values: _Words) -> _Words:
        _, radix_b = self._radices
        changed, fixed = np.divmod(values, radix_b)  # digits of radix a, b
        hashes = np.empty_like(values)
        spare = np.empty_like(values)
        half = np.uint64(32)
        for key, radix in zip(self._keys, cycle(self._radices), strict=False):
            np.multiply(fixed, _GOLDEN, out=hashes)
            hashes += key
            _mix(hashes, spare)
            # The upper 32 bits, scaled to 0..radix-1: multiplying is faster than dividing for a remainder.
            hashes >>= half
            hashes *= radix
            hashes >>= half
            changed += hashes
            # Modulo the radix: where the sum is below it, the difference wraps around to a huge number.
            np.subtract(changed, radix, out=spare)
            np.minimum(changed, spare, out=changed)
            changed, fixed = fixed, changed
        changed *= radix_b  # after an even number of rounds it is the digit of radix a again
        changed += fixed
        return changed


def _draw_hashes(key: int, count: int) -> _Words:
    """Return the first outputs of SplitMix64 seeded with `key`.

    Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators" (OOPSLA).
    """
    words = np.arange(1, count + 1, dtype=np.uint64)
    words *= _GOLDEN
    words += np.uint64(key)
    _mix(words, np.empty_like(words))
    return words


def _mix(words: _Words, spare: _Words) -> None:
    """Apply SplitMix64's finalizer in place. `spare` is scratch memory of the same shape."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(words, np.uint64(shift), out=spare)
        words ^= spare
        words *= np.uint64(factor)
    np.right_shift(words, np.uint64(31), out=spare)
    words ^= spare
