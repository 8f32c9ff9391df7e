"""The sum of sharded gradients: in rounds of any number of ranks, along the canonical tree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.engine.sharded_pass import ChunkSum
from samestep.plan.tree import split


def add_up(leaves: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    if hi - lo == 1:
        return leaves[lo]
    mid = split(lo, hi)
    return add_up(leaves, lo, mid) + add_up(leaves, mid, hi)


@given(st.integers(1, 40), st.integers(2, 12))
def test_any_number_of_ranks_gives_the_canonical_sum(n: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(n)
    leaves = torch.randn(n, 33, generator=generator) * 10.0 ** torch.randint(-9, 9, (n, 33), generator=generator)
    total = ChunkSum(n)
    for first in range(0, n, world_size):
        rows = torch.full((world_size, 33), torch.nan)  # of ranks without a micro-batch in the last round
        held = leaves[first : first + world_size]
        rows[: len(held)] = held
        total.add(first, rows)
    assert total.total is not None
    assert torch.equal(total.total, add_up(leaves, 0, n))


@given(st.integers(1, 20), st.integers(2, 7), st.integers(1, 70))
def test_rounded_sums_do_not_depend_on_the_chunks(n: int, world_size: int, size: int) -> None:
    """Kernels for vectors and for single elements round alike, also numbers below the least normal one."""
    generator = torch.Generator().manual_seed(n)
    leaves = torch.randn(n, 150, generator=generator) * 10.0 ** torch.randint(-42, 9, (n, 150), generator=generator)
    leaves = leaves.to(torch.bfloat16)
    whole = add_up(leaves, 0, n)
    for start in range(0, 150, size):
        total = ChunkSum(n)
        for first in range(0, n, world_size):
            rows = leaves[first : first + world_size, start : start + size].clone()
            total.add(first, rows)
        assert total.total is not None
        assert torch.equal(total.total, whole[start : start + size])


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_it_keeps_few_sums_and_none_of_the_rows(world_size: int) -> None:
    total = ChunkSum(64)
    for first in range(0, 64, world_size):
        total.add(first, torch.ones(world_size, 5))
        assert len(total._parts) <= 7
        assert all(part.untyped_storage().nbytes() == 20 for part in total._parts)
    assert total.total is not None
    assert total.total.tolist() == [64.0] * 5
