"""The memory for the exchange of gradients: of each bucket, the parts and the sum; the ranks' control blocks."""

from collections.abc import Sequence
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
                group.rank,
                exact=plan.exact,
                control_bytes=self.form.size_bytes if bucket is last and carries_control else 0,
                local_sockets=group.local_sockets,
                device=bucket.device,
                is_staged=staged[bucket.device],
            )
            for bucket in plan.buckets
        ]
        self.blocks = self.buckets[-1].blocks if self.buckets else []
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
            memory.expect(tag)


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
    """A bucket's memory for one layout: this rank's parts, and the sum.

    Attributes:
        has_sum: whether this rank gets the sum, which is then in `root` and, per parameter, in `grads`.

    Args:
        control_bytes: size of the control block, which is sent with the last bucket; 0 for the others.
        local_sockets: sockets that the last bucket may use.
        device: device of the memory.
        is_staged: whether to exchange copies of the parts in host memory.
    """

    def __init__(
        self,
        bucket: Bucket,
        layout: Layout,
        rank: int,
        *,
        exact: bool,
        control_bytes: int,
        local_sockets: LocalSockets | None,
        device: torch.device,
        is_staged: bool = False,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.has_sum = bucket.owner in (None, rank)
        self._owner = bucket.owner
        self._host: BucketMemory | None = None
        world_size = layout.world_size
        n = bucket.num_elements
        num_parts = layout.max_parts if exact else 1
        part_bytes = n * bucket.dtype.itemsize
        new: dict[str, Any] = {"dtype": bucket.dtype, "device": device, "pin_memory": device.type != bucket.device.type}
        self.route = routes.choose_route(layout, part_bytes, exact=exact, has_owner=bucket.owner is not None)
        self.blocks: list[memoryview] = []  # the ranks' control blocks, if sent with this bucket
        self._neighbors: LocalSockets | None = None
        self._receives: Sequence[routes.Work] | None = None
        if is_staged:
            self._host = host = BucketMemory(
                bucket,
                layout,
                rank,
                exact=exact,
                control_bytes=control_bytes,
                local_sockets=local_sockets,
                device=torch.device("cpu"),
            )
            self.blocks = host.blocks
            self.parts = [torch.zeros(n, **new) for _ in range(num_parts)]
            self.root = self.parts[0]
        elif self.route == "direct":
            row_bytes = num_parts * part_bytes + control_bytes
            self.rows = torch.zeros(world_size, row_bytes, **new | {"dtype": torch.uint8})
            if control_bytes and row_bytes <= routes.NEIGHBORS_MAX_BYTES:
                self._neighbors = local_sockets
            slots = [
                row[k * part_bytes : (k + 1) * part_bytes].view(bucket.dtype)
                for row in self.rows
                for k in range(num_parts)
            ]
            self.slots = slots
            self.parts = slots[rank * num_parts : (rank + 1) * num_parts]
            self.root = slots[layout.root]
            if control_bytes:
                self.blocks = [memoryview(row.numpy()) for row in self.rows[:, num_parts * part_bytes :]]
        elif self.route == "owner":
            self.theirs = torch.zeros(world_size * num_parts if self.has_sum else 0, n, **new)
            own = slice(rank * num_parts, (rank + 1) * num_parts)
            self.whole = self.theirs[own] if self.has_sum else torch.zeros(num_parts, n, **new)
            self.parts = [*self.whole]
            self.root = self.theirs[layout.root] if self.has_sum else self.parts[0]
        elif self.route == "chunks":
            padded = pad_to_chunks(n, world_size)
            self.whole = torch.zeros(num_parts, padded, **new)
            self.chunks = torch.zeros(world_size, num_parts, padded // world_size, **new)
            self.parts = [row[:n] for row in self.whole]
            self.root = self.parts[0]
        else:
            self.root = torch.zeros(n, **new)
            self.spare = self.root.new_empty((n + 1) // 2 if self.route == "butterfly" else 0)
            self.parts = [self.root]
        self.part_views = list(zip(*(bucket.views(part) for part in self.parts), strict=True))
        self.grads = bucket.views(self.root)
        self._storage = get_storage(self.root)
        self._num_references = self._count_references()  # our own references; any further one is the script's

    def _count_references(self) -> tuple[int, int]:
        return sum(map(getrefcount, self.grads)), count_storage_uses(self._storage)

    @property
    def is_kept(self) -> bool:
        """Return whether the script holds a gradient of the last step, or a view of one, which must not change then."""
        return self._count_references() != self._num_references

    def expect(self, tag: int) -> None:
        """Prepare for the other ranks' parts, if the route can do so before this rank's own are complete."""
        if self._host is not None:
            self._host.expect(tag)
        elif self.route == "direct" and self._neighbors is None:
            self._receives = routes.post_receives(self.rows, self.rank, tag)

    def exchange(self, tag: int) -> routes.Route:
        """Exchange this rank's parts. At the end, `root` holds the sum on the ranks that get it."""
        if self._host is not None:
            for mine, copy in zip(self.parts, self._host.parts, strict=True):
                copy.copy_(mine)
            yield from self._host.exchange(tag)
            if self.has_sum:
                self.root.copy_(self._host.root)
        elif self.route == "direct":
            receives = self._receives
            self._receives = None
            yield from routes.run_direct(self.rows, self.rank, tag, receives=receives, local_sockets=self._neighbors)
            routes.add_parts(self.slots, self.layout)
        elif self.route == "butterfly":
            yield from routes.run_butterfly(self.root, self.spare, self.rank, self.layout.world_size, tag)
        elif self.route == "chunks":
            yield from routes.run_chunks(self.whole, self.chunks, self.rank, self.layout, tag)
        elif self.route == "owner":
            assert self._owner is not None
            yield from routes.run_to_owner(self.theirs, self.whole, self.rank, self._owner, self.layout, tag)
        elif self.route == "reduce":
            assert self._owner is not None
            yield from routes.run_reduce(self.root, self._owner)
        else:
            yield from routes.run_all_reduce(self.root)
