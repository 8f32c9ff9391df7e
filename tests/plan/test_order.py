"""Orders are uniformly distributed permutations, and can start at any position."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import Error
from samestep.plan.order import (
    PURPOSES,
    WINDOW_SHARDS,
    FeistelOrder,
    Order,
    ShardedOrder,
    build_order,
    check_order,
    derive,
    sort_hashes,
)


def whole(order: Order) -> np.ndarray:
    return np.asarray(order[0 : len(order)])


def chi_square(counts: np.ndarray) -> float:
    """Return chi-square of equally likely cells, in standard deviations from its mean (about normal for many cells)."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


@given(st.integers(1, 5000), st.integers(0, 2**63 - 1))
def test_feistel_permutes_every_length(length: int, key: int) -> None:
    assert np.array_equal(np.sort(whole(FeistelOrder(length, key))), np.arange(length))


ORDERS = [
    build_order(5000, seed=1, epoch=2),
    build_order(70_000, seed=1, epoch=2),
    build_order(5000, seed=1, epoch=2, shuffle=False),
    check_order(range(4999, -1, -1), 5000, epoch=2),
    ShardedOrder([500, 0, 1, 999, 1500, 0, 200, 800, 1000], seed=1, epoch=2),
]
WHOLES = [whole(order) for order in ORDERS]


@given(st.sampled_from([0, 1, 2, 3, 4]), st.data())
def test_ranges_are_slices_of_the_whole(kind: int, data: st.DataObject) -> None:
    order, expected = ORDERS[kind], WHOLES[kind]
    start = data.draw(st.integers(0, len(order) - 1))
    stop = start + data.draw(st.one_of(st.integers(1, len(order) - start), st.integers(1, min(9, len(order) - start))))
    assert np.array_equal(order[start:stop], expected[start:stop])


LENGTH = 100_003


def cells(values: np.ndarray, num_cells: int, length: int = LENGTH) -> np.ndarray:
    return np.bincount(values.ravel() * num_cells // length, minlength=num_cells)


def test_an_order_is_uniform() -> None:
    """Positions, neighbours, and orders of seeds that adjoin, above the boundary: 2,048 samples of 100 orders."""
    heads = np.stack([build_order(LENGTH, seed=seed, epoch=0)[0:2048] for seed in range(100)])
    assert chi_square(cells(heads, 1000)) < 4
    for lag in (1, 2, 317):  # 317 = the larger radix: neighbours in the other digit
        assert chi_square(cells((heads[:, lag:] - heads[:, :-lag]) % LENGTH, 500)) < 4
    coarse = heads * 20 // LENGTH
    assert chi_square(np.bincount((coarse[:, 0::2] * 20 + coarse[:, 1::2]).ravel(), minlength=400)) < 4
    assert chi_square(cells((heads[1:] - heads[:-1]) % LENGTH, 500)) < 4


@pytest.mark.parametrize(
    ("indices", "sentence"),
    [
        *(
            (each, r"sampler\(7\) gave something else than indices: return a list of at least one whole number fro")
            for each in ([], [0.0, 1.0], [True], ["a"], [[0, 1], [2, 3]], [[0], [1, 2]], np.int64(3), None)
        ),
        ([0, 1, 4], r"sampler\(7\) gave index 4 at position 2: the data set's samples are 0 to 3"),
        ([0, -1], r"sampler\(7\) gave index -1 at position 1: "),
    ],
)
def test_invalid_samplers(indices: object, sentence: str) -> None:
    with pytest.raises(Error, match=sentence):
        check_order(indices, 4, epoch=7)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(0, 2**63 - 1), st.integers(0, 3))
def test_an_order_of_shards_has_each_sample_once_and_stays_local(sizes: list[int], seed: int, epoch: int) -> None:
    order = build_order(sum(sizes), seed=seed, epoch=epoch, shard_sizes=sizes)
    taken = whole(order)
    assert np.array_equal(np.sort(taken), np.arange(sum(sizes)))
    if not isinstance(order, ShardedOrder):
        assert sum(size > 0 for size in sizes) <= WINDOW_SHARDS
        return
    shards = np.searchsorted(np.cumsum(sizes), taken, side="right")
    seen: set[int] = set()
    at = 0
    while at < len(shards):  # window by window
        window: set[int] = set()
        stop = at
        while stop < len(shards) and len(window | {shards[stop]}) <= WINDOW_SHARDS:
            window.add(shards[stop])
            stop += 1
        assert not window & seen
        seen |= window
        at = stop


def test_the_indices_of_a_sampler_are_copied() -> None:
    mine = np.array([3, 0, 3])
    order = check_order(mine, 4, 0)
    mine[:] = 0
    assert whole(order).tolist() == [3, 0, 3]


def test_equal_hashes_keep_the_order_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.plan.order._draw_hashes", lambda key, count: np.arange(count, dtype=np.uint64) % 3)
    assert whole(sort_hashes(1000, 0)).tolist() == [*range(0, 1000, 3), *range(1, 1000, 3), *range(2, 1000, 3)]


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_places_and_purposes_differ() -> None:
    places = itertools.product((0, 1, 2, 10**12), PURPOSES, range(3), range(3), range(9))
    seeds = [derive(seed, purpose, step=s, pass_=p, micro_batch=v) for seed, purpose, s, p, v in places]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
