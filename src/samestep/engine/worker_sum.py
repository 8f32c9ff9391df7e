"""Sums what workers have changed in the parameters, in place of gradients: a step is a round of DiLoCo.

Douillard et al. 2023, "DiLoCo: Distributed low-communication training of language models". A worker is a leaf of the
canonical tree. It begins with the parameters of the step, and makes inner steps from its own micro-batches. The
parameters at the beginning minus those at its end take the place of its gradient, so that the sum over all workers, its
exchange and its average are those of gradients.
"""

from typing import Protocol

import torch
from torch import Tensor

from samestep.engine.control import Control
from samestep.engine.exchange import Exchange, ReductionPlan
from samestep.engine.leaf import Grads, ParameterGuard, PartialSums, average, drop_grads
from samestep.engine.tree_sum import TreeSum, lay_out
from samestep.plan.tree import build_layout
from samestep.torch_internals import copy_all, subtract_all


class WorkerUpdates(Protocol):
    """The inner optimizer of workers, with a state for each of them.

    Attributes:
        count: the number of workers, of all ranks.
        inner_steps: of each worker in a step.
    """

    count: int
    inner_steps: int

    def update(self, worker: int) -> None:
        """Update the parameters from their gradients, with the state of a worker."""


class WorkerSum:
    """The sum of this rank's workers, with the methods of `TreeSum`.

    Args:
        plan: exchanges what workers have changed.
        inner_plan: sums the gradients of an inner step.
        exchange: with the other ranks; None if there are none.

    Attributes:
        used: as in `TreeSum`.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        inner_plan: ReductionPlan,
        partial_sums: PartialSums,
        exchange: Exchange | None,
        workers: WorkerUpdates,
    ) -> None:
        self._plan = plan
        self._inner_plan = inner_plan
        self._partial_sums = partial_sums
        self._exchange = exchange
        self._workers = workers
        self.used = 0
        self._leaf_size = partial_sums.layout.leaf_size
        self._num_accumulated = self._leaf_size // workers.inner_steps
        self._start = [param.detach().clone() for param in plan.params]
        self._shared = ParameterGuard(
            ["a parameter that no optimizer holds (of an averaged model?)"] * len(plan.untrained), plan.untrained
        )
        self._changes: Grads = []  # of the last worker
        self._begin_inner_step()

    def _begin_inner_step(self) -> None:
        self._inner_plan.guard.begin()
        self._inner = TreeSum(self._inner_plan, PartialSums(build_layout(self._num_accumulated, 1), 0), None)
        self._weight = 0.0

    def backward(self, v: int, loss: Tensor | None, factor: float | Tensor | None, wanted: set[int] | None) -> float:
        """Run the backward pass of micro-batch v, see `TreeSum.backward`."""
        if factor is not None:
            self._weight += float(factor)
        return self._inner.backward(v % self._num_accumulated, loss, factor, wanted)

    def close(self, v: int) -> None:
        """End micro-batch v, see `TreeSum.close`. With its last one, an inner step or a worker ends."""
        self._inner.close(v % self._num_accumulated)
        worker, position = divmod(v, self._leaf_size)
        num_closed = position + 1  # of the worker's
        if num_closed % self._num_accumulated == 0:
            self._update(worker)
            if num_closed == self._leaf_size:
                self._end_worker(worker)
            self._begin_inner_step()

    def _update(self, worker: int) -> None:
        """Update the parameters from the mean gradient of the inner step, unless none of its losses has a weight."""
        self.used |= self._inner.used
        grads = self._inner.complete_alone()
        if self._weight:
            for param, grad in zip(self._plan.params, average(grads, b"", 1 / self._weight), strict=True):
                param.grad = grad
            self._workers.update(worker)
        self._shared.check()
        drop_grads(self._plan.all)

    def _end_worker(self, worker: int) -> None:
        """Take what a worker has changed, and restore the parameters for the next one."""
        with torch.no_grad():
            changes = self._plan.narrow([*subtract_all(self._start, self._plan.params)])
            copy_all(self._plan.params, self._start)
        if worker == self._partial_sums.held[-1]:
            self._changes = changes
        else:
            self._partial_sums.fold(worker, changes)

    def finish(self, control: Control) -> tuple[list[Control], Grads]:
        """Complete the sums, see `Exchange.finish`."""
        if self._exchange is None:
            return [control], lay_out(self._partial_sums.complete(self._changes), self._plan)
        for i in self._plan.bucket_of:
            self._exchange.pack(i, self._changes[i])
        return self._exchange.finish(control)
