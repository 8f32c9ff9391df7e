"""Sums gradients: folds a rank's micro-batches, exchanges the parts of all ranks.

Uses post-accumulate-grad hooks and flat buckets over torch.distributed, as in DDP. Unlike DDP, it is prepared in the
backward pass and not in the forward pass, sums along the canonical tree (`plan/tree.py`), and supports idle ranks and
unused parameters.
"""

from samestep.engine.backward import GradientHooks
from samestep.engine.exchange_memory import LastMemory
from samestep.engine.reduction_pass import InspectingPass, ReductionPass
from samestep.engine.reduction_plan import ReductionPlan
from samestep.engine.script_guards import ParameterGuard
from samestep.engine.sharded_pass import ShardedPass
from samestep.plan.tree import Layout
from samestep.world.group import Group


class Reducer:
    """Holds what passes over the same parameters share: hooks, and the memory for exchanges.

    A pass over a step's micro-batches is `begin`, then for each of this rank's micro-batches `open` and `close` of the
    pass, with `hooks.backward` in between, then `finish` and `assign` of the pass.

    Attributes:
        plan: the parameters, and how their gradients are exchanged.
        hooks: run backward passes.
        guard: refuses changes of parameters.
        inspecting: the pass over micro-batches of other ranks.
    """

    def __init__(self, plan: ReductionPlan, group: Group) -> None:
        self.plan = plan
        self.hooks = GradientHooks(plan.names, plan.params)
        self.guard = ParameterGuard(plan.names, plan.params)
        self.inspecting = InspectingPass(plan)
        self._group = group
        self._memory = LastMemory(plan, group)

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        self.hooks.remove()

    def begin(self, layout: Layout, *, num_buffers: int = 0, num_names: int = 0) -> ReductionPass | ShardedPass:
        """Begin a pass over a step's micro-batches.

        Args:
            num_buffers, num_names: numbers of buffers and of logged values in the control block.
        """
        for param in (*self.plan.params, *self.plan.untrained):
            param.grad = None
        self.guard.begin()
        memory = self._memory.find(layout, num_buffers, num_names)
        if memory is None:
            self.hooks.remove()  # they are for messages
        else:
            self.hooks.attach()
        if self.plan.shards is not None and memory is not None:
            return ShardedPass(self.plan, self.plan.shards, self._group, memory, self.guard)
        return ReductionPass(self.plan, layout, self._group, memory, self.guard)

    def forget_memory(self) -> None:
        """Release the memory for exchanges, and the messages in it that have not arrived."""
        self._memory.forget()
