"""Sums gradients: folds a rank's micro-batches, exchanges the parts of all ranks.

Uses post-accumulate-grad hooks and flat buckets over torch.distributed, as in DDP. Unlike DDP, it is prepared in the
backward pass and not in the forward pass, sums along the canonical tree (`plan/tree.py`), and supports idle ranks and
unused parameters.
"""

from samestep.engine.backward import GradientHooks
from samestep.engine.exchange_memory import ExchangeMemory
from samestep.engine.reduction_pass import FurtherPass, InspectingPass, ReductionPass
from samestep.engine.reduction_plan import ReductionPlan
from samestep.engine.script_guards import CheckpointGuard, ParameterGuard
from samestep.engine.sharded_pass import ShardedPass
from samestep.plan.tree import Layout
from samestep.world.group import Group


class Reducer:
    """Holds what passes over the same parameters share: hooks, and the memory for exchanges.

    A pass over a step's micro-batches is `begin`, then for each of this rank's micro-batches `open` and `close` of the
    pass, with `hooks.backward` in between (once per model), then `finish` and `assign` of the pass. Further losses,
    which have separate total weights, are summed separately: see `begin_further`.

    Attributes:
        plan: the parameters, and how their gradients are exchanged.
        hooks: run backward passes.
        guard: refuses changes of parameters.
        checkpoints: refuses reentrant checkpoints.
        inspecting: the pass over micro-batches of other ranks.
    """

    def __init__(self, plan: ReductionPlan, group: Group) -> None:
        self.plan = plan
        self.hooks = GradientHooks(plan.names, plan.params)
        self.guard = ParameterGuard(plan.names, plan.params)
        self.checkpoints = CheckpointGuard()
        self.inspecting = InspectingPass(plan)
        self._group = group
        self._memory: ExchangeMemory | None = None
        # The memory is for this number of names, and for this group: it refers to the connections.
        self._num_names = 0
        self._generation = group.generation

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        self.hooks.remove()

    def begin(self, layout: Layout, *, num_names: int = 0) -> ReductionPass | ShardedPass:
        """Begin a pass over a step's micro-batches.

        Args:
            num_names: number of logged values in the control block.
        """
        params = self.plan.params
        for param in (*params, *self.plan.untrained):
            param.grad = None
        self.guard.begin()
        self.hooks.attach()
        if (num_names, self._group.generation) != (self._num_names, self._generation):
            self._num_names, self._generation = num_names, self._group.generation
            self._memory = None
        memory = self._find_memory(layout)
        if self.plan.shards is not None and memory is not None:
            return ShardedPass(self.plan, self.plan.shards, self._group, memory, self.guard)
        return ReductionPass(self.plan, layout, self._group, memory, self.guard)

    def forget_memory(self) -> None:
        """Release the memory for exchanges, and the messages in it that have not arrived."""
        self._memory = None

    def begin_further(self, layout: Layout) -> FurtherPass:
        """Begin the sum of a further loss in the current pass, in whatever micro-batch it occurs first."""
        return FurtherPass(self.plan, layout, self._group, self._memory)

    def _find_memory(self, layout: Layout) -> ExchangeMemory | None:
        if self._group.world_size == 1:
            return None
        memory = self._memory
        if memory is None or memory.is_kept or memory.layout != layout:
            self._memory = memory = None  # first, so that there is only one: the last step of an epoch is shorter
            self._memory = memory = ExchangeMemory(self.plan, layout, self._group, self._num_names)
        return memory
