"""Who owns each tensor of a divided state: several ranks each, evenly, and the same after any deaths."""

from hypothesis import given
from hypothesis import strategies as st

from samestep.plan.shards import choose_owners, replace_owners

SIZES = st.lists(st.integers(0, 1000), max_size=30)
COPIES = st.integers(1, 3)


def find_loads(sizes: list[int], owners: list[tuple[int, ...]], ranks: list[int]) -> list[int]:
    return [sum(size for size, of_one in zip(sizes, owners, strict=True) if rank in of_one) for rank in ranks]


@given(SIZES, st.integers(1, 9), COPIES)
def test_each_tensor_has_different_owners_with_even_loads(sizes: list[int], num_ranks: int, copies: int) -> None:
    ranks = [3 * k + 1 for k in range(num_ranks)]
    owners = choose_owners(sizes, ranks, copies, {})
    assert [len({*of_one} & {*ranks}) for of_one in owners] == [min(copies, num_ranks)] * len(sizes)
    firsts = find_loads(sizes, [of_one[:1] for of_one in owners], ranks)
    largest = max(sizes, default=0)
    assert max(firsts) - min(firsts) <= largest
    loads = find_loads(sizes, owners, ranks)
    assert max(loads) - min(loads) <= min(copies, num_ranks) * largest
    assert len({*owners}) <= num_ranks, "so that few sets of ranks are the only owners of something"


@given(SIZES, SIZES, st.integers(1, 9), COPIES)
def test_owners_stay_when_tensors_are_added(before: list[int], added: list[int], num_ranks: int, copies: int) -> None:
    owners = choose_owners(before, range(num_ranks), copies, {})
    assert choose_owners(before + added, range(num_ranks), copies, dict(enumerate(owners)))[: len(before)] == owners


@given(SIZES, st.integers(1, 9), COPIES, st.data())
def test_the_dead_are_replaced(sizes: list[int], num_ranks: int, copies: int, data: st.DataObject) -> None:
    owners = choose_owners(sizes, range(num_ranks), copies, {})
    ranks = sorted(data.draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)))
    replaced = replace_owners(sizes, ranks, copies, owners)
    for before, after in zip(owners, replaced, strict=True):
        living = tuple(rank for rank in before if rank in ranks)
        assert after[: len(living)] == living
        assert len({*after} & {*ranks}) == len(after) == min(copies, len(ranks))
    assert replace_owners(sizes, ranks, copies, replaced) == replaced


def test_new_owners_have_even_loads() -> None:
    owners = choose_owners([10] * 80, range(8), 2, {})
    assert find_loads([10] * 80, owners, [*range(8)]) == [200] * 8
    replaced = replace_owners([10] * 80, [0, 1, 2, 4, 5, 6, 7], 2, owners)
    assert {*find_loads([10] * 80, replaced, [0, 1, 2, 4, 5, 6, 7])} <= {220, 230, 240}
