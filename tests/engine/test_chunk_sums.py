"""The sum of sharded gradients: in rounds of any number of ranks, along the canonical tree."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import samestep
from samestep.engine.chunk_sums import ChunkSum, exchange_chunks
from samestep.engine.routes import PendingOp, wait_all
from samestep.plan.tree import split


def draw_leaves(n: int, size: int) -> torch.Tensor:
    """Return gradients of micro-batches, whose sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, size, generator=generator) * 10.0 ** torch.randint(-9, 9, (n, size), generator=generator)


def add_up(leaves: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    if hi - lo == 1:
        return leaves[lo]
    mid = split(lo, hi)
    return add_up(leaves, lo, mid) + add_up(leaves, mid, hi)


@given(st.integers(1, 40), st.integers(2, 12))
def test_any_number_of_ranks_gives_the_canonical_sum(n: int, world_size: int) -> None:
    leaves = draw_leaves(n, 33)
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
        assert len(total.parts) <= 7
        assert all(part.untyped_storage().nbytes() == 20 for part in total.parts)
    assert total.total is not None
    assert total.total.tolist() == [64.0] * 5


def sum_units(sizes: list[int]) -> None:
    """Sum two units at the same time, in steps of these numbers of micro-batches, and check the sums."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for n in sizes:
        units = [draw_leaves(n, 5 * world_size), draw_leaves(n, 2 * world_size) * 3]
        totals = [ChunkSum(n), ChunkSum(n)]
        ops: list[PendingOp] = []
        for first in range(0, n, world_size):
            for unit, total in zip(units, totals, strict=True):
                own = unit[min(first + rank, n - 1)].view(world_size, -1).clone()
                ops = [op for op in ops if op.advance()]
                ops.append(PendingOp(exchange_chunks(own, first, total, dist.group.WORLD)))
        wait_all(ops)
        for unit, total in zip(units, totals, strict=True):
            assert total.total is not None
            assert torch.equal(total.total, add_up(unit, 0, n).view(world_size, -1)[rank]), n
    dist.destroy_process_group()


def test_ranks_exchange_their_chunks() -> None:
    samestep.spawn(sum_units, 4, ([1, 2, 3, 6, 8],))
