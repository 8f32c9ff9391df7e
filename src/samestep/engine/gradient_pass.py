"""One pass over a step's micro-batches, which computes the gradient of the whole batch from all ranks' losses."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.engine.backward import Receive
from samestep.engine.buffers import BatchNormStatistics, OtherBuffers, refuse_lone_sample
from samestep.engine.control import Control, Vote
from samestep.engine.exchange import Sums
from samestep.engine.folding import Grads, add
from samestep.engine.logged_values import LoggedNames, Means
from samestep.engine.losses import Losses, PassLosses, Term, find_slot
from samestep.engine.precision import Precision
from samestep.engine.reducer import Reducer
from samestep.engine.reduction_pass import FurtherPass
from samestep.engine.reduction_plan import ReductionPlan
from samestep.engine.sharded_pass import ShardedPass
from samestep.errors import Error, InvalidValue, UsageError
from samestep.plan.tree import build_layout
from samestep.torch_internals import get_local
from samestep.world.group import Group

Inspect = Callable[[int, int, Tensor], None]  # gets the numbers of the parameter and of the loss, and the gradient


@dataclass(frozen=True)
class PassContext:
    """What all passes of a run have in common.

    Attributes:
        modules: the prepared models by name. Slot i holds losses of the i-th model, slot 0 losses of all models.
        group: the ranks.
        precision: scales losses, and accepts gradients.
        micro_batch_size: samples of a whole micro-batch.
        statistics, buffers: of the models.
        logged: names of logged values.
    """

    modules: Mapping[str, nn.Module]
    group: Group
    precision: Precision
    micro_batch_size: int
    statistics: BatchNormStatistics
    buffers: OtherBuffers
    logged: LoggedNames

    def undo_buffers(self) -> None:
        """Restore the values that all buffers had when the pass or the evaluation began."""
        self.buffers.undo()
        self.statistics.undo()


class PassReport(NamedTuple):
    """The contributions of all ranks to a pass besides gradients; the same on every rank.

    Attributes:
        votes: vote of each rank.
        fingerprints: fingerprint of the samples, per micro-batch of the step.
        logged: logged values, per micro-batch of the step; empty if no rank has logged a value yet.
        weights: per micro-batch of the step, per slot; `NOT_CALLED` without a step.backward.
    """

    votes: list[Vote]
    fingerprints: list[int]
    logged: Means
    weights: list[list[float]]


@dataclass(frozen=True)
class Outcome:
    """What a pass changes when `apply` is called, complete on this rank.

    Attributes:
        grads: averaged gradients.
        means: average losses of the slots that have any.
        has_any: whether a parameter gets a gradient.
        parts: the ranks' parts of BatchNorm's statistics.
        buffers: new values of the other buffers; None if no micro-batch has changed one.
        error: why the pass cannot be applied, on all ranks.
    """

    grads: Grads
    means: Sequence[float]
    has_any: bool
    parts: Sequence[NDArray[np.float64]]
    buffers: Sequence[Tensor] | None
    error: Error | None = None


class PassResult(NamedTuple):
    """The result of a pass.

    Attributes:
        loss: weighted average over the whole batch; None if the total weight is 0.
        has_gradients: whether `.grad` holds gradients.
    """

    loss: float | None
    has_gradients: bool


class GradientPass:
    """A pass over a step's micro-batches.

    For each of this rank's micro-batches `open`, `backward` (once per model) and `close`, then `exchange`, `complete`
    and `apply`. Until `apply`, the state that snapshots contain does not change, and `repeat` can begin the pass anew.

    Before its own micro-batches and between `exchange` and `apply`, a rank can also open micro-batches of other ranks.
    They change nothing; only the function given to `open` gets their gradients.

    Args:
        step: number of the step, for messages.
        sizes: number of samples of each micro-batch of the step.
        number: number of the pass over this step.

    Attributes:
        held: this rank's micro-batches.
        fillers: micro-batch to open after them.
    """

    def __init__(self, context: PassContext, reducer: Reducer, step: int, sizes: Sequence[int], number: int) -> None:
        rank = context.group.rank
        layout = build_layout(len(sizes), context.group.world_size, reducer.plan.shards is not None)
        self.held = layout.ranges[rank]
        self.fillers = layout.find_fillers(rank)
        self._context = context
        self._reducer = reducer
        self._layout = layout
        self._step = step
        self._sizes = sizes
        self._number = number
        self._losses = PassLosses(step, sizes, layout, self.held, len(context.modules) + 1)
        # A power of two, which changes no bit. If the number of micro-batches is one too, the sum is then the mean.
        self._scale = context.precision.scale / 2 ** (layout.num_micro_batches - 1).bit_length()
        self._first = reducer.begin(layout, num_names=len(context.logged.names))
        self._further: list[FurtherPass] = []  # of the second loss, the third, ...
        context.statistics.begin(layout, rank)
        context.buffers.begin()
        # Of the open micro-batch:
        self._v = 0
        self._hooks: Sequence[RemovableHandle] = ()
        self._inspect: Inspect | None = None

    @property
    def only_collects(self) -> bool:
        """Whether the script has called step.backward in none of this rank's micro-batches, and there are some."""
        return self._losses.are_missing

    def release(self) -> None:
        """Release the messages of an exchange that has failed: they keep connections to the other ranks open."""
        self._first.release()
        self._further.clear()
        self._reducer.forget_memory()

    def repeat(self) -> "GradientPass":
        """Return a new pass in place of this one, with the group's present ranks."""
        return GradientPass(self._context, self._reducer, self._step, self._sizes, self._number)

    def open(self, v: int, inspect: Inspect | None = None) -> None:
        """Begin micro-batch v. `inspect` is called with each of its gradients, before it is added to others."""
        self._v = v
        self._inspect = inspect
        self._losses.open(v)
        if self._sizes[v] == 1:
            self._hooks = refuse_lone_sample(self._context.modules, self._step, v, self._context.group.rank)
        (self._first if self._is_taken(v) else self._reducer.inspecting).open(v)
        self._reducer.hooks.open()

    def backward(self, loss: Losses, weight: float | Tensor | None, model: nn.Module | None) -> float:
        """Run the backward of the open micro-batch. Arguments and errors as for `Step.backward`.

        Returns:
            The seconds in which it waited for other ranks.
        """
        self._refuse_failed()
        context = self._context
        waited_s = self._first.waited_s
        slot = 0 if model is None else find_slot(context.modules, model)
        terms = self._losses.add(self._v, slot, loss, weight)
        if isinstance(self._first, ShardedPass):
            self._backward_sharded(self._first, terms, slot)
            return 0.0
        # The first loss comes last, because its backward frees the graph and starts the exchange.
        for k, (term, own) in reversed([*enumerate(terms)]):
            if isinstance(own, Tensor) or own:
                self._run_backward(k, term, own / context.micro_batch_size * self._scale, slot)
        return self._first.waited_s - waited_s

    def _backward_sharded(self, sharded: ShardedPass, terms: Sequence[Term], slot: int) -> None:
        """Run the backward on every rank, even of a loss that does not count: all ranks take part in the exchange."""
        if len(terms) > 1:
            raise UsageError(
                'step.backward got several losses with weights of their own, which shard="fsdp2" does not support: '
                'weight and add them, or use shard="optimizer"',
                code="SS608",
            )
        ((term, own),) = terms
        has_weight = isinstance(own, Tensor) or bool(own)
        factor = own / self._context.micro_batch_size * self._scale if has_weight else 1.0
        run = partial(self._reducer.hooks.backward, term, factor, (), sharded.take)
        sharded.backward(self._v, slot, run, has_weight=has_weight)

    def _refuse_failed(self) -> None:
        """Raise UsageError if a backward pass of the open micro-batch has failed, and the script has caught the error.

        Some of its gradients may have been sent, so it cannot be undone.
        """
        if failure := self._reducer.hooks.failure:
            raise UsageError(
                f"step.backward raised {failure} in micro-batch {self._v} of step {self._step}, and the script "
                "continued with an incomplete gradient: let the error end the run, which resumes from the newest "
                "snapshot; if memory is short, choose a smaller micro_batch_size instead of another try",
                code="SS202",
            )

    def _is_taken(self, v: int) -> bool:
        """Return whether micro-batch v takes part in the exchange, if only as a filler."""
        return v in self.held or v in self.fillers

    def _run_backward(self, k: int, loss: Tensor, factor: float | Tensor, slot: int) -> None:
        reducer = self._reducer
        inputs = list_params(self._context.modules, reducer.plan, slot) if slot else ()
        if slot and not inputs:  # for autograd, an empty list means all parameters
            raise InvalidValue(
                f"step.backward(model=...) in step {self._step} got a model without trained parameters: "
                "pass its optimizer to run.prepare, and set requires_grad of its parameters",
                code="SS203",
            )
        if slot or k:
            reducer.checkpoints.check(loss, (self._number, slot, k))
        run = reducer.hooks.differentiate if k else reducer.hooks.backward
        run(loss, factor, inputs, self._find_receiver(k))

    def _find_receiver(self, k: int) -> Receive:
        """Return what gets the gradients of loss k in the open micro-batch."""
        receive = self._first.take
        inspect = self._inspect
        if self._v not in self.held:
            receive = self._reducer.inspecting.take
        elif k:
            receive = self._find_further(k).take
        if inspect is None:
            return receive

        def inspect_and_receive(i: int, grad: Tensor) -> None:
            inspect(i, k, grad)
            receive(i, grad)

        return inspect_and_receive

    def _find_further(self, k: int) -> FurtherPass:
        while len(self._further) < k:
            self._further.append(self._reducer.begin_further(self._layout))
        return self._further[k - 1]

    def close(self) -> None:
        """End the open micro-batch: fold its gradients and its buffers into those of the micro-batches before it."""
        context = self._context
        v = self._v
        self._refuse_failed()
        self._inspect = None
        self._reducer.hooks.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
        (self._first if self._is_taken(v) else self._reducer.inspecting).close(v)
        if v not in self.held:
            context.undo_buffers()
            return
        for further in self._further:
            further.close(v)
        context.statistics.fold()
        context.buffers.fold(v)

    def exchange(self, vote: Vote, fingerprints: list[int], logged: Means) -> tuple[PassReport, Sums]:
        """Sum the gradients over all ranks, and gather the other contributions of each rank.

        Args:
            vote, fingerprints, logged: contributions of this rank; the last two per micro-batch.

        Returns:
            What all ranks contributed, and the sums for `complete`.

        Raises:
            InvalidValue: a weight is out of range.
            RuntimeError: another rank is gone.
        """
        context = self._context
        losses, weights = self._losses.read(0)
        values, counts = context.logged.tabulate(logged)
        control = Control(
            vote=vote,
            buffers_changed=context.buffers.changed,
            has_new_names=context.logged.has_new(logged),
            losses=losses,
            weights=weights,
            fingerprints=fingerprints,
            used=b"",
            parts=context.statistics.parts(),
            num_losses=self._losses.num_losses,
            values=values,
            counts=counts,
        )
        sums = self._first.finish(control)
        report = PassReport(
            votes=[control.vote for control in sums.controls],
            fingerprints=self._layout.sort(control.fingerprints for control in sums.controls),
            logged=context.logged.collect(logged, sums.controls, context.group, self._layout),
            weights=self._layout.sort(control.weights for control in sums.controls),
        )
        return report, sums

    def complete(self, sums: Sums) -> Outcome:
        """Average the gradients, and exchange what else `apply` needs. An error in the losses is left to `apply`.

        Raises:
            RuntimeError: another rank is gone.
        """
        try:
            return self._complete(sums)
        except Error as error:  # the same on all ranks
            return Outcome([], [], False, [], None, error)

    def _complete(self, sums: Sums) -> Outcome:
        context = self._context
        controls = sums.controls
        grads, means, has_any = self._average(sums)
        for k in range(1, max([control.num_losses for control in controls])):
            # Copies, because the exchange of the next loss uses the same memory.
            before = [None if grad is None else grad.clone() for grad in grads]
            more = self._finish_further(k, controls)
            grads, more_means, has_more = self._average(more)
            has_any |= has_more
            grads = [add(one, other) for one, other in zip(grads, before, strict=True)]
            means += more_means
        buffers: Sequence[Tensor] | None = None
        for rank, control in enumerate(controls):
            if control.buffers_changed:
                buffers = context.buffers.copy_first()
                context.group.broadcast_tensors(buffers, rank)
        return Outcome(grads, means, has_any, [control.parts for control in controls], buffers)

    def apply(self, outcome: Outcome) -> PassResult:
        """Leave the averaged gradient in `.grad`, advance the buffers, and add the new names of logged values.

        Does not wait for other ranks, unless each has a part of the gradients only.

        Raises:
            Error: a loss is not finite, or no parameter got a gradient.
        """
        context = self._context
        context.logged.add_new()
        if outcome.error is not None:
            raise outcome.error
        plan = self._reducer.plan
        means = outcome.means
        self._first.assign(outcome.grads)
        has_gradients = bool(means)
        if means and not self._number and not outcome.has_any:
            raise UsageError(
                f"no trained parameter got a gradient in step {self._step}: compute the loss from the models "
                "that were passed to run.prepare, and do not detach it from them",
                code="SS205",
            )
        if not self._accepts_gradients():
            has_gradients = False
            for param in plan.params:
                param.grad = None
        context.statistics.finish(outcome.parts)
        if outcome.buffers is not None:
            context.buffers.finish(outcome.buffers)
        return PassResult(math.fsum(means) if means else None, has_gradients)

    def _average(self, sums: Sums) -> tuple[Grads, list[float], bool]:
        """Return the averaged gradients, the average losses of the slots that have any, and `Sums.has_gradients`."""
        plan = self._reducer.plan
        totals, means = self._losses.average(sums.controls)
        unit = self._context.micro_batch_size / self._scale
        inverses = [unit / total if total else 0.0 for total in totals]
        return sums.average(plan, inverses), means, sums.has_gradients(plan, inverses)

    def _accepts_gradients(self) -> bool:
        """Return whether an update may use the gradients in `.grad`, the same on all ranks."""
        context = self._context
        plan = self._reducer.plan
        grads = (get_local(param.grad) for param in plan.params if param.grad is not None)
        if not plan.is_divided:
            return context.precision.accepts(grads)
        return context.precision.accepts(grads, lambda is_finite: all(context.group.gather_number(is_finite)))

    def _finish_further(self, k: int, controls: Sequence[Control]) -> Sums:
        """Sum the gradients of loss k over all ranks."""
        losses, weights = self._losses.read(k)
        own = controls[self._context.group.rank]
        sums = self._find_further(k).finish(replace(own, losses=losses, weights=weights))
        self._losses.check_same_number(controls, sums.controls)
        return sums


def list_params(modules: Mapping[str, nn.Module], plan: ReductionPlan, slot: int) -> tuple[nn.Parameter, ...]:
    """Return the trained parameters of one model. Raises Error if it shares one with another model."""
    held = {id(param) for param in list(modules.values())[slot - 1].parameters()}
    pairs = zip(plan.params, plan.slots, strict=True)
    params = [(param, home) for param, home in pairs if id(param) in held and param.requires_grad]
    if any(home != slot for _, home in params):
        raise InvalidValue(
            "step.backward(model=...) got a model that shares parameters with another: add the losses", code="SS203"
        )
    return tuple(param for param, _ in params)
