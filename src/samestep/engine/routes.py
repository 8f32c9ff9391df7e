"""The algorithms that exchange the parts of a gradient between ranks. Every route gives the same bits.

A route is a generator. It issues its messages, yields the handles to wait for, and is resumed when they have completed.
The reducer resumes it, so that the exchange overlaps with the backward. Every rank must start and resume its routes in
the same order, from the thread that runs the backward, never from a callback.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.plan.tree import Layout
from samestep.world.local_sockets import LocalSockets


class Work(Protocol):
    """A handle of torch.distributed."""

    def wait(self) -> object: ...


Route = Iterator[Sequence[Work]]

# Of all ranks' parts together. Gloo, 2 and 4 ranks (benchmarks/routes.py): below this, one message to each peer is the
# fastest; above it, log2 W exchanges of half the data each, or chunks if the number of ranks is not a power of two.
DIRECT_MAX_BYTES = 4 << 20
# Of one rank's row. Above it, gloo is faster, because its thread copies while this one continues.
NEIGHBORS_MAX_BYTES = 1 << 20


def choose_route(layout: Layout, num_bytes: int, *, exact: bool = True, has_owner: bool = False) -> str:
    """Return how to exchange a bucket, the same on every rank.

    Args:
        num_bytes: size of the bucket.
        exact: whether to sum along the canonical tree: "direct", "butterfly", "chunks" or "owner"; otherwise the
            backend's "all-reduce" or "reduce".
        has_owner: whether only one rank gets the sum.
    """
    if not exact or layout.world_size == 1:
        return "reduce" if has_owner else "all-reduce"
    if has_owner:
        return "owner"
    if num_bytes * layout.max_parts * layout.world_size <= DIRECT_MAX_BYTES:
        return "direct"
    return "butterfly" if layout.butterfly else "chunks"


def _exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int) -> Sequence[Work]:
    """Issue point-to-point messages. `sends`, `receives`: (tensor, peer) pairs."""
    if any(tensor.is_cuda for tensor, _ in (*sends, *receives)):
        ops = [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in receives]
        ops += [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in sends]
        return dist.batch_isend_irecv(ops)
    # batch_isend_irecv works on gloo as well, but doubles the cost of a small message.
    works = [dist.irecv(tensor, peer, tag=tag) for tensor, peer in receives]
    works += [dist.isend(tensor, peer, tag=tag) for tensor, peer in sends]
    return [work for work in works if work is not None]  # None: a rank outside of the group


def post_receives(rows: Tensor, rank: int, tag: int) -> Sequence[Work]:
    """Post the receives for `run_direct` early, so that no peer has to wait for this rank."""
    if rows.is_cuda:
        return ()
    works = [dist.irecv(rows[peer], peer, tag=tag) for peer in range(rows.shape[0]) if peer != rank]
    return [work for work in works if work is not None]


def run_direct(
    rows: Tensor,
    rank: int,
    tag: int,
    *,
    receives: Sequence[Work] | None = None,
    local_sockets: LocalSockets | None = None,
) -> Route:
    """Send this rank's row of `rows` [W, n] to every other rank. Latency 1, W - 1 rows received.

    Args:
        receives: result of `post_receives` for the same rows and tag; None: post them now.
        local_sockets: exchange over these sockets, without yielding.
    """
    if local_sockets is not None:
        local_sockets.exchange([memoryview(row.numpy()) for row in rows])
        return
    if rows.is_cuda:
        dist.all_gather_into_tensor(rows.view(-1), rows[rank])
        return
    if receives is None:
        receives = post_receives(rows, rank, tag)
    works = [dist.isend(rows[rank], peer, tag=tag) for peer in range(rows.shape[0]) if peer != rank]
    yield [*receives, *(work for work in works if work is not None)]


def add_parts(slots: Sequence[Tensor] | Tensor, layout: Layout) -> Tensor:
    """Sum all ranks' parts, one slot each, along the canonical tree. Returns the root's slot."""
    for dst, src in layout.additions:
        slots[dst].add_(slots[src])
    return slots[layout.root]


def run_to_owner(slots: Tensor, parts: Tensor, rank: int, owner: int, layout: Layout, tag: int) -> Route:
    """Send this rank's parts to the owner, which sums all ranks' parts in `slots`. Other ranks receive nothing.

    Args:
        slots: [W * max_parts, n], the parts of all ranks; on the owner only.
        parts: [max_parts, n], this rank's parts; on the owner, its slots.
    """
    if rank != owner:
        sends = [(parts[: len(layout.parts[rank])], owner)] if layout.parts[rank] else []
        if sends:
            yield _exchange(sends, [], tag)
        return
    rows = slots.view(layout.world_size, layout.max_parts, -1)
    receives = [(rows[peer, : len(held)], peer) for peer, held in enumerate(layout.parts) if held and peer != rank]
    if receives:
        yield _exchange([], receives, tag)
    add_parts(slots, layout)


Span = tuple[int, int]


def plan_butterfly(num_elements: int, rank: int, world_size: int) -> list[tuple[int, Span, Span]]:
    """Return this rank's (peer, range to keep, range to give) in each round of halving, the nearest rank first."""
    lo = 0
    hi = num_elements
    path = []
    distance = 1
    while distance < world_size:
        peer = rank ^ distance
        mid = (lo + hi) // 2
        keep, give = ((lo, mid), (mid, hi)) if rank < peer else ((mid, hi), (lo, mid))
        path.append((peer, keep, give))
        lo, hi = keep
        distance *= 2
    return path


def run_butterfly(x: Tensor, spare: Tensor, rank: int, world_size: int, tag: int) -> Route:
    """Recursive halving, then doubling: `x` [n] is this rank's only part, and finally the sum.

    Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005),
    with the nearest rank first, in the order of the canonical tree. `spare` [>= (n + 1) // 2] is scratch memory.
    """
    path = plan_butterfly(x.numel(), rank, world_size)
    for peer, keep, give in path:
        theirs = spare[: keep[1] - keep[0]]
        yield _exchange([(x[give[0] : give[1]], peer)], [(theirs, peer)], tag)
        x[keep[0] : keep[1]].add_(theirs)
    for peer, keep, give in reversed(path):
        yield _exchange([(x[keep[0] : keep[1]], peer)], [(x[give[0] : give[1]], peer)], tag)


def run_chunks(parts: Tensor, chunks: Tensor, rank: int, layout: Layout, tag: int) -> Route:
    """All-to-all of chunks, completion, all-gather: any number of ranks, any number of parts.

    Args:
        parts: [max_parts, n] this rank's parts, n a multiple of W; row 0 finally holds the sum.
        chunks: [W, max_parts, n // W] scratch memory: every rank's parts of this rank's chunk.
    """
    world_size, num_parts, size = chunks.shape
    held = [len(parts_of) for parts_of in layout.parts]
    peers = [peer for peer in range(world_size) if peer != rank]
    bounds = [slice(peer * size, (peer + 1) * size) for peer in range(world_size)]
    sends = [(parts[k, bounds[peer]], peer) for peer in peers for k in range(held[rank])]
    receives = [(chunks[peer, k], peer) for peer in peers for k in range(held[peer])]
    if held[rank]:
        chunks[rank].copy_(parts[:, bounds[rank]])
    if sends or receives:
        yield _exchange(sends, receives, tag)
    total = add_parts(chunks.view(world_size * num_parts, size), layout)
    parts[0, bounds[rank]].copy_(total)
    yield _exchange(
        [(parts[0, bounds[rank]], peer) for peer in peers],
        [(parts[0, bounds[peer]], peer) for peer in peers],
        tag,
    )


def pass_along_ring(data: Sequence[Tensor], rank: int) -> Iterator[int]:
    """Send each rank's bytes to the next rank, and from there on to all others.

    Args:
        data: on the CPU, per rank: memory for its bytes, which on the rank itself holds them. It may be empty.

    Yields:
        The other ranks, when their bytes have come.
    """
    world_size = len(data)
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    sources = [source for distance in range(1, world_size) if data[source := (rank - distance) % world_size].numel()]
    receives = [dist.irecv(data[source], previous) for source in sources]
    sends = [dist.isend(data[rank], following)] if data[rank].numel() else []
    for source, receive in zip(sources, receives, strict=True):
        assert receive is not None  # None: a rank outside of the group
        receive.wait()
        if source != following:
            sends.append(dist.isend(data[source], following))
        yield source
    for send in sends:
        assert send is not None
        send.wait()


def run_reduce(x: Tensor, owner: int) -> Route:
    """Reduce `x` to its owner with the backend. The bits of the sum depend on the number of ranks."""
    yield [dist.reduce(x, owner, async_op=True)]


def run_all_reduce(x: Tensor) -> Route:
    """All-reduce `x` with the backend. The bits of the sum depend on the number of ranks."""
    yield [dist.all_reduce(x, async_op=True)]


Counts = tuple[Sequence[int], Sequence[int]]


def start_all_to_all(rows: Tensor, chunks: Tensor, process_group: Any, counts: Counts | None = None) -> Work:
    """Begin to send chunks to all ranks, and to receive theirs into `rows`. Both are in the order of the ranks.

    Args:
        counts: per rank, how many chunks to receive from it, and how many to send to it. None: one.
    """
    received, sent = (each.view(-1).view(torch.uint8) for each in (rows, chunks))  # not all backends know all dtypes
    to_receive, to_send = counts or (None, None)
    work: Work = dist.all_to_all_single(
        received, sent, _split(received, to_receive), _split(sent, to_send), group=process_group, async_op=True
    )
    return work


def _split(data: Tensor, counts: Sequence[int] | None) -> list[int] | None:
    """Return the sizes of parts of `data` with so many chunks."""
    if counts is None:
        return None
    chunk_bytes = len(data) // max(1, sum(counts))
    return [count * chunk_bytes for count in counts]


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


class PendingOp:
    """A route that has started and may not be complete.

    Args:
        wait: waits for messages.
    """

    def __init__(self, route: Route, wait: Callable[[Sequence[Work]], None] = _wait) -> None:
        self._route = route
        self._wait = wait
        self._works = next(route, None)

    def advance(self) -> bool:
        """Wait for the issued messages, and let the route issue the next ones. Returns False when it is complete."""
        if self._works is None:
            return False
        self._wait(self._works)
        self._works = next(self._route, None)
        return self._works is not None


def wait_all(ops: Sequence[PendingOp]) -> None:
    """Advance routes in order, repeatedly, until all are complete."""
    under_way = list(ops)
    while under_way:
        under_way = [op for op in under_way if op.advance()]
