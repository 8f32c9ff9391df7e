"""The canonical tree over a step's micro-batches, which defines the order of all additions.

A step's gradient is the sum of its n micro-batches' gradients along one binary tree. A node `(lo, hi)` is the
sum of micro-batches lo..hi-1; its children are `(lo, mid)` and `(mid, hi)` with `mid = split(lo, hi)`. The
tree depends on n alone. Floating-point addition commutes but does not associate, so two runs that form the
same nodes get the same bits, however the micro-batches are spread over ranks.

A rank folds its own range into parts (complete subtrees), and the parts of all ranks complete to the root. If the
parameters are sharded, the ranks work in rounds instead: in round j, rank r computes micro-batch j * world_size + r.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TypeVar

T = TypeVar("T")
Node = tuple[int, int]


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


@dataclass(frozen=True)
class Layout:
    """The parts that each rank holds after its last micro-batch of a step, and the additions that form the root.

    Attributes:
        num_micro_batches: n, the number of micro-batches of this step.
        world_size: the number of ranks; above n, some ranks are idle (an empty range, no parts).
        ranges: per rank, its micro-batches. In rounds, they are not contiguous.
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
    in_rounds: bool
    fillers: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[Node, ...], ...]
    max_parts: int
    additions: tuple[tuple[int, int], ...]
    root: int
    butterfly: bool

    def count_merges(self, rank: int, v: int) -> int:
        """Return how many parts of a rank are complete with its micro-batch v, and become one with it."""
        return 0 if self.in_rounds else count_merges(self.num_micro_batches, self.ranges[rank].start, v, v + 1)

    def sort(self, values: Iterable[Sequence[T]]) -> list[T]:
        """Return values of micro-batches in their order. `values`: per rank, those of its micro-batches."""
        if not self.in_rounds:
            return [*chain.from_iterable(values)]
        of_ranks = [*values]
        return [of_ranks[v % self.world_size][v // self.world_size] for v in range(self.num_micro_batches)]


@lru_cache(maxsize=128)
def build_layout(n: int, world_size: int, in_rounds: bool = False) -> Layout:
    """Return the layout of a step of n micro-batches on `world_size` ranks (n, world_size >= 1).

    Args:
        in_rounds: see `Layout`.
    """
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
    return Layout(n, world_size, ranges, in_rounds, fillers, parts, max_parts, tuple(additions), root, butterfly)


@lru_cache(maxsize=4096)
def cover(n: int, start: int, stop: int) -> tuple[Node, ...]:
    """Return the largest nodes of the tree over n micro-batches within start..stop-1, left to right.

    Example::

        >>> cover(8, 2, 7), cover(6, 2, 4)
        (((2, 4), (4, 6), (6, 7)), ((2, 3), (3, 4)))
    """
    return tuple(_cover(0, n, start, stop))


def _cover(lo: int, hi: int, start: int, stop: int) -> list[Node]:
    """Return the largest nodes of the subtree (lo, hi) within start..stop-1, left to right."""
    if start <= lo and hi <= stop:
        return [(lo, hi)]
    if start >= hi or stop <= lo or start == stop:
        return []
    mid = split(lo, hi)
    return _cover(lo, mid, start, stop) + _cover(mid, hi, start, stop)


def _complete(lo: int, hi: int, slots: dict[Node, int], additions: list[tuple[int, int]]) -> int:
    """Append the additions that form node (lo, hi) from the parts in `slots`. Returns its slot."""
    slot = slots.get((lo, hi))
    if slot is not None:
        return slot
    mid = split(lo, hi)
    dst = _complete(lo, mid, slots, additions)
    additions.append((dst, _complete(mid, hi, slots, additions)))
    return dst
