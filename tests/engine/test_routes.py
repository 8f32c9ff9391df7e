"""Every route gives the bits of the canonical tree, at many numbers of ranks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.selection import one_in

import samestep
from samestep.engine import routes
from samestep.engine.control import Control, Vote
from samestep.engine.reducer import Reducer
from samestep.engine.reduction_plan import build_reduction_plan
from samestep.plan.tree import build_layout, split
from samestep.world.environment import read_environment
from samestep.world.group_opening import open_group


def draw_leaf(v: int) -> torch.Tensor:
    """A gradient whose sum depends on the order of its additions."""
    generator = torch.Generator().manual_seed(v)
    return torch.randn(1003, generator=generator) * 10.0 ** torch.randint(-6, 6, (1003,), generator=generator)


def fold(lo: int, hi: int) -> torch.Tensor:
    """Compute the canonical sum by its definition."""
    if hi - lo == 1:
        return draw_leaf(lo)
    mid = split(lo, hi)
    return fold(lo, mid) + fold(mid, hi)


def reduce_on_a_rank(n: int, direct_max_bytes: int) -> list[bytes]:
    """Return the gradient on a rank after a step of n micro-batches."""
    routes.DIRECT_MAX_BYTES = direct_max_bytes
    environment = read_environment()
    group = open_group(environment, torch.device("cpu"))
    params = [torch.nn.Parameter(torch.zeros(1003)), torch.nn.Parameter(torch.zeros(7))]
    trained = [("x", params[0]), ("unused", params[1])]
    plan = build_reduction_plan(trained, group, exact=True, bucket_cap_bytes=1)
    reducer = Reducer(plan, group)
    layout = build_layout(n, group.world_size)
    reduction = reducer.begin(layout)
    held = layout.ranges[group.rank]
    for v in held:
        reduction.open(v)
        loss = (params[0] * draw_leaf(v)).sum()
        reducer.hooks.backward(loss, 1.0, reduction.take if reduction.is_sending else None)
        if not reduction.is_sending:
            reduction.take_all()
        reduction.close(v)
    reduction.assign(reduction.finish(Control(Vote())).average(plan, 1.0))
    assert params[1].grad is None
    assert params[0].grad is not None
    gathered: list[bytes] = group.gather(params[0].grad.numpy().tobytes())
    return gathered


@pytest.mark.parametrize("world_size", one_in(4, [1, 2, 3, 8, 4, 5]))
@pytest.mark.parametrize("direct_max_bytes", [0, 1 << 30])
def test_all_ranks_get_the_canonical_sum(world_size: int, direct_max_bytes: int) -> None:
    for n in sorted({1, 2, world_size, 11}):
        expected = (fold(0, n) + 0.0).numpy().tobytes()
        found = samestep.spawn(partial(reduce_on_a_rank, n, direct_max_bytes), nprocs=world_size)
        assert found == [expected] * world_size


def test_route_follows_from_size_and_layout() -> None:
    assert routes.choose_route(build_layout(8, 4), 1 << 10) == "direct"
    assert routes.choose_route(build_layout(8, 4), 64 << 20) == "butterfly"
    assert routes.choose_route(build_layout(8, 3), 64 << 20) == "chunks"


def lose_a_peer() -> None:
    environment = read_environment()
    group = open_group(environment, torch.device("cpu"))
    if group.rank == 1:
        raise RuntimeError("rank 1 has had enough")
    rows = torch.zeros(2, 64, dtype=torch.uint8)
    routes.wait_all([routes.PendingOp(routes.run_direct(rows, group.rank, 0))])
    dist.barrier()


def test_a_lost_peer_is_the_peers_error() -> None:
    with pytest.raises(RuntimeError, match="rank 1 has had enough"):
        samestep.spawn(lose_a_peer, nprocs=2)
