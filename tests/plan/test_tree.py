"""Any number of ranks computes exactly the sums that one rank computes."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import Error
from samestep.plan.tree import Layout, Node, build_layout, check_numbers, default_micro_batch_size, list_merges, split
from samestep.second_opinion import plan_checks

# A sum as written: a leaf is its micro-batch, an addition the pair of its operands, the one with the lower
# micro-batches first, as addition commutes.
Sum = int | tuple["Sum", "Sum"]


def first_leaf(x: Sum) -> int:
    return x if isinstance(x, int) else first_leaf(x[0])


def add(x: Sum, y: Sum) -> Sum:
    return (x, y) if first_leaf(x) < first_leaf(y) else (y, x)


def canonical(lo: int, hi: int) -> Sum:
    if hi - lo == 1:
        return lo
    return canonical(lo, split(lo, hi)), canonical(split(lo, hi), hi)


def fold(layout: Layout, rank: int) -> dict[Node, Sum]:
    """Fold a rank's micro-batches as the engine does. Returns its parts."""
    parts: dict[Node, Sum] = {}
    held = layout.ranges[rank]
    for v, num_merges in zip(held, list_merges(layout.num_micro_batches, held), strict=True):
        total: Sum = v
        lo = v
        for _ in range(num_merges):
            (lo, _), left = parts.popitem()
            total = add(left, total)
        parts[lo, v + 1] = total
    return parts


numbers = st.integers(1, 64).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n + 5)))


# 300 examples of up to 64 micro-batches: 2 s, and 20 s on a busy machine.
@settings(max_examples=300)
@given(numbers, st.booleans())
def test_any_world_size_forms_the_canonical_sum(numbers: tuple[int, int], in_rounds: bool) -> None:
    n, world_size = numbers
    layout = build_layout(n, world_size, in_rounds)
    slots: dict[int, Sum] = {}
    for rank in range(world_size):
        parts = fold(layout, rank)
        assert tuple(parts) == layout.parts[rank], "folding leaves the planned parts, left to right"
        for k, total in enumerate(parts.values()):
            slots[rank * layout.max_parts + k] = total
    for dst, src in layout.additions:
        slots[dst] = add(slots[dst], slots.pop(src))
    assert slots == {layout.root: canonical(0, n)}


@given(numbers, st.integers(2, 5))
def test_a_leaf_of_several_micro_batches_stays_whole(numbers: tuple[int, int], size: int) -> None:
    n, world_size = numbers
    layout, of_leaves = build_layout(n * size, world_size, leaf_size=size), build_layout(n, world_size)
    assert [*itertools.chain(*layout.ranges)] == [*range(n * size)]
    for held, leaves in zip(layout.ranges, layout.leaves, strict=True):
        assert {v // size for v in held} == {*leaves}
    assert (layout.leaves, layout.parts, layout.additions) == (of_leaves.ranges, of_leaves.parts, of_leaves.additions)


@settings(max_examples=300)
@given(numbers)
def test_in_rounds_all_ranks_compute_a_micro_batch(numbers: tuple[int, int]) -> None:
    n, world_size = numbers
    layout = build_layout(n, world_size, in_rounds=True)
    assert layout.sort(layout.ranges) == [*range(n)]
    opened = [[*held, *layout.fillers[rank]] for rank, held in enumerate(layout.ranges)]
    assert len({len(of_rank) for of_rank in opened}) == 1
    for number, of_round in enumerate(zip(*opened, strict=True)):
        own = [*range(number * world_size, min(n, (number + 1) * world_size))]
        assert [*of_round] == own + [n - 1] * (world_size - len(own))


@given(st.integers(0, 200), st.integers(1, 64), st.integers(0, 50))
def test_ranks_share_evenly(n: int, world_size: int, lo: int) -> None:
    starts = [split(lo, lo + n, rank, world_size) for rank in range(world_size + 1)]
    assert (starts[0], starts[-1]) == (lo, lo + n)
    shares = [end - start for start, end in itertools.pairwise(starts)]
    assert 0 <= max(shares) - min(shares) <= 1
    assert shares[0] == max(shares)
    if n:
        assert [held.start + lo for held in build_layout(n, world_size).ranges] == starts[:-1]


# --- which rank computes a micro-batch again, of which other rank -----------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 10**6))
def test_every_rank_is_checked_once_by_another_one(n: int, world_size: int, number: int) -> None:
    ranges = build_layout(n, world_size).ranges
    checks = plan_checks(n, world_size, number)
    owners = [rank for rank, held in enumerate(ranges) if held]
    assert [check.owner for check in checks] == (owners if world_size > 1 else [])
    for check in checks:
        assert check.v in ranges[check.owner]
        assert len({check.owner, check.checker, check.judge}) == 3
        assert (check.judge is None) == (world_size == 2)
    checkers = [check.checker for check in checks]
    assert len({*checkers}) == len(checkers), "a rank computes one more micro-batch at most"


@given(st.integers(1, 24), st.integers(2, 8), st.integers(0, 1000))
def test_all_pairs_meet_and_all_micro_batches_have_their_turn(n: int, world_size: int, start: int) -> None:
    ranges = build_layout(n, world_size).ranges
    plans = [plan_checks(n, world_size, start + k) for k in range(world_size - 1)]
    pairs = {(check.owner, check.checker) for checks in plans for check in checks}
    assert len(pairs) == sum(map(bool, ranges)) * (world_size - 1)
    most = max(len(held) for held in ranges) * (world_size - 1)
    assert {check.v for k in range(most) for check in plan_checks(n, world_size, start + k)} == {*range(n)}


# --- invalid numbers --------------------------------------------------------------------------------------------------


def test_default_micro_batch_size() -> None:
    sizes = {1: 1, 7: 7, 96: 96, 127: 127, 128: 64, 192: 96, 254: 127, 256: 64, 508: 127, 512: 64, 1000: 125, 4096: 512}
    assert {batch_size: default_micro_batch_size(batch_size) for batch_size in sizes} == sizes


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        (
            (10, 4, 1),
            "batch_size 10 is not a multiple of micro_batch_size 4: "
            "use a batch_size of 8 or 12, or a micro_batch_size that divides 10",
        ),
        (
            (3, 4, 1),
            "batch_size 3 is not a multiple of micro_batch_size 4: "
            "use a batch_size of 4, or a micro_batch_size that divides 3",
        ),
        (
            (32, 8, 8),
            "8 ranks cannot share a step of 4 micro-batches (batch_size 32, micro_batch_size 8): start 1 to 4 ranks, "
            "or give micro_batch_size=4",
        ),
        (
            (8, 8, 2),
            "2 ranks cannot share a step of 1 micro-batch (batch_size 8, micro_batch_size 8): start 1 rank, or give "
            "micro_batch_size=4",
        ),
        (
            (4, 2, 6),
            "6 ranks cannot share a step of 2 micro-batches (batch_size 4, micro_batch_size 2): start 1 to 2 ranks, or "
            "give batch_size=12, micro_batch_size=2",
        ),
        (
            (4 * 10**9, 4, 1),
            "batch_size 4000000000 is 1000000000 micro-batches of 4, more than the 1048576 of the largest step: use a "
            "smaller batch_size, or a larger micro_batch_size",
        ),
        ((0, 1, 1), "batch_size must be a whole number above 0, found 0"),
        ((8, 2, 0), "world_size must be a whole number above 0, found 0"),
    ],
)
def test_invalid_numbers(numbers: tuple[int, int, int], sentence: str) -> None:
    with pytest.raises(Error, match=f"^{re.escape(sentence)}$"):
        check_numbers(*numbers)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 40))
def test_the_advice_is_valid(batch_size: int, size: int, world_size: int) -> None:
    """The values that an error message recommends pass the check."""
    try:
        check_numbers(batch_size, size, world_size)
    except Error as error:
        sentence = str(error)
    else:
        return
    if "multiple" in sentence:
        for other in re.findall(r"\d+", re.findall(r"batch_size of ([\d or]+),", sentence)[0]):
            check_numbers(int(other), size, 1)
    else:
        given = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", sentence)}
        check_numbers(given.get("batch_size", batch_size), given["micro_batch_size"], world_size)
