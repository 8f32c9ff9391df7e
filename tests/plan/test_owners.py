"""The division of tensors among ranks: balanced, and stable when tensors are added."""

from hypothesis import given
from hypothesis import strategies as st

from samestep.plan.owners import choose_owners

SIZES = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 9))
def test_ranks_own_about_the_same(sizes: list[int], world_size: int) -> None:
    """No division can be better than the mean or the largest tensor. Graham's bound is 4/3 of the best one."""
    owners = choose_owners(sizes, world_size, {})
    loads = [0] * world_size
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / world_size + max(sizes)
    assert max(loads) - min(loads) <= max(sizes)
    assert owners == choose_owners(sizes, world_size, {})


@given(SIZES, SIZES, st.integers(1, 9))
def test_further_tensors_move_no_earlier_one(sizes: list[int], further: list[int], world_size: int) -> None:
    before = choose_owners(sizes, world_size, {})
    after = choose_owners([*further, *sizes], world_size, {len(further) + i: owner for i, owner in enumerate(before)})
    assert after[len(further) :] == before
    assert set(after) <= set(range(world_size))
