"""Averages the gradients of a run's steps, pass by pass."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from samestep.engine.buffers import Buffers
from samestep.engine.gradient_pass import GradientPass, PassContext
from samestep.engine.logged_values import LoggedNames
from samestep.engine.ownership import Ownership
from samestep.engine.precision import Precision
from samestep.engine.reducer import Reducer
from samestep.engine.reduction_plan import ReductionPlan, build_reduction_plan
from samestep.engine.shards import ShardedModels
from samestep.plan.tree import build_layout
from samestep.world.group import Group


class GradientAverager:
    """Averages gradients for the models of one run: one `GradientPass` after the other.

    Args:
        modules: the prepared models by name.
        group: the ranks.
        exact: whether to sum along the canonical tree; otherwise use the backend's all-reduce.
        bucket_cap_bytes: the largest size of a bucket of gradients; None: see `choose_cap_bytes`.
        micro_batch_size: samples of a whole micro-batch.
        models: the models, if their parameters are sharded.
        exchange_dtype: see `ReductionPlan`.

    Attributes:
        ownership: the rank that gets each parameter's gradient; None: all ranks get all gradients.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        group: Group,
        precision: Precision,
        *,
        exact: bool,
        bucket_cap_bytes: int | None,
        micro_batch_size: int,
        ownership: Ownership | None = None,
        models: ShardedModels | None = None,
        exchange_dtype: torch.dtype | None = None,
    ) -> None:
        buffers = Buffers(modules, group, exact=exact)
        self._context = PassContext(modules, group, precision, micro_batch_size, buffers, LoggedNames())
        self._exact = exact
        self._bucket_cap_bytes = bucket_cap_bytes
        self.ownership = ownership
        self._models = models
        self._exchange_dtype = exchange_dtype
        self._reducer = self._build_reducer((), ())

    @property
    def plan(self) -> ReductionPlan:
        """The parameters, and how their gradients are summed."""
        return self._reducer.plan

    def set_parameters(self, trained: Sequence[tuple[str, nn.Parameter]], untrained: Sequence[nn.Parameter]) -> None:
        """Average the gradients of these parameters from now on. Arguments as for `build_reduction_plan`."""
        self._reducer.remove()
        self._reducer = self._build_reducer(trained, untrained)

    def _build_reducer(self, trained: Sequence[tuple[str, nn.Parameter]], untrained: Sequence[nn.Parameter]) -> Reducer:
        context = self._context
        plan = build_reduction_plan(
            trained,
            context.group,
            exact=self._exact,
            bucket_cap_bytes=self._bucket_cap_bytes,
            untrained=untrained,
            owners=None if self.ownership is None else self.ownership.assign([param for _, param in trained]),
            models=self._models,
            exchange_dtype=self._exchange_dtype,
        )
        return Reducer(plan, context.group)

    def hold_buffers(self) -> None:
        """Remember all buffers, for `undo_buffers`."""
        self._context.buffers.hold()

    def undo_buffers(self) -> None:
        """Restore the values of all buffers that `hold_buffers` remembered."""
        self._context.buffers.undo()

    def free_gathered(self) -> None:
        """Free the parameters that a forward pass without a backward pass has gathered, if parameters are sharded."""
        if self._models is not None:
            self._models.free_gathered()

    def find_held(self, num_micro_batches: int) -> range:
        """Return the micro-batches that this rank computes in a step."""
        group = self._context.group
        layout = build_layout(num_micro_batches, group.world_size, self.plan.shards is not None)
        return layout.ranges[group.rank]

    def begin(self, step: int, sizes: Sequence[int], number: int) -> GradientPass:
        """Begin a pass. Arguments as for `GradientPass`."""
        return GradientPass(self._context, self._reducer, step, sizes, number)
