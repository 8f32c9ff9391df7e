"""The exchange of gradients between ranks: bucket by bucket, from their partial sums to the sums of the whole batch."""

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from samestep.engine.control import Control, ControlFormat
from samestep.engine.leaf import GradientHooks, Grads, ParameterGuard, PartialSums
from samestep.engine.ownership import list_living
from samestep.engine.routes import (
    ALIGN_BYTES,
    AllGather,
    Aside,
    PendingOp,
    Route,
    Space,
    Staged,
    build_route,
    wait_all,
)
from samestep.engine.sharded_unit import ShardedModels
from samestep.plan.tree import Layout, repeat_ranks
from samestep.torch_internals import count_storage_uses, get_storage
from samestep.world.group import Group

LEAST_BUCKET_BYTES = 1 << 20
MAX_BUCKET_BYTES = 25 << 20
NUM_BUCKETS = 16  # approximately, between hosts
CONTROL_TAG = (1 << 20) - 1  # of the control blocks: ranks with other parameters have other numbers of buckets


class Bucket:
    """Parameters whose gradients are exchanged together, in the order in which a backward computes them.

    Args:
        indices: numbers of the parameters.
        all_params: those of the plan.
        owners: the replicas that get the sum, see `Ownership`; none: all.
        dtype: of the partial sums that are exchanged.

    Attributes:
        offsets: where each one's gradient begins in the bucket, in elements.
        num_elements: size of the bucket.
    """

    def __init__(
        self, indices: Sequence[int], all_params: Sequence[Tensor], owners: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.indices = indices
        self.params = [all_params[i] for i in indices]
        self.owners = owners
        self.dtype = dtype
        self.device = self.params[0].device
        self._strides = [*map(_find_strides, self.params)]
        align = ALIGN_BYTES // self.params[0].element_size()
        sizes = (-(-param.numel() // align) * align for param in self.params)
        *self.offsets, self.num_elements = accumulate(sizes, initial=0)

    def view(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's slice of `flat`, with the shape and strides of its gradient."""
        return [
            flat.as_strided(param.shape, strides, flat.storage_offset() + offset)
            for param, strides, offset in zip(self.params, self._strides, self.offsets, strict=True)
        ]


def choose_cap_bytes(params: Sequence[Tensor], *, one_host: bool) -> int:
    """Return the maximum size of a bucket (docs/dev/routes.md, measured by benchmarks/links.py).

    On one host, messages cost processor time, so few are best. Over a network, no computation overlaps the exchange of
    the last bucket, so it should be a small share of all gradients.
    """
    num_bytes = sum(param.nbytes for param in params)
    return MAX_BUCKET_BYTES if one_host else min(MAX_BUCKET_BYTES, max(LEAST_BUCKET_BYTES, num_bytes // NUM_BUCKETS))


def build_buckets(
    params: Sequence[Tensor],
    owners: Sequence[tuple[int, ...]],
    exchange_dtype: torch.dtype | None,
    cap_bytes: int,
) -> list[Bucket]:
    """Fill buckets in reverse order of the models' parameters, which is roughly the order of a backward pass.

    The parameters of a bucket have one dtype, one device and the same owners. `owners`, `exchange_dtype`: see
    `ReductionPlan`.
    """
    groups: list[list[int]] = []
    open_groups: dict[tuple[Any, ...], list[int]] = {}
    sizes: dict[tuple[Any, ...], int] = {}
    for i in reversed(range(len(params))):
        kind = params[i].dtype, params[i].device, owners[i]
        num_bytes = params[i].nbytes
        if kind not in sizes or sizes[kind] + num_bytes > cap_bytes:
            open_groups[kind] = []
            groups.append(open_groups[kind])
            sizes[kind] = 0
        open_groups[kind].append(i)
        sizes[kind] += num_bytes
    return [
        Bucket(indices, params, owners[indices[0]], _choose_dtype(params[indices[0]], exchange_dtype))
        for indices in groups
    ]


def _find_strides(param: Tensor) -> tuple[int, ...]:
    """Return the parameter's strides if it is dense, else those of a contiguous tensor."""
    return tuple(torch.empty_like(param, device="meta").stride())


def _choose_dtype(tensor: Tensor, exchange_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor's gradient is exchanged."""
    return exchange_dtype if exchange_dtype is not None and tensor.dtype == torch.float32 else tensor.dtype


def _narrow(dtype: torch.dtype, grads: list[Any]) -> list[Any]:
    return [None if grad is None else grad.to(_choose_dtype(grad, dtype)) for grad in grads]


class ReductionPlan:
    """The parameters whose gradients are summed, how they are exchanged, and the memory of the exchange.

    Args:
        trained: (name, parameter) in the models' order.
        untrained: parameters that no optimizer holds. Their gradients are dropped.
        owners: per parameter, the replicas that get its sum, see `Ownership`; None: all ranks get all sums.
        models: the models, if their parameters are sharded.
        exchange_dtype: the dtype to which gradients of float32 and their partial sums are rounded, so that they are
            exchanged in it; None: they are not.

    Attributes:
        names, params: of the trained parameters.
        all: the parameters with those that no optimizer holds.
        is_divided: whether each rank gets the sums of some parameters only, or of a slice of each.
        strides: per parameter, the strides of its sum.
        buckets: in the order in which they are exchanged.
        bucket_of: per parameter, the number of its bucket.
        guard: of the parameters.
        narrow: returns gradients in the dtype in which they are exchanged.
    """

    def __init__(
        self,
        trained: Sequence[tuple[str, Tensor]],
        group: Group,
        *,
        untrained: Sequence[Tensor] = (),
        owners: Sequence[tuple[int, ...]] | None = None,
        models: ShardedModels | None = None,
        exchange_dtype: torch.dtype | None = None,
    ) -> None:
        self.names = [name for name, _ in trained]
        self.params = [param for _, param in trained]
        self.untrained = untrained
        self.all = [*self.params, *untrained]
        self.models = models
        self.is_divided = owners is not None or models is not None or group.ranks_per_replica > 1
        self.exchange_dtype = exchange_dtype
        self.narrow: Callable[[list[Any]], list[Any]] = list  # which costs no call in Python
        if exchange_dtype is not None:
            self.narrow = partial(_narrow, exchange_dtype)
        in_buckets = self.params if models is None else []
        self.strides = [*map(_find_strides, in_buckets)]
        cap_bytes = choose_cap_bytes(self.params, one_host=group.is_on_one_host)
        buckets = build_buckets(in_buckets, owners or [()] * len(in_buckets), exchange_dtype, cap_bytes)
        self.buckets = [bucket for bucket in buckets if bucket.device.type != "meta"]  # parameters of other ranks
        self.bucket_of = {i: number for number, bucket in enumerate(self.buckets) for i in bucket.indices}
        self.guard = ParameterGuard(self.names, self.params)
        self.group = group
        self._exchange: Exchange | None = None
        self._key: tuple[Any, ...] = ()

    @cached_property
    def hooks(self) -> GradientHooks:
        """The hooks of the parameters, for gradients that are sent while a backward pass computes others."""
        return GradientHooks(self.params)

    @cached_property
    def unit_numbers(self) -> list[list[int | None]]:
        """The numbers of the parameters of each sharded unit; None for one that is not trained."""
        numbers = {id(param): i for i, param in enumerate(self.params)}
        units = [] if self.models is None else self.models.units
        return [[numbers.get(id(param)) for param in unit.params] for unit in units]

    def begin_exchange(self, partial_sums: PartialSums, num_buffers: int = 0, num_names: int = 0) -> "Exchange":
        """Begin an exchange with other ranks. `num_buffers`, `num_names`: see `ControlFormat`."""
        # An exchange refers to the connections of the group's generation.
        key = partial_sums.layout, num_buffers, num_names, self.group.generation
        if self._exchange is None or key != self._key or self._exchange.is_kept:
            self._exchange = None  # first, so that there is only one: the last step of an epoch is shorter
            self._exchange = Exchange(self, partial_sums.layout, num_buffers, num_names)
            self._key = key
        self._exchange.begin(partial_sums)
        return self._exchange

    def forget_exchange(self) -> None:
        """Release the memory for exchanges, and the messages in it that have not arrived."""
        self._exchange = None


class Exchange:
    """Exchanges this rank's partial sums with the other ranks, in memory that all passes with one layout use.

    The buckets are sent in order. If another rank is gone, `finish` raises the error, so that the script's
    micro-batches complete.

    Attributes:
        waited_s: seconds that `send` has waited for other ranks.
    """

    def __init__(self, plan: ReductionPlan, layout: Layout, num_buffers: int = 0, num_names: int = 0) -> None:
        self._plan = plan
        self._group = group = plan.group
        self._told = repeat_ranks(layout, group.ranks_per_replica)  # the ranks that get the control blocks: all
        self._form = ControlFormat(layout, len(plan.params), num_buffers, num_names)
        self.routes: list[Route] = []  # of the buckets; the last one, which may have no bucket, has the control blocks
        self._views: list[Sequence[Tensor]] = [()] * len(plan.params)  # slices of this rank's partial sums
        self._totals: dict[int, Tensor] = {}  # number of a parameter whose sum this rank gets -> its slice
        control_bytes = self._form.size_bytes
        self._buckets = plan.buckets if layout.world_size > 1 else []  # the ranks of one replica sum nothing together
        last = self._buckets[-1] if self._buckets and self._told is layout else None
        for bucket in self._buckets:
            route = _build_bucket_route(bucket, layout, group, control_bytes if bucket is last else 0)
            self.routes.append(route)
            for i, *slices in zip(bucket.indices, *map(bucket.view, route.parts), strict=True):
                self._views[i] = slices
            if route.space.gets_sum:
                self._totals |= zip(bucket.indices, bucket.view(route.root), strict=True)
        if not self.routes or not self.routes[-1].blocks:
            space = Space(torch.zeros, 0, torch.uint8, self._told, group.rank)
            self.routes.append(AllGather(space, control_bytes, group.local_sockets))
        self._tags = [*range(len(self.routes) - 1), CONTROL_TAG]
        self._num_uses = self._count_uses()  # by this object; any further one is the script's

    def begin(self, partial_sums: PartialSums) -> None:
        """Begin the exchange of a pass."""
        self.waited_s = 0.0
        self._partial_sums = partial_sums
        self._packed = bytearray(len(self._plan.params))
        # Per bucket, how many of its gradients the last micro-batch has not computed yet.
        self._missing = [sum(param.requires_grad for param in bucket.params) for bucket in self._buckets]
        self._pending: list[PendingOp] = []
        self._failure: RuntimeError | None = None  # of `begin` or `send`; `finish` raises it
        try:
            for tag, route in zip(self._tags, self.routes, strict=True):
                route.expect(tag)
        except RuntimeError as error:
            self._failure = error

    def pack(self, i: int, grad: Tensor | None) -> Tensor:
        """Copy this rank's sums of parameter i into its bucket. Returns the view that holds the last sum.

        Args:
            grad: the gradient in the last micro-batch.
        """
        self._packed[i] = 1
        return self._partial_sums.pack(i, grad, self._views[i])

    def send(self, i: int, grad: Tensor) -> Tensor:
        """Same as `pack`. Sends the buckets that are complete then."""
        packed = self.pack(i, grad)
        missing = self._missing
        pending = self._pending
        missing[self._plan.bucket_of[i]] -= 1
        # The last bucket waits for the control block, in `finish`.
        while self._failure is None and len(pending) < len(missing) - 1 and not missing[len(pending)]:
            began_s = time.monotonic()
            try:
                self._send_next()
            except RuntimeError as error:
                self._failure = error
            self.waited_s += time.monotonic() - began_s
        return packed

    def _pop_failure(self) -> RuntimeError:
        """Return the error. Its traceback refers to this object: the cycle would keep the connections open."""
        failure, self._failure = self._failure, None
        assert failure is not None
        return failure

    def _send_next(self) -> None:
        """Start the exchange of the next bucket, and advance that of the bucket before it."""
        number = len(self._pending)
        if self._partial_sums.held and number < len(self._buckets):
            for i in self._buckets[number].indices:
                if not self._packed[i]:
                    self.pack(i, None)
        self._pending.append(PendingOp(self.routes[number].run(self._tags[number]), self._group.wait_for))
        # At this fixed point, so that all ranks issue their messages in the same order.
        if number and self.routes[number - 1].has_rounds:
            self._pending[number - 1].advance()

    def finish(self, control: Control) -> tuple[list[Control], Grads]:
        """Send all that is left. Returns every rank's control block, and the sums; None for one of another rank.

        Args:
            control: this rank's control block.

        Raises:
            PeerFailed: another rank is gone.
        """
        if self._failure is not None:
            raise self._pop_failure()
        rank, blocks = self._group.rank, self.routes[-1].blocks
        self._form.pack_into(blocks[rank], control)
        while len(self._pending) < len(self.routes):
            self._send_next()
        wait_all(self._pending)
        del self._partial_sums
        controls = [
            control if each == rank else self._form.unpack_from(block, len(held))
            for each, (block, held) in enumerate(zip(blocks, self._told.ranges, strict=True))
        ]
        sums: Grads = [None] * len(self._plan.params)
        for i, total in self._totals.items():
            sums[i] = total.detach().to(self._plan.params[i].dtype)  # a tensor that is new, see `is_kept`
        return controls, sums

    def _count_uses(self) -> list[int]:
        return [count_storage_uses(get_storage(route.root)) for route in self.routes]

    @property
    def is_kept(self) -> bool:
        """Whether the script holds a gradient of the last step, or a view of one, which must not change then."""
        return self._count_uses() != self._num_uses


def _build_bucket_route(bucket: Bucket, layout: Layout, group: Group, control_bytes: int) -> Route:
    """Return the best route for a bucket.

    Args:
        control_bytes: size of the control block, if this is the last bucket; 0 for the others. With GPUs the control
            block stays in host memory, because only the host reads it.
    """
    is_on_gpu = bucket.device.type == "cuda"
    # NCCL gathers the rows of all ranks.
    is_staged = group.needs_staging(bucket.device) or (is_on_gpu and group.ranks_per_replica > 1)
    on_device = partial(torch.zeros, dtype=bucket.dtype, device=bucket.device)
    on_host = partial(torch.zeros, dtype=bucket.dtype, pin_memory=is_on_gpu)
    new = on_host if is_staged else on_device
    owners = [group.replicas.index(each) for each in list_living(bucket.owners, group.replicas)]
    space = Space(new, bucket.num_elements, bucket.dtype, layout, group.replica, owners, group.peers)
    route = build_route(space, control_bytes if is_staged or not is_on_gpu else 0, group.local_sockets)
    if is_staged:
        return Staged(route, on_device)
    return Aside(route, torch.cuda.Stream(bucket.device)) if is_on_gpu else route
