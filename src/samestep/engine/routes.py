"""The algorithms that exchange the parts of a gradient between ranks. Every route gives the same bits.

The steps of a route are a generator. It issues its messages, yields the handles to wait for, and is resumed when they
have completed. The exchange resumes it, so that it overlaps with the backward. Every rank must start and resume its
routes in the same order, from the thread that runs the backward, never from a callback.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.plan.tree import Layout
from samestep.world.local_sockets import LocalSockets
from samestep.world.process_group import Transfer, communicate, wait_for_messages
from samestep.world.transport import plan_gather

Messages = Iterator[Sequence[Transfer]]

ALL_RANKS = range(1 << 31)

# Of all ranks' parts together. Gloo, 2 and 4 ranks (benchmarks/routes.py): below this, an all-gather is the fastest;
# above it, exchanges of half the data, or chunks if the number of ranks is not a power of two.
GATHER_MAX_BYTES = 4 << 20
# Of one rank's row. Above it, gloo is faster, because its thread copies while this one continues.
NEIGHBORS_MAX_BYTES = 1 << 20
# Of each gradient in a bucket, and of each chunk: with less, kernels may use other code paths and give other bits.
ALIGN_BYTES = 64


@dataclass(frozen=True)
class Space:
    """What a route needs to know of a bucket.

    Attributes:
        new: allocates zeros of a shape, on the device.
        num_elements, dtype: of the bucket.
        layout, rank: which parts the ranks have.
        owners: the ranks that get the sum; none: all ranks get it.
        peers: the ranks of the layout, as torch.distributed numbers them; by default with the same numbers.
    """

    new: Callable[..., Tensor]
    num_elements: int
    dtype: torch.dtype
    layout: Layout
    rank: int
    owners: Sequence[int] = ()
    peers: Sequence[int] = ALL_RANKS

    @property
    def gets_sum(self) -> bool:
        """Whether this rank gets the sum."""
        return not self.owners or self.rank in self.owners


class Route:
    """The memory of a bucket, and the exchange of its parts.

    Attributes:
        parts: this rank's parts.
        root: finally holds the sum, on the ranks that get it.
        blocks: the ranks' control blocks, if they are sent with this bucket.
        has_rounds: whether the exchange waits several times, so that it is worth advancing it meanwhile.
    """

    has_rounds = False

    def __init__(self, space: Space, parts: Sequence[Tensor], root: Tensor) -> None:
        self.space = space
        self.parts = parts
        self.root = root
        self.blocks: list[memoryview] = []

    def expect(self, tag: int) -> None:
        """Prepare for the other ranks' parts, if that is possible before this rank's own are complete."""

    def run(self, tag: int) -> Messages:
        """Exchange this rank's parts."""
        raise NotImplementedError


class AllGather(Route):
    """Each rank gets the rows of all ranks, which hold their parts and control blocks, and adds the parts itself.

    Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems" (1997): in
    each of log2 W rounds, a rank passes on all rows that it has, up to the number that is missing.

    Args:
        control_bytes: size of the control block; 0: there is none.
        sockets: of the ranks, if all run on one host. There, a rank sends its row to each of the others.
    """

    def __init__(self, space: Space, control_bytes: int = 0, sockets: LocalSockets | None = None) -> None:
        layout, rank, num_parts = space.layout, space.rank, space.layout.max_parts
        part_bytes = space.num_elements * space.dtype.itemsize
        row_bytes = num_parts * part_bytes + control_bytes
        self._rows = rows = space.new(layout.world_size, row_bytes, dtype=torch.uint8)
        # NCCL gathers rows in the order of the ranks. Else this rank's comes first, so that each message is contiguous.
        first = 0 if rows.is_cuda else rank
        self._of_ranks: list[Any] = [rows[(peer - first) % layout.world_size] for peer in range(layout.world_size)]
        self._slots = [
            row[k * part_bytes : (k + 1) * part_bytes].view(space.dtype)
            for row in self._of_ranks
            for k in range(num_parts)
        ]
        super().__init__(space, self._slots[rank * num_parts : (rank + 1) * num_parts], self._slots[layout.root])
        self.has_rounds = layout.world_size > 2
        self._receives: list[Transfer] = []
        self._sockets = sockets if control_bytes and row_bytes <= NEIGHBORS_MAX_BYTES else None
        if control_bytes:
            self.blocks = [memoryview(row[num_parts * part_bytes :].numpy()) for row in self._of_ranks]

    def expect(self, tag: int) -> None:
        if self._sockets is None and not self._rows.is_cuda:
            rows, rank, peers = self._rows, self.space.rank, self.space.peers
            self._receives = _list_works(
                communicate(
                    dist.irecv, rows[distance : distance + num_rows], peers[(rank + distance) % len(rows)], tag=tag
                )
                for distance, num_rows in plan_gather(len(rows))
            )

    def run(self, tag: int) -> Messages:
        rows, rank, peers = self._rows, self.space.rank, self.space.peers
        if self._sockets is not None:
            self._sockets.exchange([memoryview(row.numpy()) for row in self._of_ranks])
        elif rows.is_cuda:
            communicate(dist.all_gather_into_tensor, rows.view(-1), rows[rank])
        else:
            if not self._receives:
                self.expect(tag)
            receives, self._receives = self._receives, []
            for (distance, num_rows), receive in zip(plan_gather(len(rows)), receives, strict=True):
                send = communicate(dist.isend, rows[:num_rows], peers[(rank - distance) % len(rows)], tag=tag)
                yield _list_works([receive, send])
        add_parts(self._slots, self.space.layout)


class Butterfly(Route):
    """Each rank has one part, which becomes the sum: recursive halving, then doubling.

    Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005),
    with the nearest rank first, in the order of the canonical tree.
    """

    has_rounds = True

    def __init__(self, space: Space) -> None:
        root = space.new(space.num_elements)
        super().__init__(space, [root], root)
        self._spare = space.new((space.num_elements + 1) // 2)

    def run(self, tag: int) -> Messages:
        x = self.root
        path = [
            (self.space.peers[peer], keep, give)
            for peer, keep, give in _plan_butterfly(x.numel(), self.space.rank, self.space.layout.world_size)
        ]
        for peer, keep, give in path:
            theirs = self._spare[: keep.stop - keep.start]
            yield _exchange([(x[give], peer)], [(theirs, peer)], tag)
            x[keep].add_(theirs)
        for peer, keep, give in reversed(path):
            yield _exchange([(x[keep], peer)], [(x[give], peer)], tag)


class Chunks(Route):
    """All-to-all of chunks, addition, all-gather: any number of ranks, any number of parts."""

    has_rounds = True

    def __init__(self, space: Space) -> None:
        num_parts, world_size = space.layout.max_parts, space.layout.world_size
        size = -(-space.num_elements // (world_size * ALIGN_BYTES)) * ALIGN_BYTES
        self._whole = space.new(num_parts, world_size * size)
        self._chunks = space.new(world_size, num_parts, size)  # every rank's parts of this rank's chunk
        parts = [row[: space.num_elements] for row in self._whole]
        super().__init__(space, parts, parts[0])

    def run(self, tag: int) -> Messages:
        whole, chunks, rank, layout = self._whole, self._chunks, self.space.rank, self.space.layout
        held = [len(parts_of) for parts_of in layout.parts]
        peers = [peer for peer in range(layout.world_size) if peer != rank]
        size = chunks.shape[2]
        bounds = [slice(peer * size, (peer + 1) * size) for peer in range(layout.world_size)]
        address = self.space.peers
        sends = [(whole[k, bounds[peer]], address[peer]) for peer in peers for k in range(held[rank])]
        receives = [(chunks[peer, k], address[peer]) for peer in peers for k in range(held[peer])]
        chunks[rank].copy_(whole[:, bounds[rank]])
        yield _exchange(sends, receives, tag)
        whole[0, bounds[rank]].copy_(add_parts(chunks.view(-1, size), layout))
        yield _exchange(
            [(whole[0, bounds[rank]], address[peer]) for peer in peers],
            [(whole[0, bounds[peer]], address[peer]) for peer in peers],
            tag,
        )


class ToOwner(Route):
    """Each rank sends its parts to the first owner, which alone has memory for those of all ranks, and adds them.

    It sends the sum to the other owners: if each of them added the parts, too, their memory would exceed the state that
    a rank saves.
    """

    def __init__(self, space: Space) -> None:
        layout, rank, num_parts = space.layout, space.rank, space.layout.max_parts
        self._is_first = rank == space.owners[0]
        self._theirs = space.new(layout.world_size * num_parts if self._is_first else 0, space.num_elements)
        own = slice(rank * num_parts, (rank + 1) * num_parts)
        self._whole = self._theirs[own] if self._is_first else space.new(num_parts, space.num_elements)
        parts = [*self._whole]
        super().__init__(space, parts, self._theirs[layout.root] if self._is_first else parts[0])
        self.has_rounds = len(space.owners) > 1

    def run(self, tag: int) -> Messages:
        layout, rank = self.space.layout, self.space.rank
        first, *others = (self.space.peers[owner] for owner in self.space.owners)
        held = layout.parts[rank]
        if self._is_first:
            rows = self._theirs.view(layout.world_size, layout.max_parts, -1)
            receives = [
                (rows[peer, : len(parts)], self.space.peers[peer])
                for peer, parts in enumerate(layout.parts)
                if parts and peer != rank
            ]
            yield _exchange([], receives, tag)
            add_parts(self._theirs, layout)
            if others:
                yield _exchange([(self.root, other) for other in others], [], tag)
        else:
            if held:
                yield _exchange([(self._whole[: len(held)], first)], [], tag)
            if self.space.gets_sum:
                yield _exchange([], [(self.root, first)], tag)


class Staged(Route):
    """Copies of the parts in host memory are exchanged.

    Args:
        host: exchanges them.
        new: allocates the parts, on the device.
    """

    def __init__(self, host: Route, new: Callable[..., Tensor]) -> None:
        parts = [new(len(part)) for part in host.parts]
        super().__init__(host.space, parts, parts[0])
        self._host = host
        self.blocks = host.blocks
        self.has_rounds = host.has_rounds

    def expect(self, tag: int) -> None:
        self._host.expect(tag)

    def run(self, tag: int) -> Messages:
        for mine, copy in zip(self.parts, self._host.parts, strict=True):
            copy.copy_(mine)
        yield from self._host.run(tag)
        if self.space.gets_sum:
            self.root.copy_(self._host.root)


class Aside(Route):
    """A route on a GPU, all of whose messages are queued at once on a stream of its own, beside the backward pass.

    NCCL's waits stall a stream, and not the host. The stream of the backward pass waits when the sum is needed.
    """

    def __init__(self, route: Route, stream: torch.cuda.Stream) -> None:
        super().__init__(route.space, route.parts, route.root)
        self._route = route
        self._stream = stream

    def run(self, tag: int) -> Messages:
        device = self.root.device
        self._stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(self._stream):
                for works in self._route.run(tag):
                    _wait(works)
            yield ()
        finally:  # also after a failure: the memory can then be used again
            torch.cuda.current_stream(device).wait_stream(self._stream)


def build_route(space: Space, control_bytes: int = 0, sockets: LocalSockets | None = None) -> Route:
    """Return the best route for a bucket, the same on every rank. `control_bytes`, `sockets`: for `AllGather`."""
    layout = space.layout
    if space.owners:
        return ToOwner(space)
    num_bytes = space.num_elements * space.dtype.itemsize
    if num_bytes * layout.max_parts * layout.world_size <= GATHER_MAX_BYTES:
        return AllGather(space, control_bytes, sockets)
    return Butterfly(space) if layout.butterfly else Chunks(space)


def add_parts(slots: Sequence[Tensor] | Tensor, layout: Layout) -> Tensor:
    """Sum all ranks' parts, one slot each, along the canonical tree. Returns the root's slot."""
    for dst, src in layout.additions:
        slots[dst].add_(slots[src])
    return slots[layout.root]


def _list_works(works: Iterable[Transfer | None]) -> list[Transfer]:
    """Return the handles. None stands for a rank outside of the group."""
    return [work for work in works if work is not None]


def _exchange(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
) -> Sequence[Transfer]:
    """Issue point-to-point messages. `sends`, `receives`: (tensor, peer) pairs."""
    if any(tensor.is_cuda for tensor, _ in (*sends, *receives)):
        ops = [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in receives]
        ops += [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in sends]
        return communicate(dist.batch_isend_irecv, ops)
    # batch_isend_irecv works on gloo as well, but doubles the cost of a small message.
    works = [communicate(dist.irecv, tensor, peer, tag=tag) for tensor, peer in receives]
    works += [communicate(dist.isend, tensor, peer, tag=tag) for tensor, peer in sends]
    return _list_works(works)


def _plan_butterfly(num_elements: int, rank: int, world_size: int) -> list[tuple[int, slice, slice]]:
    """Return this rank's (peer, range to keep, range to give) in each round of halving, the nearest rank first."""
    keep = slice(0, num_elements)
    path = []
    for number in range(world_size.bit_length() - 1):
        peer = rank ^ 1 << number
        mid = (keep.start + keep.stop) // 2
        halves = slice(keep.start, mid), slice(mid, keep.stop)
        keep, give = halves if rank < peer else halves[::-1]
        path.append((peer, keep, give))
    return path


def pass_along_ring(
    data: Sequence[Tensor],
    rank: int,
    wait: Callable[[Sequence[Transfer]], None] = wait_for_messages,
    peers: Sequence[int] = ALL_RANKS,
) -> Iterator[int]:
    """Send each rank's bytes to the next rank, and from there on to all others.

    Args:
        data: on the CPU, per rank: memory for its bytes, which on the rank itself holds them. It may be empty.
        wait: waits for messages.
        peers: see `Space`.

    Yields:
        The other ranks, when their bytes have come.
    """
    world_size = len(data)
    last = (rank + 1) % world_size  # whose bytes come last: it needs no others from here
    following, previous = peers[last], peers[(rank - 1) % world_size]
    sources = [source for distance in range(1, world_size) if data[source := (rank - distance) % world_size].numel()]
    receives = _list_works(communicate(dist.irecv, data[source], previous) for source in sources)
    sends = _list_works([communicate(dist.isend, data[rank], following)] if data[rank].numel() else [])
    for source, receive in zip(sources, receives, strict=True):
        wait([receive])
        if source != last:
            sends += _list_works([communicate(dist.isend, data[source], following)])
        yield source
    wait(sends)


Counts = tuple[Sequence[int], Sequence[int]]


def start_all_to_all(rows: Tensor, chunks: Tensor, process_group: Any, counts: Counts | None) -> Transfer:
    """Begin to send chunks to all ranks, and to receive theirs into `rows`. Both are in the order of the ranks.

    Args:
        counts: per rank, how many chunks to receive from it, and how many to send to it. None: one.
    """
    received, sent = (each.view(-1).view(torch.uint8) for each in (rows, chunks))  # not all backends know all dtypes
    to_receive, to_send = counts or (None, None)
    sizes = _split(received, to_receive), _split(sent, to_send)
    work: Transfer = communicate(dist.all_to_all_single, received, sent, *sizes, group=process_group, async_op=True)
    return work


def _split(data: Tensor, counts: Sequence[int] | None) -> list[int] | None:
    """Return the sizes of parts of `data` with so many chunks."""
    if counts is None:
        return None
    chunk_bytes = len(data) // max(1, sum(counts))
    return [count * chunk_bytes for count in counts]


def _wait(works: Sequence[Transfer]) -> None:
    for work in works:
        communicate(work.wait)


class PendingOp:
    """A route that has started and may not be complete.

    Args:
        wait: waits for messages.
    """

    def __init__(self, route: Messages, wait: Callable[[Sequence[Transfer]], None] = _wait) -> None:
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
