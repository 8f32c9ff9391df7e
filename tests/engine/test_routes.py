"""Every route gives the bits of the canonical tree, at many numbers of ranks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.selection import one_in

import samestep
from samestep.engine import routes
from samestep.engine.control import Vote
from samestep.engine.passes import Gradients, PassAttempt
from samestep.engine.precision import build_precision
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


def reduce_on_a_rank(n: int, gather_max_bytes: int) -> list[bytes]:
    """Return the gradient on a rank after a step of n micro-batches."""
    routes.GATHER_MAX_BYTES = gather_max_bytes
    environment = read_environment()
    group = open_group(environment, torch.device("cpu"))
    params = [torch.nn.Parameter(torch.zeros(1003)), torch.nn.Parameter(torch.zeros(7))]
    gradients = Gradients(
        {}, group, build_precision("fp32", group.device), exact=True, bucket_cap_bytes=1, micro_batch_size=1
    )
    gradients.set_parameters([("x", params[0]), ("unused", params[1])], [])
    attempt = PassAttempt(gradients, 0, [1] * n, 0)
    for v in attempt.held:
        attempt.open(v)
        attempt.backward((params[0] * draw_leaf(v)).sum(), None, None)
        attempt.close()
    attempt.apply(attempt.exchange(Vote(), [0] * len(attempt.held)))
    assert params[1].grad is None
    assert params[0].grad is not None
    gathered: list[bytes] = group.gather(params[0].grad.numpy().tobytes())
    return gathered


@pytest.mark.parametrize("world_size", one_in(4, [1, 2, 3, 8, 4, 5]))
@pytest.mark.parametrize("gather_max_bytes", [0, 1 << 30])
def test_all_ranks_get_the_canonical_sum(world_size: int, gather_max_bytes: int) -> None:
    for n in sorted({1, 2, world_size, 11}):
        scale = 2.0 ** -(n - 1).bit_length()  # changes no bit
        expected = (fold(0, n) * scale * (1 / scale / n)).numpy().tobytes()
        found = samestep.spawn(partial(reduce_on_a_rank, n, gather_max_bytes), nprocs=world_size)
        assert found == [expected] * world_size


def test_route_follows_from_size_and_layout() -> None:
    def choose(num_bytes: int, world_size: int) -> object:
        space = routes.Space(torch.zeros, num_bytes, torch.uint8, build_layout(8, world_size), 0)
        return routes.choose_route(space)

    assert choose(1 << 10, 4) is routes.AllGather
    assert choose(64 << 20, 4) is routes.Butterfly
    assert choose(64 << 20, 3) is routes.Chunks


def lose_a_peer() -> None:
    environment = read_environment()
    group = open_group(environment, torch.device("cpu"))
    if group.rank == 1:
        raise RuntimeError("rank 1 has had enough")
    route = routes.AllGather(routes.Space(torch.zeros, 64, torch.uint8, build_layout(2, 2), group.rank))
    routes.wait_all([routes.PendingOp(route.run(0))])
    dist.barrier()


def test_a_lost_peer_is_the_peers_error() -> None:
    with pytest.raises(RuntimeError, match="rank 1 has had enough"):
        samestep.spawn(lose_a_peer, nprocs=2)
