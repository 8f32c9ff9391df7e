"""The memory for the exchange of gradients: of each bucket, the parts and the sum; the ranks' control blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from samestep.engine import routes
from samestep.engine.buckets import Bucket, pad_to_chunks
from samestep.engine.control import ControlFormat
from samestep.engine.reduction_plan import ReductionPlan
from samestep.plan.tree import Layout
from samestep.torch_internals import count_storage_uses, get_storage
from samestep.world.group import Group
from samestep.world.local_sockets import LocalSockets


class ExchangeMemory:
    """The memory for exchanges with one layout, one after the other.

    Attributes:
        layout: the layout.
        buckets: per bucket.
        views: per parameter, its pieces of this rank's parts.
        form: the format of the control blocks.
        blocks: the ranks' control blocks.
        control_rows: the rows of the ranks' control blocks [W, size], if they are not sent with the last bucket.
    """

    def __init__(
        self, plan: ReductionPlan, layout: Layout, group: Group, num_buffers: int = 0, num_names: int = 0
    ) -> None:
        self.layout = layout
        self.form = ControlFormat(layout, len(plan.params), num_buffers, num_names)
        # With GPUs the control block stays in host memory, because only the host reads it.
        staged = {bucket.device: group.needs_staging(bucket.device) for bucket in plan.buckets}
        last = plan.buckets[-1] if plan.buckets else None
        carries_control = last is not None and (last.device.type == "cpu" or staged[last.device])
        self.buckets = [
            BucketMemory(
                bucket,
                layout,
                group,
                exact=plan.exact,
                control_bytes=self.form.size_bytes if bucket is last and carries_control else 0,
                is_staged=staged[bucket.device],
            )
            for bucket in plan.buckets
        ]
        self.blocks = self.buckets[-1].route.blocks if self.buckets else []
        self.control_rows: Tensor | None = None
        if not self.blocks:
            self.control_rows = torch.zeros(layout.world_size, self.form.size_bytes, dtype=torch.uint8)
            self.blocks = [memoryview(row.numpy()) for row in self.control_rows]
        views = {
            i: pieces
            for bucket, memory in zip(plan.buckets, self.buckets, strict=True)
            for i, pieces in zip(bucket.indices, memory.part_views, strict=True)
        }
        self.views = [views[i] for i in range(len(views))]

    @property
    def is_kept(self) -> bool:
        """Return whether the script holds a gradient of the last step, or a view of one, which must not change then."""
        return any(memory.is_kept for memory in self.buckets)

    def expect(self) -> None:
        """Prepare for the other ranks' parts."""
        for tag, memory in enumerate(self.buckets):
            memory.route.expect(tag)


class LastMemory:
    """The memory that the exchanges of a plan use one after the other. Only that of the last layout is kept."""

    def __init__(self, plan: ReductionPlan, group: Group) -> None:
        self._plan = plan
        self._group = group
        self._memory: ExchangeMemory | None = None
        self._key: tuple[Any, ...] = ()

    def find(self, layout: Layout, num_buffers: int = 0, num_names: int = 0) -> ExchangeMemory | None:
        """Return the memory for the next exchange; None if there is no other rank."""
        if self._group.world_size == 1:
            return None
        key = (layout, num_buffers, num_names, self._group.generation)  # it refers to the group's connections
        if self._memory is None or key != self._key or self._memory.is_kept:
            self._memory = None  # first, so that there is only one: the last step of an epoch is shorter
            self._memory = ExchangeMemory(self._plan, layout, self._group, num_buffers, num_names)
            self._key = key
        return self._memory

    def forget(self) -> None:
        """Release the memory, and the messages in it that have not arrived."""
        self._memory = None


class BucketMemory:
    """A bucket's memory for one layout.

    Attributes:
        has_sum: whether this rank gets the sum, which is then in `root` and, per parameter, in `grads`.
        route: has the memory, and exchanges the parts.
        part_views: per parameter, its pieces of this rank's parts.

    Args:
        control_bytes: size of the control block, which is sent with the last bucket; 0 for the others.
        is_staged: whether to exchange copies of the parts in host memory.
    """

    def __init__(
        self, bucket: Bucket, layout: Layout, group: Group, *, exact: bool, control_bytes: int, is_staged: bool
    ) -> None:
        self.has_sum = bucket.owner in (None, group.rank)
        self.route = _build_route(bucket, layout, group, exact=exact, control_bytes=control_bytes, is_staged=is_staged)
        self.root = self.route.root
        self.part_views = list(zip(*(bucket.views(part) for part in self.route.parts), strict=True))
        self.grads = bucket.views(self.root)
        self._storage = get_storage(self.root)
        self._num_references = self._count_references()  # our own references; any further one is the script's

    def _count_references(self) -> tuple[int, int]:
        return sum(map(getrefcount, self.grads)), count_storage_uses(self._storage)

    @property
    def is_kept(self) -> bool:
        """Return whether the script holds a gradient of the last step, or a view of one, which must not change then."""
        return self._count_references() != self._num_references


class RouteMemory:
    """The memory of a bucket on one route.

    Attributes:
        parts: this rank's parts.
        root: finally holds the sum, on the ranks that get it.
        blocks: the ranks' control blocks, if they are sent with this bucket.
        has_rounds: whether the exchange waits several times, so that it is worth advancing it meanwhile.
    """

    has_rounds = False

    def __init__(self, parts: Sequence[Tensor], root: Tensor) -> None:
        self.parts = parts
        self.root = root
        self.blocks: list[memoryview] = []

    def expect(self, tag: int) -> None:
        """Prepare for the other ranks' parts, if that is possible before this rank's own are complete."""

    def run(self, tag: int) -> routes.Route:
        """Exchange this rank's parts."""
        raise NotImplementedError


@dataclass(frozen=True)
class Space:
    """What a route needs to know of a bucket.

    Attributes:
        new: allocates zeros of a shape, on the device.
        num_elements, dtype: of the bucket.
        num_parts: the largest number of parts of a rank.
    """

    new: Callable[..., Tensor]
    num_elements: int
    dtype: torch.dtype
    num_parts: int
    layout: Layout
    rank: int


class Direct(RouteMemory):
    """Each rank has a row with its parts and, in the last bucket, its control block."""

    def __init__(self, space: Space, control_bytes: int, sockets: LocalSockets | None) -> None:
        num_parts = space.num_parts
        part_bytes = space.num_elements * space.dtype.itemsize
        row_bytes = num_parts * part_bytes + control_bytes
        self._layout = space.layout
        self._rank = space.rank
        self._rows = space.new(space.layout.world_size, row_bytes, dtype=torch.uint8)
        self._slots = [
            row[k * part_bytes : (k + 1) * part_bytes].view(space.dtype) for row in self._rows for k in range(num_parts)
        ]
        own = slice(space.rank * num_parts, (space.rank + 1) * num_parts)
        super().__init__(self._slots[own], self._slots[space.layout.root])
        self._receives: Sequence[routes.Work] | None = None
        self._sockets = sockets if control_bytes and row_bytes <= routes.NEIGHBORS_MAX_BYTES else None
        if control_bytes:
            self.blocks = [memoryview(row.numpy()) for row in self._rows[:, num_parts * part_bytes :]]

    def expect(self, tag: int) -> None:
        if self._sockets is None:
            self._receives = routes.post_receives(self._rows, self._rank, tag)

    def run(self, tag: int) -> routes.Route:
        receives = self._receives
        self._receives = None
        yield from routes.run_direct(self._rows, self._rank, tag, receives=receives, local_sockets=self._sockets)
        routes.add_parts(self._slots, self._layout)


class Butterfly(RouteMemory):
    """Each rank has one part, which becomes the sum."""

    has_rounds = True

    def __init__(self, space: Space) -> None:
        root = space.new(space.num_elements)
        super().__init__([root], root)
        self._spare = space.new((space.num_elements + 1) // 2)
        self._space = space

    def run(self, tag: int) -> routes.Route:
        space = self._space
        yield from routes.run_butterfly(self.root, self._spare, space.rank, space.layout.world_size, tag)


class Chunks(RouteMemory):
    """Each rank sums a chunk of all ranks' parts."""

    has_rounds = True

    def __init__(self, space: Space) -> None:
        world_size = space.layout.world_size
        padded = pad_to_chunks(space.num_elements, world_size)
        self._whole = space.new(space.num_parts, padded)
        self._chunks = space.new(world_size, space.num_parts, padded // world_size)
        self._space = space
        parts = [row[: space.num_elements] for row in self._whole]
        super().__init__(parts, parts[0])

    def run(self, tag: int) -> routes.Route:
        yield from routes.run_chunks(self._whole, self._chunks, self._space.rank, self._space.layout, tag)


class ToOwner(RouteMemory):
    """The owner alone has memory for all ranks' parts."""

    def __init__(self, space: Space, owner: int) -> None:
        layout, rank, num_parts = space.layout, space.rank, space.num_parts
        self._space = space
        self._owner = owner
        self._theirs = space.new(layout.world_size * num_parts if rank == owner else 0, space.num_elements)
        own = slice(rank * num_parts, (rank + 1) * num_parts)
        self._whole = self._theirs[own] if rank == owner else space.new(num_parts, space.num_elements)
        parts = [*self._whole]
        super().__init__(parts, self._theirs[layout.root] if rank == owner else parts[0])

    def run(self, tag: int) -> routes.Route:
        space = self._space
        yield from routes.run_to_owner(self._theirs, self._whole, space.rank, self._owner, space.layout, tag)


class Backend(RouteMemory):
    """The backend sums one part of each rank, for all ranks or for the owner."""

    def __init__(self, space: Space, owner: int | None) -> None:
        root = space.new(space.num_elements)
        super().__init__([root], root)
        self._owner = owner

    def run(self, tag: int) -> routes.Route:
        root, owner = self.root, self._owner
        yield from routes.run_all_reduce(root) if owner is None else routes.run_reduce(root, owner)


class Staged(RouteMemory):
    """Copies of the parts in host memory are exchanged."""

    def __init__(self, host: RouteMemory, new: Callable[..., Tensor], *, has_sum: bool) -> None:
        parts = [new(len(part)) for part in host.parts]
        super().__init__(parts, parts[0])
        self._host = host
        self._has_sum = has_sum
        self.blocks = host.blocks
        self.has_rounds = host.has_rounds

    def expect(self, tag: int) -> None:
        self._host.expect(tag)

    def run(self, tag: int) -> routes.Route:
        for mine, copy in zip(self.parts, self._host.parts, strict=True):
            copy.copy_(mine)
        yield from self._host.run(tag)
        if self._has_sum:
            self.root.copy_(self._host.root)


def _build_route(
    bucket: Bucket, layout: Layout, group: Group, *, exact: bool, control_bytes: int, is_staged: bool
) -> RouteMemory:
    """Return the memory of a bucket on the best route. Arguments as for `BucketMemory`."""

    def allocate(*shape: int, dtype: torch.dtype = bucket.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=bucket.device)

    def allocate_on_host(*shape: int, dtype: torch.dtype = bucket.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, pin_memory=bucket.device.type == "cuda")

    num_bytes = bucket.num_elements * bucket.dtype.itemsize
    name = routes.choose_route(layout, num_bytes, exact=exact, has_owner=bucket.owner is not None)
    space = Space(
        new=allocate_on_host if is_staged else allocate,
        num_elements=bucket.num_elements,
        dtype=bucket.dtype,
        num_parts=layout.max_parts if exact else 1,
        layout=layout,
        rank=group.rank,
    )
    route: RouteMemory
    if name == "direct":
        route = Direct(space, control_bytes, group.local_sockets)
    elif name == "butterfly":
        route = Butterfly(space)
    elif name == "chunks":
        route = Chunks(space)
    elif name == "owner":
        assert bucket.owner is not None
        route = ToOwner(space, bucket.owner)
    else:
        route = Backend(space, bucket.owner)
    return Staged(route, allocate, has_sum=bucket.owner in (None, group.rank)) if is_staged else route
