"""The memory for the exchange of gradients: of each bucket, the parts and the sum; the ranks' control blocks."""

from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from samestep.engine.buckets import Bucket
from samestep.engine.control import ControlFormat
from samestep.engine.reduction_plan import ReductionPlan
from samestep.engine.routes import AllGather, Aside, Route, Space, Staged, choose_route
from samestep.plan.tree import Layout
from samestep.torch_internals import count_storage_uses, get_storage
from samestep.world.group import Group


class ExchangeMemory:
    """The memory for exchanges with one layout, one after the other.

    Attributes:
        layout: the layout.
        buckets: per bucket.
        routes: those of the buckets. The last one, which may have no bucket, exchanges the control blocks.
        views: per parameter, its pieces of this rank's parts.
        form: the format of the control blocks.
    """

    def __init__(self, plan: ReductionPlan, layout: Layout, group: Group, num_buffers: int, num_names: int) -> None:
        self.layout = layout
        self.form = ControlFormat(layout, len(plan.params), num_buffers, num_names)
        self.buckets = [
            BucketMemory(bucket, plan, layout, group, self.form.size_bytes if bucket is plan.buckets[-1] else 0)
            for bucket in plan.buckets
        ]
        self.routes = [memory.route for memory in self.buckets]
        if not self.routes or not self.routes[-1].blocks:
            space = Space(torch.zeros, 0, torch.uint8, layout, group.rank)
            self.routes.append(AllGather(space, self.form.size_bytes, group.local_sockets))
        views = {
            i: pieces
            for bucket, memory in zip(plan.buckets, self.buckets, strict=True)
            for i, pieces in zip(bucket.indices, memory.part_views, strict=True)
        }
        self.views = [views[i] for i in range(len(views))]

    @property
    def blocks(self) -> list[memoryview]:
        """The ranks' control blocks."""
        return self.routes[-1].blocks

    @property
    def is_kept(self) -> bool:
        """Return whether the script holds a gradient of the last step, or a view of one, which must not change then."""
        return any(memory.is_kept for memory in self.buckets)


class LastMemory:
    """The memory that the exchanges of a plan use one after the other. Only that of the last layout is kept."""

    def __init__(self, plan: ReductionPlan, group: Group) -> None:
        self._plan = plan
        self._group = group
        self._memory: ExchangeMemory | None = None
        self._key: tuple[Any, ...] = ()

    def find(self, layout: Layout, num_buffers: int = 0, num_names: int = 0) -> ExchangeMemory:
        """Return the memory for the next exchange with other ranks."""
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
        has_sum: whether this rank gets the sum, which is then in the route's `root` and, per parameter, in `grads`.
        route: has the memory, and exchanges the parts.
        part_views: per parameter, its pieces of this rank's parts.

    Args:
        control_bytes: size of the control block, if this is the last bucket; 0 for the others. With GPUs the control
            block stays in host memory, because only the host reads it.
    """

    def __init__(self, bucket: Bucket, plan: ReductionPlan, layout: Layout, group: Group, control_bytes: int) -> None:
        self.has_sum = bucket.owner in (None, group.rank)
        self.route = _build_route(bucket, plan, layout, group, control_bytes)
        self.part_views = list(zip(*(bucket.views(part) for part in self.route.parts), strict=True))
        self.grads = bucket.views(self.route.root)
        self._storage = get_storage(self.route.root)
        self._num_references = self._count_references()  # our own references; any further one is the script's

    def _count_references(self) -> tuple[int, int]:
        return sum(map(getrefcount, self.grads)), count_storage_uses(self._storage)

    @property
    def is_kept(self) -> bool:
        """Return whether the script holds a gradient of the last step, or a view of one, which must not change then."""
        return self._count_references() != self._num_references


def _build_route(bucket: Bucket, plan: ReductionPlan, layout: Layout, group: Group, control_bytes: int) -> Route:
    """Return the best route for a bucket. Arguments as for `BucketMemory`."""

    def allocate(*shape: int, dtype: torch.dtype = bucket.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=bucket.device)

    def allocate_on_host(*shape: int, dtype: torch.dtype = bucket.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, pin_memory=bucket.device.type == "cuda")

    is_staged = group.needs_staging(bucket.device)
    new = allocate_on_host if is_staged else allocate
    space = Space(new, bucket.num_elements, bucket.dtype, layout, group.rank, bucket.owner)
    kind = choose_route(space)
    if kind is AllGather:
        is_on_host = is_staged or bucket.device.type == "cpu"
        route: Route = AllGather(space, control_bytes if is_on_host else 0, group.local_sockets)
    else:
        route = kind(space)
    if is_staged:
        return Staged(route, allocate)
    if bucket.device.type == "cuda":
        return Aside(route, torch.cuda.Stream(bucket.device))
    return route
