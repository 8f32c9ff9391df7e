"""Every route gives the bits of the canonical tree, at many numbers of ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
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


class Streams:
    """Takes the place of the streams of a GPU, and of torch.distributed in routes.py. Notes what is queued where."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.current = [Stream("compute", self)]

    def note(self, what: str) -> None:
        self.notes.append(f"{self.current[-1].name}: {what}")

    @contextmanager
    def enter(self, stream: "Stream") -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def isend(self, tensor: torch.Tensor, peer: int, tag: int) -> "Message":
        self.note(f"send {tag} to {peer}")
        return Message(f"{tag} to {peer}", self)

    def irecv(self, tensor: torch.Tensor, peer: int, tag: int) -> "Message":
        self.note(f"receive {tag} from {peer}")
        return Message(f"{tag} from {peer}", self)


class Stream:
    def __init__(self, name: str, streams: Streams) -> None:
        self.name = name
        self._streams = streams

    def wait_stream(self, other: "Stream") -> None:
        self._streams.notes.append(f"{self.name}: wait for {other.name}")


class Message:
    def __init__(self, name: str, streams: Streams) -> None:
        self._name = name
        self._streams = streams

    def wait(self) -> None:
        self._streams.note(f"wait for {self._name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(routes, "dist", streams)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.current[-1])
    monkeypatch.setattr(torch.cuda, "stream", streams.enter)
    return streams


def build_aside(number: int, streams: Streams) -> routes.Route:
    route = routes.Butterfly(routes.Space(torch.zeros, 8, torch.float32, build_layout(4, 4), rank=0))
    return routes.Aside(route, Stream(f"side {number}", streams))  # type: ignore[arg-type]


def test_on_a_gpu_a_bucket_is_queued_at_once_beside_the_backward(streams: Streams) -> None:
    """The stream of the backward waits for none of its messages, until the sums are needed."""
    pending = []
    for number in range(2):
        streams.note(f"compute {number}")
        pending.append(routes.PendingOp(build_aside(number, streams).run(tag=number)))
    streams.note("compute the rest")
    routes.wait_all(pending)
    expected = []
    for number in range(2):
        expected += [f"compute: compute {number}", f"side {number}: wait for compute"]
        for peer in (1, 2, 2, 1):
            here = f"side {number}"
            expected += [f"{here}: receive {number} from {peer}", f"{here}: send {number} to {peer}"]
            expected += [f"{here}: wait for {number} from {peer}", f"{here}: wait for {number} to {peer}"]
    expected += ["compute: compute the rest", "compute: wait for side 0", "compute: wait for side 1"]
    assert streams.notes == expected


def test_memory_is_not_used_again_before_a_failed_exchange_has_ended(streams: Streams) -> None:
    op = routes.PendingOp(build_aside(0, streams).run(tag=0))
    assert "compute: wait for side 0" not in streams.notes
    del op
    assert streams.notes[-1] == "compute: wait for side 0"
