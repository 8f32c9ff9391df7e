"""The memory for the exchange of gradients: of each bucket, the ranks' sums and the total; their control blocks."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from samestep.engine.buckets import Bucket
from samestep.engine.control import ControlFormat
from samestep.engine.folding import Grads
from samestep.engine.reduction_plan import ReductionPlan
from samestep.engine.routes import AllGather, Aside, Route, Space, Staged, build_route
from samestep.plan.tree import Layout
from samestep.torch_internals import count_storage_uses, get_storage
from samestep.world.group import Group


class ExchangeMemory:
    """The memory for exchanges with one layout, one after the other.

    Attributes:
        layout: the layout.
        routes: those of the buckets. The last one, which may have no bucket, exchanges the control blocks.
        views: per parameter, its slices of this rank's partial sums.
        form: the format of the control blocks.
        blocks: the ranks' control blocks.
    """

    def __init__(self, plan: ReductionPlan, layout: Layout, group: Group, num_buffers: int, num_names: int) -> None:
        self.layout = layout
        self.form = ControlFormat(layout, len(plan.params), num_buffers, num_names)
        self.routes: list[Route] = []
        self.views: list[Sequence[Tensor]] = [()] * len(plan.params)
        self._params = plan.params
        self._totals: dict[int, Tensor] = {}  # number of a parameter whose sum this rank gets -> its slice
        control_bytes = self.form.size_bytes
        for bucket in plan.buckets:
            is_last = bucket is plan.buckets[-1]
            route = _build_bucket_route(bucket, layout, group, control_bytes if is_last else 0)
            self.routes.append(route)
            for i, *slices in zip(bucket.indices, *map(bucket.views, route.parts), strict=True):
                self.views[i] = slices
            if bucket.owner in (None, group.rank):
                self._totals |= zip(bucket.indices, bucket.views(route.root), strict=True)
        if not self.routes or not self.routes[-1].blocks:
            space = Space(torch.zeros, 0, torch.uint8, layout, group.rank)
            self.routes.append(AllGather(space, control_bytes, group.local_sockets))
        self.blocks = self.routes[-1].blocks
        self._num_uses = self._count_uses()  # by this object; any further one is the script's

    def read_sums(self) -> Grads:
        """Return the sum of each parameter in its dtype; None on a rank that does not get it."""
        sums: Grads = [None] * len(self._params)
        for i, total in self._totals.items():
            sums[i] = total.detach().to(self._params[i].dtype)  # a tensor that is new, see `is_kept`
        return sums

    def _count_uses(self) -> list[int]:
        return [count_storage_uses(get_storage(route.root)) for route in self.routes]

    @property
    def is_kept(self) -> bool:
        """Return whether the script holds a gradient of the last step, or a view of one, which must not change then."""
        return self._count_uses() != self._num_uses


def _build_bucket_route(bucket: Bucket, layout: Layout, group: Group, control_bytes: int) -> Route:
    """Return the best route for a bucket.

    Args:
        control_bytes: size of the control block, if this is the last bucket; 0 for the others. With GPUs the control
            block stays in host memory, because only the host reads it.
    """
    is_on_gpu = bucket.device.type == "cuda"
    is_staged = group.needs_staging(bucket.device)
    on_device = partial(torch.zeros, dtype=bucket.dtype, device=bucket.device)
    on_host = partial(torch.zeros, dtype=bucket.dtype, pin_memory=is_on_gpu)
    new = on_host if is_staged else on_device
    space = Space(new, bucket.num_elements, bucket.dtype, layout, group.rank, bucket.owner)
    route = build_route(space, control_bytes if is_staged or not is_on_gpu else 0, group.local_sockets)
    if is_staged:
        return Staged(route, on_device)
    return Aside(route, torch.cuda.Stream(bucket.device)) if is_on_gpu else route
