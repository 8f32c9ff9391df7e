"""How ranks share a step: the sizes of its batch, and the canonical tree, which defines the order of all additions.

A step's gradient is the sum of its n micro-batches' gradients along one binary tree. A node `(lo, hi)` is the
sum of micro-batches lo..hi-1; its children are `(lo, mid)` and `(mid, hi)` with `mid = split(lo, hi)`. The
tree depends on n alone. Floating-point addition commutes but does not associate, so two runs that form the
same nodes get the same bits, however the micro-batches are spread over ranks.

A rank folds its own range into parts (complete subtrees), and the parts of all ranks complete to the root. If the
parameters are sharded, the ranks work in rounds instead: in round j, rank r computes micro-batch j * world_size + r.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from numbers import Integral
from typing import TypeVar

from samestep.errors import InvalidValue

T = TypeVar("T")
Node = tuple[int, int]
Span = tuple[int, int]  # a start and a stop

MAX_MICRO_BATCHES = 1 << 20  # of a step; the plan of more would fill the memory
LEAST_SAMPLES = 64  # of a default micro-batch; fewer slow small models down (docs/dev/micro_batches.md)


def check_numbers(
    batch_size: int, micro_batch_size: int, world_size: int, advise: Callable[..., str] | None = None
) -> None:
    """Check that the numbers give a step that `world_size` ranks can share.

    Args:
        advise: formats options as the user would write them, for the message: batch_size=8 -> "--batch-size 8".

    Raises:
        InvalidValue: the numbers do not fit; the message names the nearest valid ones.
    """
    for name, value in (
        ("batch_size", batch_size),
        ("micro_batch_size", micro_batch_size),
        ("world_size", world_size),
    ):
        check_positive(name, value)
    if batch_size % micro_batch_size:
        below = batch_size - batch_size % micro_batch_size
        sizes = " or ".join(str(size) for size in (below, below + micro_batch_size) if size)
        raise InvalidValue(
            f"batch_size {batch_size} is not a multiple of micro_batch_size {micro_batch_size}: "
            f"use a batch_size of {sizes}, or a micro_batch_size that divides {batch_size}",
            code="SS108",
        )
    num_micro_batches = batch_size // micro_batch_size
    if num_micro_batches > MAX_MICRO_BATCHES:
        raise InvalidValue(
            f"batch_size {batch_size} is {num_micro_batches} micro-batches of {micro_batch_size}, more than the "
            f"{MAX_MICRO_BATCHES} of the largest step: use a smaller batch_size, or a larger micro_batch_size",
            code="SS108",
        )
    if world_size > num_micro_batches:
        ranks = "1 rank" if num_micro_batches == 1 else f"1 to {num_micro_batches} ranks"
        micro_batches = "1 micro-batch" if num_micro_batches == 1 else f"{num_micro_batches} micro-batches"
        given = find_sizes(batch_size, micro_batch_size, world_size)
        remedy = ", ".join(f"{name}={size}" for name, size in given.items())
        if advise is not None:
            remedy = f"{advise(**given)} (in the script, {remedy})"
        raise InvalidValue(
            f"{world_size} ranks cannot share a step of {micro_batches} (batch_size {batch_size}, micro_batch_size "
            f"{micro_batch_size}): start {ranks}, or give {remedy}",
            code="SS109",
        )


def find_sizes(batch_size: int, micro_batch_size: int, world_size: int) -> dict[str, int]:
    """Return arguments of a run whose step so many ranks can share: a smaller micro-batch, or else a larger batch."""
    if world_size > batch_size:
        return {"batch_size": world_size * micro_batch_size, "micro_batch_size": micro_batch_size}
    divisors = (size for size in range(batch_size // world_size, 0, -1) if batch_size % size == 0)
    return {"micro_batch_size": next(divisors)}


def default_micro_batch_size(batch_size: int) -> int:
    """Return the default of `micro_batch_size`.

    It divides `batch_size` into V micro-batches: the largest of 8, 4 and 2 that gives each at least `LEAST_SAMPLES`,
    else 1. V does not depend on the number of ranks, since the run's bits depend on V.
    """
    check_positive("batch_size", batch_size)
    fitting = (v for v in (8, 4, 2) if batch_size % v == 0 and batch_size // v >= LEAST_SAMPLES)
    return batch_size // next(fitting, 1)


def describe_division(n: int, world_size: int, ranks_each: int = 1) -> str:
    """Describe how n micro-batches are divided among the ranks: `16 micro-batches on 3 ranks, which are 89 % busy`.

    "busy" is the mean share of a step's computing time in which a rank computes, if all micro-batches take equally
    long. For one rank, the text says how many ranks the run can have later.

    Args:
        ranks_each: of a pipeline, of which there are `world_size` then.
    """
    micro_batches = f"{n} micro-batch{'es' if n != 1 else ''}"
    if ranks_each > 1:
        return f"{micro_batches} on {world_size} pipeline{'s' if world_size != 1 else ''} of {ranks_each} ranks"
    if world_size == 1:
        most = f"{n} rank{'s' if n != 1 else ''}"
        more = "for more, begin it with a larger batch_size or a smaller micro_batch_size"
        return f"{micro_batches} on 1 rank; at most {most} can share this run ({more})"
    busy = n / (world_size * -(-n // world_size))
    return f"{micro_batches} on {world_size} ranks, which are {busy * 100:.0f} % busy"


def check_positive(name: str, value: object) -> None:
    """Raise InvalidValue, with the number's name, if a value is not a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise InvalidValue(f"{name} must be a whole number above 0, found {value!r}", code="SS101")


def split(lo: int, hi: int, rank: int = 1, world_size: int = 2) -> int:
    """Return where the share of a rank begins if `world_size` ranks share micro-batches lo..hi-1.

    Shares are contiguous and in rank order, so a share ends where that of the next rank begins: `rank` may be
    `world_size`. The default is the first micro-batch of the right child of node (lo, hi), with `hi - lo >= 2`. It is
    the middle, not the largest power of two: the subtrees of one depth then differ by at most one micro-batch, so the
    shares of 2, 4, 8 ... ranks can be single nodes for every n.

    While the number of ranks is even, half of them take the left subtree and half the right one. An odd number of ranks
    divides its subtree evenly. So with a power of two of ranks, each gets one complete subtree for every n >=
    world_size, and rank 0 always has work. Shares differ by at most 1, because halving rounds in the same way as
    dividing: ceil(ceil(n / 2) / w) = ceil(n / 2w), and likewise for floor.
    """
    while world_size % 2 == 0:
        world_size //= 2
        mid = (lo + hi + 1) // 2
        if rank < world_size:
            hi = mid
        else:
            lo = mid
            rank = rank - world_size
    # Rounded up, so that the longer shares come first, as in the tree.
    return lo - (lo - hi) * rank // world_size


@lru_cache(maxsize=4096)
def count_merges(n: int, first: int, lo: int, hi: int) -> int:
    """Return how many sums become one with that of the next node, (lo, hi), if the sums begin at micro-batch `first`.

    They are the newest ones. The sums are always those of the largest complete subtrees so far.
    """
    return len(cover(n, first, lo)) + 1 - len(cover(n, first, hi))


@lru_cache(maxsize=128)
def list_merges(n: int, held: range) -> tuple[int, ...]:
    """Return for each micro-batch of a rank how many of its parts are complete with it, and become one with it.

    Args:
        held: a range of a `Layout`. In rounds, no parts become one.
    """
    return tuple(count_merges(n, held.start, v, v + 1) if held.step == 1 else 0 for v in held)


@dataclass(frozen=True)
class Layout:
    """The parts that each rank holds after its last micro-batch of a step, and the additions that form the root.

    Attributes:
        num_micro_batches: n, the number of micro-batches of this step.
        world_size: the number of ranks; above n, some ranks are idle (an empty range, no parts).
        ranges: per rank, its micro-batches. In rounds, they are not contiguous.
        leaf_size: the number of consecutive micro-batches that are one leaf of the tree; 1 unless they are a worker's.
        leaves: per rank, its leaves of the tree. Its parts, the additions and so on are those of leaves.
        in_rounds: whether the ranks work in rounds, in each of which all of them compute a micro-batch.
        fillers: per rank, the micro-batch that it computes in a last round without one of its own; its results are
            dropped. Contiguous ranges have none.
        parts: per rank, the smallest set of complete subtrees that covers its range, left to right.
        max_parts: the largest number of parts of a rank. Part k of rank r is in slot `r * max_parts + k`.
        additions: `(dst, src)` pairs, executed in this order: `slot[dst] += slot[src]`.
        root: the slot that then holds the whole sum.
        butterfly: the additions are those of recursive doubling: rank r exchanges with r ^ 1, then r ^ 2, then r ^ 4
            and so on. So it is if the number of ranks is a power of two, and each has exactly one part, see `split`.
    """

    num_micro_batches: int
    world_size: int
    ranges: tuple[range, ...]
    leaf_size: int
    leaves: tuple[range, ...]
    in_rounds: bool
    fillers: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[Node, ...], ...]
    max_parts: int
    additions: tuple[tuple[int, int], ...]
    root: int
    butterfly: bool

    def sort(self, values: Iterable[Sequence[T]]) -> list[T]:
        """Return values of micro-batches in their order. `values`: per rank, those of its micro-batches."""
        if not self.in_rounds:
            return [*chain.from_iterable(values)]
        of_ranks = [*values]
        return [of_ranks[v % self.world_size][v // self.world_size] for v in range(self.num_micro_batches)]


@lru_cache(maxsize=128)
def build_layout(n: int, world_size: int, in_rounds: bool = False, leaf_size: int = 1) -> Layout:
    """Return the layout of a step of n micro-batches on `world_size` ranks (n, world_size >= 1).

    Args:
        in_rounds: see `Layout`.
        leaf_size: see `Layout`. It divides n, and is 1 in rounds.
    """
    if leaf_size > 1:
        of_leaves = build_layout(n // leaf_size, world_size)
        ranges = tuple(range(held.start * leaf_size, held.stop * leaf_size) for held in of_leaves.leaves)
        return replace(of_leaves, num_micro_batches=n, ranges=ranges, leaf_size=leaf_size)
    in_rounds = in_rounds and world_size > 1
    if in_rounds:
        ranges = tuple(range(rank, n, world_size) for rank in range(world_size))
        parts: tuple[tuple[Node, ...], ...] = tuple(tuple((v, v + 1) for v in held) for held in ranges)
    else:
        starts = [split(0, n, rank, world_size) for rank in range(world_size + 1)]
        ranges = tuple(map(range, starts, starts[1:]))
        parts = tuple(cover(n, held.start, held.stop) for held in ranges)
    fillers = tuple((n - 1,) if in_rounds and len(held) < len(ranges[0]) else () for held in ranges)
    max_parts = max(len(held) for held in parts)
    slots = {node: rank * max_parts + k for rank, held in enumerate(parts) for k, node in enumerate(held)}
    additions: list[tuple[int, int]] = []
    root = _complete(0, n, slots, additions)
    butterfly = world_size & (world_size - 1) == 0 and n >= world_size and not in_rounds
    return Layout(
        n, world_size, ranges, 1, ranges, in_rounds, fillers, parts, max_parts, tuple(additions), root, butterfly
    )


@lru_cache(maxsize=128)
def repeat_ranks(layout: Layout, times: int) -> Layout:
    """Return a layout in which each rank of `layout` is `times` ranks with its micro-batches, and none has a part."""
    if times == 1:
        return layout
    ranges = tuple(held for held in layout.ranges for _ in range(times))
    none = ((),) * len(ranges)
    return replace(
        layout, world_size=len(ranges), ranges=ranges, fillers=none, parts=none, max_parts=1, additions=(), root=0
    )


@lru_cache(maxsize=4096)
def cover(n: int, start: int, stop: int, first: int = 0) -> tuple[Node, ...]:
    """Return the largest nodes of the tree over n micro-batches within start..stop-1, left to right.

    Args:
        first: look in the subtree (first, n) only.

    Example::

        >>> cover(8, 2, 7), cover(6, 2, 4)
        (((2, 4), (4, 6), (6, 7)), ((2, 3), (3, 4)))
    """
    if start <= first and n <= stop:
        return ((first, n),)
    if start >= n or stop <= first or start == stop:
        return ()
    mid = split(first, n)
    return cover(mid, start, stop, first) + cover(n, start, stop, mid)


def _complete(lo: int, hi: int, slots: dict[Node, int], additions: list[tuple[int, int]]) -> int:
    """Append the additions that form node (lo, hi) from the parts in `slots`. Returns its slot."""
    slot = slots.get((lo, hi))
    if slot is not None:
        return slot
    mid = split(lo, hi)
    dst = _complete(lo, mid, slots, additions)
    additions.append((dst, _complete(mid, hi, slots, additions)))
    return dst
