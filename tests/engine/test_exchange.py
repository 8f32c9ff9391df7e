"""Passes over parameters alone, on real ranks: what it adds up, and what it leaves unchanged."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import samestep
from samestep.engine import exchange, ownership, routes
from samestep.engine.control import Vote
from samestep.engine.exchange import Bucket, Exchange, build_buckets, choose_cap_bytes
from samestep.engine.gradient_checksum import compute_checksum
from samestep.engine.ownership import Ownership, send_owned
from samestep.engine.passes import Gradients, MixedPrecision, PassAttempt
from samestep.engine.routes import ALIGN_BYTES
from samestep.plan.tree import build_layout, split
from samestep.torch_internals import break_gloo_connections, list_gloo_sockets
from samestep.world.environment import read_environment
from samestep.world.group import Group, open_group
from samestep.world.process_group import close_group

SHAPES = [(3,), (5, 7), (1,), (2, 3, 4, 4), (33,)]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.float32, torch.float64]
ALL = tuple(range(len(SHAPES)))
LENGTHS = (3, 6, 1, 11, 2)  # in micro-batches


def build_params() -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in zip(SHAPES, DTYPES, strict=True)]
    params[3] = nn.Parameter(params[3].data.contiguous(memory_format=torch.channels_last))
    return params


def draw(i: int, v: int) -> Tensor:
    """Return the gradient of parameter i in micro-batch v. Sums of them depend on the order of addition, and on the
    sign of an absent 0.
    """
    generator = torch.Generator().manual_seed(100 * i + v)
    exponents = torch.randint(-6, 6, SHAPES[i], generator=generator)
    drawn = (torch.randn(SHAPES[i], generator=generator) * 10.0**exponents).to(DTYPES[i])
    drawn.view(-1)[0] = -0.0
    return drawn


def sum_tree(leaves: list[Tensor | None], lo: int, hi: int) -> Tensor | None:
    """Compute the canonical sum by its definition: what is absent is not added."""
    if hi - lo == 1:
        return leaves[lo]
    mid = split(lo, hi)
    left, right = sum_tree(leaves, lo, mid), sum_tree(leaves, mid, hi)
    return right if left is None else left if right is None else left + right


class Ranks:
    """Passes over parameters on this rank."""

    def __init__(self, copies: int = 0) -> None:
        exchange.MAX_BUCKET_BYTES = 200
        self.params = build_params()
        self.group = group = open_group(read_environment(), torch.device("cpu"))
        self.gradients = Gradients(
            {}, group, MixedPrecision("fp32", group.device), micro_batch_size=1,
            ownership=Ownership(group, copies) if copies else None,
        )  # fmt: skip
        self.gradients.set_parameters([(f"p{i}", param) for i, param in enumerate(self.params)], [])
        ownership = self.gradients.ownership
        self.owners = None if ownership is None else [*map(ownership.find, self.params)]

    def compute(self, attempt: PassAttempt, uses: Callable[[int], tuple[int, ...]] = lambda v: ALL) -> None:
        """The micro-batches of this rank. Micro-batch v uses parameters `uses(v)`."""
        for v in attempt.held:
            if used := uses(v):
                terms = [(self.params[i] * draw(i, v)).sum().double() for i in used]
                attempt.backward(v, torch.stack(terms).sum(), None, None)
            attempt.close(v)

    def run(self, n: int, uses: Callable[[int], tuple[int, ...]] = lambda v: ALL) -> list[bytes | None]:
        """One pass. Returns the gradients' bytes."""
        attempt = PassAttempt(self.gradients, 0, [1] * n, 0, build_layout(n, self.group.world_size))
        self.compute(attempt, uses)
        attempt.apply(attempt.exchange(Vote(), [0] * len(attempt.held)))
        return [None if param.grad is None else param.grad.numpy().tobytes() for param in self.params]


def average(total: Tensor, n: int, num_counted: int) -> Tensor:
    """Compute the mean of a sum over `num_counted` of n micro-batches, as a pass does: powers of two change no bit."""
    scale = 2.0 ** -(n - 1).bit_length()
    return total * scale * (1 / scale / num_counted)


def gather(ranks: Ranks, grads: Any) -> Any:
    """Return `grads`, after a check that all ranks, or the owners alone, have the same."""
    first, *others = everywhere = ranks.group.gather(grads)
    if ranks.owners is not None:
        for rank, of_rank in enumerate(everywhere):
            for i in ALL:
                assert of_rank[i] == (everywhere[ranks.owners[i][0]][i] if rank in ranks.owners[i] else None)
        return [everywhere[ranks.owners[i][0]][i] for i in ALL]
    assert all(other == first for other in others)
    return first


def use_some(v: int) -> tuple[int, ...]:
    """Parameter 2 is never used, 4 only in micro-batch 1, and 0 in every second micro-batch."""
    return tuple(i for i in (1, 3) if v != 2) + ((0,) if v % 2 else ()) + ((4,) if v == 1 else ())


def reduce_some(gather_max_bytes: int, copies: int) -> list[list[bytes | None]]:
    """Return the gradients of passes of all lengths. What remains of one must not change the next."""
    routes.GATHER_MAX_BYTES = gather_max_bytes
    ranks = Ranks(copies)
    return [gather(ranks, ranks.run(n, use_some)) for n in LENGTHS]


def expect(n: int) -> list[bytes | None]:
    expected: list[bytes | None] = []
    for i in ALL:
        total = sum_tree([draw(i, v) if i in use_some(v) else None for v in range(n)], 0, n)
        if total is None:
            expected.append(None)
            continue
        like = build_params()[i]
        mean = average(total, n, sum(bool(use_some(v)) for v in range(n)))
        expected.append(torch.empty_like(like).copy_(mean).detach().numpy().tobytes())
    return expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
def test_sums_of_what_was_used(num_ranks: int) -> None:
    """For every route, with and without idle ranks and owners, and in the parameters' own strides."""
    expected = [*map(expect, LENGTHS)]
    for how in ((0, 0), (1 << 30, 0), (0, 1), (0, 2)) if num_ranks > 1 else ((0, 0),):
        assert samestep.spawn(partial(reduce_some, *how), num_ranks) == expected, how


def count_memories() -> list[int]:
    """Return how many memories there are when each one is allocated."""
    alive = WeakSet[Exchange]()
    counts = []
    ranks, allocate = Ranks(), Exchange.__init__

    def note_and_allocate(memory: Exchange, *of: Any) -> None:
        counts.append(len(alive))
        allocate(memory, *of)
        alive.add(memory)

    gc.disable()
    with patch.object(Exchange, "__init__", note_and_allocate):
        for n in (4, 4, 3, 4):  # the last step of an epoch is shorter
            ranks.run(n)
    return counts


def test_there_is_one_memory() -> None:
    assert samestep.spawn(count_memories, 2) == [0, 0, 0]


def count_waits() -> tuple[int, int]:
    """Returns how often an exchange waits so that it can give up, and the number of buckets that gloo sends."""
    ranks, waits = Ranks(), list[int]()
    wait_for = ranks.group.wait_for

    def note_and_wait(messages: Any) -> None:
        waits.append(len(messages))
        wait_for(messages)

    ranks.group.wait_for = note_and_wait  # type: ignore[method-assign]
    ranks.run(2)
    return len(waits), len(ranks.gradients.plan.buckets) - 1  # the last one goes through the local sockets


def test_a_small_bucket_waits_like_the_largest() -> None:
    """A part of a large message that is not sent in whole is in the way of a small one."""
    num_waits, num_buckets = samestep.spawn(count_waits, 2)
    assert num_waits >= num_buckets > 0


def release_after_a_failure() -> tuple[bool, int]:
    """Returns whether the exchange failed in the backward, and the number of connections that are open at the end."""
    routes.GATHER_MAX_BYTES = 0
    ranks = Ranks()
    attempt = PassAttempt(ranks.gradients, 0, [1] * 4, 0, build_layout(4, ranks.group.world_size))
    gc.disable()  # it would end what a cycle of references holds, at some time
    break_gloo_connections()
    ranks.compute(attempt)
    with pytest.raises(RuntimeError) as caught:
        attempt.exchange(Vote(), [0] * len(attempt.held))
    has_failed_before = "send" in [entry.name for entry in caught.traceback]
    del caught
    attempt.release()
    close_group()
    return has_failed_before, len(list_gloo_sockets())


def test_a_pass_that_has_failed_keeps_no_connection_open() -> None:
    """Other ranks may wait for this one until its connections close."""
    assert samestep.spawn(release_after_a_failure, 3) == (True, 0)


# --- buckets ----------------------------------------------------------------------------------------------------------


def fill(params: list[nn.Parameter], cap_bytes: int) -> list[Bucket]:
    return build_buckets(params, [()] * len(params), None, cap_bytes)


@pytest.mark.parametrize("cap_bytes", [1, 200, 1 << 20])
def test_buckets(cap_bytes: int) -> None:
    """Buckets hold every parameter once, from the last to the first, of one dtype each, with aligned gradients."""
    params = build_params()
    filled = fill(params, cap_bytes)
    assert sorted(i for bucket in filled for i in bucket.indices) == [0, 1, 2, 3, 4]
    assert [bucket.indices[0] for bucket in filled][:2] == [4, 3], "in the order of a backward"
    for bucket in filled:
        assert bucket.indices == sorted(bucket.indices, reverse=True)
        size = bucket.params[0].element_size()
        assert {param.dtype for param in bucket.params} == {bucket.dtype}
        assert all(offset * size % ALIGN_BYTES == 0 for offset in bucket.offsets)
        assert len(bucket.indices) == 1 or sum(param.numel() for param in bucket.params) * size <= cap_bytes
        flat = torch.zeros(bucket.num_elements, dtype=bucket.dtype)
        for param, view in zip(bucket.params, bucket.view(flat), strict=True):
            assert (view.shape, view.stride()) == (param.shape, param.stride())
            view.add_(1)
        assert flat.max() == 1, "no two overlap"
    assert (len(filled) == 5) == (cap_bytes == 1)


def test_buckets_of_two_devices() -> None:
    """Layers that alternate between devices get a bucket each, with views on their device."""
    devices = ("cpu", "meta")
    params = [nn.Parameter(torch.empty(10, device=devices[i % 2])) for i in range(6)]
    filled = fill(params, 1 << 20)
    assert [bucket.indices for bucket in filled] == [[5, 3, 1], [4, 2, 0]]
    assert [bucket.device.type for bucket in filled] == ["meta", "cpu"]
    assert [bucket.indices for bucket in fill(params, 80)] == [[5, 3], [4, 2], [1], [0]]


@pytest.mark.parametrize(("num_mb", "between_hosts"), [(0.01, 1.0), (8, 1.0), (48, 3.0), (40_000, 25.0)])
def test_how_large_buckets_grow(num_mb: float, between_hosts: float) -> None:
    params = [nn.Parameter(torch.empty(int(num_mb * 2**18), device="meta"))]
    assert choose_cap_bytes(params, one_host=False) == between_hosts * 2**20
    assert choose_cap_bytes(params, one_host=True) == 25 * 2**20


# --- copies from owners -----------------------------------------------------------------------------------------------


def build(owner: int) -> list[torch.Tensor]:
    """Return tensors of all kinds with random content. Rank 1 owns nothing."""
    generator = torch.Generator().manual_seed(owner)
    if owner == 1:
        return []
    real = torch.randn(3 * owner + 500, generator=generator)
    return [
        torch.nn.Parameter(torch.randn(70, 9, generator=generator)),
        real.bfloat16(),
        torch.tensor(owner + 7),
        real[:96].view(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.zeros(0, 4),
        real[:5] > 0,
        torch.complex(real, real.flip(0)),
        torch.randn(6, 7, generator=generator).double().t(),
        real[:3].to(torch.float8_e4m3fn),
        *(real[:6].abs().view(2, 3).to(dtype).t() for dtype in (torch.int16, torch.uint16)),
        torch.nn.Parameter(torch.randn(11, generator=generator)),
    ]


def broadcast_owned(owned: list[list[Tensor]], group: Group) -> None:
    for owner, tensors in enumerate(owned):
        group.broadcast_tensors(tensors, owner)


def send_all(send: Callable[[list[list[Tensor]], Group], None], chunk_bytes: int) -> None:
    dist.init_process_group("gloo")
    group = Group(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    ownership.CHUNK_BYTES = chunk_bytes
    owned = [
        [each.detach() if owner == group.rank else torch.zeros_like(each) for each in build(owner)]
        for owner in range(group.world_size)
    ]
    before = [[each._version for each in of_rank] for of_rank in owned]
    send(owned, group)
    for owner, of_rank in enumerate(owned):
        for found, expected, version in zip(of_rank, build(owner), before[owner], strict=True):
            assert found.stride() == expected.stride()
            assert found.tolist() == expected.tolist()
            assert owner == group.rank or not found.numel() or found._version > version
    dist.destroy_process_group()


@pytest.mark.parametrize(("send", "world_size", "chunk_bytes"), [
    (send_owned, 2, 1), (send_owned, 3, 1000), (send_owned, 5, 1 << 20), (broadcast_owned, 3, 1),
])  # fmt: skip
def test_each_rank_gets_all(send: Any, world_size: int, chunk_bytes: int) -> None:
    samestep.spawn(send_all, world_size, (send, chunk_bytes))


# --- which route a sum takes ------------------------------------------------------------------------------------------


def test_route_follows_from_size_and_layout() -> None:
    def choose(num_bytes: int, world_size: int) -> object:
        space = routes.Space(torch.zeros, num_bytes, torch.uint8, build_layout(8, world_size), 0)
        return type(routes.build_route(space))

    assert choose(1 << 10, 4) is routes.AllGather
    assert choose(64 << 20, 4) is routes.Butterfly
    assert choose(64 << 20, 3) is routes.Chunks


notes: list[str] = []  # what is queued on which stream


class Stream:
    """Takes the place of a stream of a GPU."""

    current: "Stream"

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: "Stream") -> None:
        notes.append(f"{self.name}: wait for {other.name}")

    def __enter__(self) -> None:
        self.before, Stream.current = Stream.current, self

    def __exit__(self, *_: object) -> None:
        Stream.current = self.before


class Message:
    def __init__(self, name: str) -> None:
        self.name = name
        notes.append(f"{Stream.current.name}: send {name}")

    def wait(self) -> None:
        notes.append(f"{Stream.current.name}: wait for {self.name}")


class TwoRounds(routes.Route):
    def run(self, tag: int) -> Any:
        yield [Message(f"{tag}a")]
        yield [Message(f"{tag}b")]


def start(number: int) -> routes.PendingOp:
    space = routes.Space(torch.zeros, 8, torch.float32, build_layout(4, 4), rank=0)
    side: Any = Stream(f"side {number}")
    return routes.PendingOp(routes.Aside(TwoRounds(space, [], torch.zeros(8)), side).run(tag=number))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    notes.clear()
    Stream.current = Stream("compute")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)


@pytest.mark.usefixtures("streams")
def test_on_a_gpu_a_bucket_is_queued_at_once_beside_the_backward() -> None:
    """The stream of the backward waits for none of its messages, until the sums are needed."""
    pending = [start(0), start(1)]
    notes.append("the rest of the backward")
    routes.wait_all(pending)
    steps = ["wait for compute", "send {0}a", "wait for {0}a", "send {0}b", "wait for {0}b"]
    expected = [f"side {n}: {step.format(n)}" for n in range(2) for step in steps]
    waits = ["compute: wait for side 0", "compute: wait for side 1"]
    assert notes == [*expected, "the rest of the backward", *waits]


@pytest.mark.usefixtures("streams")
def test_memory_is_not_used_again_before_a_failed_exchange_has_ended() -> None:
    op = start(0)
    assert "compute: wait for side 0" not in notes
    del op
    assert notes[-1] == "compute: wait for side 0"


# --- the checksum of a gradient ---------------------------------------------------------------------------------------


CHECKED_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
CHECKED_SHAPES = [(), (5,), (40, 6), (300, 20), (2, 3, 4, 4), (7,), (1, 5000)]


def build_grads(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in CHECKED_SHAPES]


@pytest.mark.parametrize("num_params", [1, 3, 4, 7])
def test_each_row_is_read_in_some_step(num_params: int) -> None:
    """An element that differs changes the checksum of the steps that read its row."""
    grads = build_grads()[:num_params]
    steps = range(1000 * num_params)
    expected = [compute_checksum(grads, step)() for step in steps]
    for i, grad in enumerate(grads):
        changed = grad.clone().flatten()
        changed.view(torch.int32)[min(grad.numel(), 1024) // 2] ^= 1
        others = [*grads[:i], changed.view(grad.shape), *grads[i + 1 :]]
        assert any(compute_checksum(others, step)() != expected[step] for step in steps)


@pytest.mark.parametrize("dtype", CHECKED_DTYPES)
def test_dtypes_and_strides(dtype: torch.dtype) -> None:
    grad = torch.randn(96, 500).to(dtype)
    assert compute_checksum([grad], 3)() == compute_checksum([grad.t().contiguous().t()], 3)()
    assert compute_checksum([grad], 3)() != compute_checksum([grad + 1], 3)()


def test_it_is_that_of_the_values_at_the_call() -> None:
    grads = build_grads()
    read = compute_checksum(grads, 3)
    expected = compute_checksum(grads, 3)()
    for grad in grads:
        grad.zero_()
    assert read() == expected != compute_checksum(grads, 3)()
