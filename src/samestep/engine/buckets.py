"""The memory for the exchange of gradients: flat buckets of parameters, each with its parts and its sum."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from sys import getrefcount

import torch
from torch import Tensor, nn

from samestep.engine import routes
from samestep.plan.tree import Layout
from samestep.torch_internals import count_storage_uses, get_storage
from samestep.world.local_sockets import LocalSockets

LEAST_BYTES, MOST_BYTES = 1 << 20, 25 << 20  # of a bucket
NUM_BUCKETS = 16  # approximately, between hosts
ALIGN_BYTES = 64  # of each gradient in a bucket: with less, kernels may use other code paths and give other bits


@dataclass
class Bucket:
    """Parameters whose gradients are exchanged together, in the order in which a backward computes them."""

    indices: list[int]
    params: list[nn.Parameter]
    offsets: list[int] = field(default_factory=list)
    num_elements: int = 0
    missing: int = 0

    def __post_init__(self) -> None:
        align = ALIGN_BYTES // self.params[0].element_size()
        for param in self.params:
            self.offsets.append(self.num_elements)
            self.num_elements += -(-param.numel() // align) * align

    @property
    def dtype(self) -> torch.dtype:
        return self.params[0].dtype

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part of `flat`, with the shape and strides of the parameter."""
        return [
            flat.as_strided(param.shape, dense_strides(param), flat.storage_offset() + offset)
            for param, offset in zip(self.params, self.offsets, strict=True)
        ]


class BucketBuffers:
    """A bucket's memory for one layout: this rank's parts, and the sum.

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
        self.layout, self.rank = layout, rank
        self._host: BucketBuffers | None = None
        world_size, n = layout.world_size, bucket.num_elements
        num_parts = layout.max_parts if exact else 1
        part_bytes = n * bucket.params[0].element_size()
        is_pinned = device.type == "cpu" and bucket.device.type == "cuda"
        new = {"dtype": bucket.dtype, "device": device, "pin_memory": is_pinned}
        self.route = routes.choose_route(layout, part_bytes) if exact and world_size > 1 else "all-reduce"
        self.blocks: list[memoryview] = []  # the ranks' control blocks, if sent with this bucket
        self._neighbors: LocalSockets | None = None
        self._receives: Sequence[routes.Work] | None = None
        if is_staged:
            self._host = host = BucketBuffers(
                bucket, layout, rank, exact=exact, control_bytes=control_bytes, local_sockets=local_sockets,
                device=torch.device("cpu"),
            )  # fmt: skip
            self.blocks = host.blocks
            self.parts = [torch.zeros(n, **new) for _ in range(num_parts)]  # type: ignore[call-overload]
            self.root = self.parts[0]
        elif self.route == "direct":
            row_bytes = num_parts * part_bytes + control_bytes
            self.rows = torch.zeros(world_size, row_bytes, **new | {"dtype": torch.uint8})  # type: ignore[call-overload]
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
        elif self.route == "chunks":
            padded = pad_to_chunks(n, world_size)
            self.whole = torch.zeros(num_parts, padded, **new)  # type: ignore[call-overload]
            self.chunks = torch.zeros(world_size, num_parts, padded // world_size, **new)  # type: ignore[call-overload]
            self.parts = [row[:n] for row in self.whole]
            self.root = self.parts[0]
        else:
            self.root = torch.zeros(n, **new)  # type: ignore[call-overload]
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
        """Exchange this rank's parts. At the end, `root` holds the sum."""
        if self._host is not None:
            for mine, copy in zip(self.parts, self._host.parts, strict=True):
                copy.copy_(mine)
            yield from self._host.exchange(tag)
            self.root.copy_(self._host.root)
        elif self.route == "direct":
            receives, self._receives = self._receives, None
            yield from routes.run_direct(self.rows, self.rank, tag, receives=receives, local_sockets=self._neighbors)
            routes.add_parts(self.slots, self.layout)
        elif self.route == "butterfly":
            yield from routes.run_butterfly(self.root, self.spare, self.rank, self.layout.world_size, tag)
        elif self.route == "chunks":
            yield from routes.run_chunks(self.whole, self.chunks, self.rank, self.layout, tag)
        else:
            yield from routes.run_all_reduce(self.root)


def pad_to_chunks(num_elements: int, world_size: int) -> int:
    """Return the size of a bucket that is exchanged in one chunk per rank."""
    return -(-num_elements // (world_size * ALIGN_BYTES)) * world_size * ALIGN_BYTES


def choose_cap_bytes(params: Sequence[nn.Parameter], *, one_host: bool) -> int:
    """Return the maximum size of a bucket (docs/decisions/routes.md, measured by benchmarks/links.py).

    On one host, messages cost processor time, so few are best. Over a network, no computation overlaps the exchange of
    the last bucket, so it should be a small share of all gradients.
    """
    num_bytes = sum(param.numel() * param.element_size() for param in params)
    return MOST_BYTES if one_host else min(MOST_BYTES, max(LEAST_BYTES, num_bytes // NUM_BUCKETS))


def build_buckets(params: Sequence[nn.Parameter], cap_bytes: int) -> list[Bucket]:
    """Fill buckets in reverse order of the models' parameters, which is roughly the order of a backward pass.

    The parameters of a bucket have one dtype and device.
    """
    groups: list[list[int]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for i in reversed(range(len(params))):
        kind, num_bytes = (params[i].dtype, params[i].device), params[i].numel() * params[i].element_size()
        if kind not in sizes or sizes[kind] + num_bytes > cap_bytes:
            groups.append([])
            open_groups[kind], sizes[kind] = groups[-1], 0
        open_groups[kind].append(i)
        sizes[kind] += num_bytes
    return [Bucket(indices, [params[i] for i in indices]) for indices in groups]


def dense_strides(param: Tensor) -> tuple[int, ...]:
    """Return the parameter's strides if it is dense, else those of a contiguous tensor."""
    stride: tuple[int, ...] = torch.empty_like(param, device="meta").stride()
    return stride
