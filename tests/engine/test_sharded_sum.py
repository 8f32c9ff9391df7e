"""The sum of sharded gradients: in rounds of any number of ranks, along the canonical tree."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import samestep
from samestep.engine import sharded_sum
from samestep.engine.routes import Counts, PendingOp, start_all_to_all, wait_all
from samestep.engine.sharded_sum import ChunkExchange, ChunkSum
from samestep.plan.tree import cover, split


def draw_leaves(n: int, size: int) -> torch.Tensor:
    """Return gradients of micro-batches, whose sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, size, generator=generator) * 10.0 ** torch.randint(-9, 9, (n, size), generator=generator)


def add_up(leaves: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    if hi - lo == 1:
        return leaves[lo]
    mid = split(lo, hi)
    return add_up(leaves, lo, mid) + add_up(leaves, mid, hi)


@given(st.integers(1, 40), st.integers(1, 12), st.booleans())
def test_any_number_of_ranks_gives_the_canonical_sum(n: int, world_size: int, in_nodes: bool) -> None:
    """Of single micro-batches, and of the largest nodes of a round. It keeps few sums, and none of the rows."""
    leaves = draw_leaves(n, 33)
    total = ChunkSum(n)
    for first in range(0, n, world_size):
        stop = min(first + world_size, n)
        nodes = cover(n, first, stop) if in_nodes else [(v, v + 1) for v in range(first, stop)]
        rows = torch.full((world_size, 33), torch.nan)  # of ranks without a micro-batch in the last round
        rows[: len(nodes)] = torch.stack([add_up(leaves, lo, hi) for lo, hi in nodes])
        total.add(nodes, rows)
        assert len(total.sums) <= 7
        assert all(part.untyped_storage().nbytes() == 33 * 4 for part in total.sums)
    (only,) = total.sums
    assert torch.equal(only, add_up(leaves, 0, n))


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
            total.add([(v, v + 1) for v in range(first, first + len(rows))], rows)
        assert torch.equal(total.total, whole[start : start + size])


def sum_in_blocks(block_size: int, sizes: list[int]) -> dict[int, int]:
    """Sum two units at the same time, in steps of these numbers of micro-batches. Check this rank's chunks of the sums.

    Returns:
        For each number of micro-batches, how many chunks the ranks have sent to other blocks.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    is_outside = [other // block_size != rank // block_size for other in range(world_size)]
    num_sent: dict[int, int] = {}

    def start(rows: torch.Tensor, chunks: torch.Tensor, process_group: object, counts: Counts | None = None) -> object:
        sent = [1] * world_size if counts is None else counts[1]
        num_sent[n] += sum(count for count, outside in zip(sent, is_outside, strict=True) if outside)
        return start_all_to_all(rows, chunks, process_group, counts)

    sharded_sum.start_all_to_all = start  # type: ignore[assignment]
    for n in sizes:
        num_sent[n] = 0
        exchange = ChunkExchange(n, rank, world_size, block_size)
        units = [draw_leaves(n, 5 * world_size), draw_leaves(n, 2 * world_size) * 3]
        totals = [ChunkSum(n), ChunkSum(n)]
        ops: list[PendingOp] = []
        for first in range(0, n, world_size):
            for unit, total in zip(units, totals, strict=True):
                own = unit[min(first + rank, n - 1)].view(world_size, -1).clone()
                ops = [op for op in ops if op.advance()]
                ops.append(PendingOp(exchange.run(own, first, total, dist.group.WORLD)))
        wait_all(ops)
        for unit, total in zip(units, totals, strict=True):
            assert torch.equal(total.total, add_up(unit, 0, n).view(world_size, -1)[rank]), n
    counts = torch.tensor([*num_sent.values()])
    dist.all_reduce(counts)
    dist.destroy_process_group()
    return dict(zip(num_sent, counts.tolist(), strict=True))


@pytest.mark.parametrize(("world_size", "block_size", "num_chunks"), [
    (4, 1, {8: 24}),
    (4, 2, {1: 8, 2: 2, 3: 4, 6: 6 + 8, 8: 8, 64: 64}),  # 8 in each round without blocks
    (6, 2, {8: 12 + 4, 12: 20 + 20}),  # 24
    (6, 3, {1: 18, 8: 12 + 3, 12: 12}),  # 18
])  # fmt: skip
def test_blocks_of_ranks_send_their_sums(world_size: int, block_size: int, num_chunks: dict[int, int]) -> None:
    """The number of chunks that leave the blocks, for some numbers of micro-batches."""
    sent = samestep.spawn(sum_in_blocks, world_size, (block_size, [*num_chunks]))
    assert sent == {n: 2 * count for n, count in num_chunks.items()}
