"""Buckets: parameters whose gradients are exchanged together."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

# of a bucket
LEAST_BYTES = 1 << 20
MAX_BYTES = 25 << 20
NUM_BUCKETS = 16  # approximately, between hosts
ALIGN_BYTES = 64  # of each gradient in a bucket: with less, kernels may use other code paths and give other bits


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters whose gradients are exchanged together, in the order in which a backward computes them.

    Attributes:
        indices: numbers of the parameters.
        offsets: where each one's gradient begins in the bucket, in elements.
        strides: of each one's gradient, see `dense_strides`.
        num_elements: size of the bucket.
        owner: the rank that gets the sum; None: all ranks.
        dtype: of the parts that are exchanged.
    """

    indices: Sequence[int]
    params: Sequence[Tensor]
    offsets: Sequence[int]
    strides: Sequence[tuple[int, ...]]
    num_elements: int
    owner: int | None
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's slice of `flat`, with the shape and strides of the parameter."""
        return [
            flat.as_strided(param.shape, strides, flat.storage_offset() + offset)
            for param, strides, offset in zip(self.params, self.strides, self.offsets, strict=True)
        ]


def pad_to_chunks(num_elements: int, world_size: int) -> int:
    """Return the size of a bucket that is exchanged in one chunk per rank."""
    return -(-num_elements // (world_size * ALIGN_BYTES)) * world_size * ALIGN_BYTES


def choose_cap_bytes(params: Sequence[Tensor], *, one_host: bool) -> int:
    """Return the maximum size of a bucket (docs/dev/routes.md, measured by benchmarks/links.py).

    On one host, messages cost processor time, so few are best. Over a network, no computation overlaps the exchange of
    the last bucket, so it should be a small share of all gradients.
    """
    num_bytes = sum(param.numel() * param.element_size() for param in params)
    return MAX_BYTES if one_host else min(MAX_BYTES, max(LEAST_BYTES, num_bytes // NUM_BUCKETS))


def build_buckets(
    params: Sequence[Tensor], dtypes: Sequence[torch.dtype], owners: Sequence[int | None], cap_bytes: int
) -> list[Bucket]:
    """Fill buckets in reverse order of the models' parameters, which is roughly the order of a backward pass.

    The parameters of a bucket have one dtype, device and owner.

    Args:
        dtypes: per parameter, the dtype in which its gradient is exchanged.
        owners: per parameter, the rank that gets its sum; None: all ranks.
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
    return [_build_bucket(indices, params, dtypes[indices[0]], owners[indices[0]]) for indices in groups]


def _build_bucket(
    indices: Sequence[int], all_params: Sequence[Tensor], dtype: torch.dtype, owner: int | None
) -> Bucket:
    params = [all_params[i] for i in indices]
    align = ALIGN_BYTES // params[0].element_size()
    *offsets, num_elements = accumulate((-(-param.numel() // align) * align for param in params), initial=0)
    return Bucket(indices, params, offsets, [*map(dense_strides, params)], num_elements, owner, dtype)


def dense_strides(param: Tensor) -> tuple[int, ...]:
    """Return the parameter's strides if it is dense, else those of a contiguous tensor."""
    stride: tuple[int, ...] = torch.empty_like(param, device="meta").stride()
    return stride
