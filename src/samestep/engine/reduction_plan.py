"""What all passes over the same parameters have in common."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from samestep.engine.buckets import Bucket, build_buckets, choose_cap_bytes, dense_strides
from samestep.engine.leaf import GradientHooks
from samestep.engine.sharded_unit import ShardedModels
from samestep.world.group import Group

G = TypeVar("G", bound=Tensor | None)


@dataclass(frozen=True, eq=False)
class ReductionPlan:
    """The parameters whose gradients are summed, and how they are exchanged.

    Attributes:
        names, params: of the parameters, in the models' order.
        untrained: parameters that no optimizer holds. Their gradients are dropped.
        strides: per parameter, the strides of its sum.
        buckets: in the order in which they are exchanged.
        bucket_of: per parameter, the number of its bucket.
        owners: per parameter, the rank that gets its sum; None: all ranks get all sums.
        models: the models, if their parameters are sharded.
        exchange_dtype: the dtype to which gradients of float32 and their partial sums are rounded, so that they are
            exchanged in it; None: they are not.
    """

    names: Sequence[str]
    params: Sequence[Tensor]
    untrained: Sequence[Tensor]
    strides: list[tuple[int, ...]]
    buckets: Sequence[Bucket]
    bucket_of: Mapping[int, int]
    owners: Sequence[int] | None
    models: ShardedModels | None
    exchange_dtype: torch.dtype | None

    @cached_property
    def all(self) -> Sequence[Tensor]:
        """The parameters with those that no optimizer holds."""
        return [*self.params, *self.untrained]

    def narrow(self, grads: list[G]) -> list[G]:
        """Return gradients in the dtype in which they are exchanged."""
        dtype = self.exchange_dtype
        if dtype is None:
            return grads
        narrowed: list[Any] = [None if grad is None else grad.to(choose_dtype(grad, dtype)) for grad in grads]
        return narrowed

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

    @cached_property
    def is_divided(self) -> bool:
        """Whether each rank gets the sums of a part of the parameters only."""
        return self.owners is not None or self.models is not None


def build_reduction_plan(
    trained: Sequence[tuple[str, Tensor]],
    group: Group,
    *,
    untrained: Sequence[Tensor] = (),
    owners: Sequence[int] | None = None,
    models: ShardedModels | None = None,
    exchange_dtype: torch.dtype | None = None,
) -> ReductionPlan:
    """Return the plan for these parameters.

    Args:
        trained: (name, parameter) in the models' order.
        untrained, owners, models, exchange_dtype: see `ReductionPlan`.
    """
    params = [param for _, param in trained]
    in_buckets = params if models is None else []
    buckets = build_buckets(
        in_buckets,
        [choose_dtype(param, exchange_dtype) for param in in_buckets],
        [None] * len(params) if owners is None else owners,
        choose_cap_bytes(params, one_host=group.is_on_one_host),
    )
    return ReductionPlan(
        names=[name for name, _ in trained],
        params=params,
        untrained=untrained,
        strides=[*map(dense_strides, in_buckets)],
        buckets=buckets,
        bucket_of={i: number for number, bucket in enumerate(buckets) for i in bucket.indices},
        owners=owners,
        models=models,
        exchange_dtype=exchange_dtype,
    )


def choose_dtype(tensor: Tensor, exchange_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor's gradient is exchanged. `exchange_dtype`: see `ReductionPlan`."""
    return exchange_dtype if exchange_dtype is not None and tensor.dtype == torch.float32 else tensor.dtype
