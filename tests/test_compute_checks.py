"""The plan of compute checks: which rank computes a micro-batch of which other rank again."""

from hypothesis import given
from hypothesis import strategies as st

from samestep.plan.tree import build_layout
from samestep.second_opinion import plan_checks


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
    seen = {check.v for k in range(most) for check in plan_checks(n, world_size, start + k)}
    assert seen == {*range(n)}
