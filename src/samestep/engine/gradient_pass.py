"""One pass over a step's micro-batches, which computes the gradient of the whole batch from all ranks' losses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.engine.buffers import Buffers, refuse_lone_sample
from samestep.engine.control import Control, Vote
from samestep.engine.exchange import Sums
from samestep.engine.folding import Grads
from samestep.engine.logged_values import LoggedNames, Means
from samestep.engine.losses import PassLosses
from samestep.engine.precision import Precision
from samestep.engine.reducer import Reducer
from samestep.engine.reduction_pass import ReductionPass
from samestep.engine.sharded_pass import ShardedPass
from samestep.errors import Error, InvalidValue, UsageError
from samestep.plan.tree import build_layout
from samestep.torch_internals import get_local
from samestep.world.group import Group

Inspect = Callable[[int, Tensor], None]  # gets the number of the parameter, and the gradient


@dataclass(frozen=True)
class PassContext:
    """What all passes of a run have in common.

    Attributes:
        modules: the prepared models by name.
        group: the ranks.
        precision: scales losses, and accepts gradients.
        micro_batch_size: samples of a whole micro-batch.
        buffers: of the models.
        logged: names of logged values.
    """

    modules: Mapping[str, nn.Module]
    group: Group
    precision: Precision
    micro_batch_size: int
    buffers: Buffers
    logged: LoggedNames


@dataclass
class PassReport:
    """What all ranks have contributed to a pass; the same on every rank.

    Attributes:
        votes: vote of each rank.
        fingerprints: fingerprint of the samples, per micro-batch of the step.
        logged: logged values, per micro-batch of the step; empty if no rank has logged a value yet.
        weights: per micro-batch of the step; `NOT_CALLED` without a step.backward.
        sums: of the gradients.
        grads: averaged gradients. This and what follows is set by `complete`.
        loss: weighted average over the whole batch; None if the total weight is 0.
        buffers: the numbers and new values of changed buffers.
        error: why the pass cannot be applied, on all ranks.
    """

    votes: list[Vote]
    fingerprints: list[int]
    logged: Means
    weights: list[float]
    sums: Sums
    grads: Grads = field(default_factory=list)
    loss: float | None = None
    buffers: Sequence[tuple[int, Tensor]] = ()
    error: Error | None = None


class GradientPass:
    """A pass over a step's micro-batches.

    For each of this rank's micro-batches `open`, `backward` and `close`, then `exchange`, `complete`
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
        self._losses = PassLosses(step, sizes, layout, self.held)
        # A power of two, which changes no bit. If the number of micro-batches is one too, the sum is then the mean.
        self._scale = context.precision.scale / 2 ** (layout.num_micro_batches - 1).bit_length()
        context.buffers.begin(layout)
        self._sum = reducer.begin(layout, num_buffers=context.buffers.num_buffers, num_names=len(context.logged.names))
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
        self._sum.release()
        self._reducer.forget_memory()
        self._context.buffers.forget_memory()

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
        (self._sum if self._is_taken(v) else self._reducer.inspecting).open(v)
        self._reducer.hooks.open()

    def backward(self, loss: Tensor, weight: float | Tensor | None, model: nn.Module | None) -> float:
        """Run the backward of the open micro-batch. Arguments and errors as for `Step.backward`.

        Returns:
            The seconds in which it waited for other ranks.
        """
        self.refuse_failed()
        waited_s = self._sum.waited_s
        wanted = None if model is None else self._find_wanted(model)
        own = self._losses.add(self._v, loss, weight)
        has_weight = isinstance(own, Tensor) or bool(own)
        factor = own / self._context.micro_batch_size * self._scale if has_weight else 1.0
        run = partial(self._reducer.hooks.backward, loss, factor)
        if isinstance(self._sum, ShardedPass):
            # On every rank, even of a loss that does not count: all ranks take part in the exchange.
            self._sum.backward(self._v, wanted, partial(run, None), has_weight=has_weight)
        elif has_weight and self._sum.is_sending and self._v in self.held:
            run(partial(self._receive, self._sum, wanted))
        elif has_weight:
            run(None)
            self._take_all(self._sum, wanted)
        return self._sum.waited_s - waited_s

    def _receive(self, reduction: ReductionPass, wanted: set[int] | None, i: int, grad: Tensor) -> None:
        """Pass on a gradient. `wanted`: the numbers of those to keep; None: all."""
        if wanted is not None and i not in wanted:
            self._reducer.plan.params[i].grad = None
            return
        if self._inspect is not None:
            self._inspect(i, grad)
        reduction.take(i, grad)

    def _take_all(self, reduction: ReductionPass, wanted: set[int] | None) -> None:
        """Pass on all gradients, after the backward pass. Arguments as for `_receive`."""
        for i, param in enumerate(self._reducer.plan.params):
            if (grad := param.grad) is None:
                continue
            if wanted is not None and i not in wanted:
                param.grad = None
                continue
            if grad.layout is not torch.strided:
                param.grad = grad = grad.to_dense()  # a sparse one has other rows on each rank
            if self._inspect is not None:
                self._inspect(i, grad)
        if self._v in self.held:
            reduction.take_all()

    def _find_wanted(self, model: nn.Module) -> set[int]:
        """Return the numbers of the trained parameters of a prepared model."""
        plain = getattr(model, "_orig_mod", model)
        modules = self._context.modules
        name = next((name for name, module in modules.items() if module is model or module is plain), None)
        if name is None:
            raise InvalidValue(
                "step.backward(model=...) got a model that was not passed to run.prepare: pass it there, too",
                code="SS203",
            )
        # By name, too: a gathered model of FSDP2 has other parameters. By id: a shared one has the other model's name.
        own = {id(param) for param in plain.parameters()}
        plan = self._reducer.plan
        wanted = {
            i
            for i, (path, param) in enumerate(zip(plan.names, plan.params, strict=True))
            if param.requires_grad and (id(param) in own or path.startswith(f"{name}."))
        }
        if not wanted:
            raise InvalidValue(
                f"step.backward(model=...) in step {self._step} got a model without trained parameters: "
                "pass its optimizer to run.prepare, and set requires_grad of its parameters",
                code="SS203",
            )
        return wanted

    def refuse_failed(self) -> None:
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

    def close(self) -> None:
        """End the open micro-batch: fold its gradients and its buffers into those of the micro-batches before it."""
        v = self._v
        self.refuse_failed()
        self._inspect = None
        self._reducer.hooks.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
        (self._sum if self._is_taken(v) else self._reducer.inspecting).close(v)
        if v in self.held:
            self._context.buffers.fold(v)
        else:
            self._context.buffers.undo()

    def exchange(self, vote: Vote, fingerprints: list[int], logged: Means) -> PassReport:
        """Sum the gradients over all ranks, and gather the other contributions of each rank.

        Args:
            vote, fingerprints, logged: contributions of this rank; the last two per micro-batch.

        Raises:
            InvalidValue: a weight is out of range.
            RuntimeError: another rank is gone.
        """
        context = self._context
        losses, weights = self._losses.read()
        values, counts = context.logged.tabulate(logged)
        control = Control(
            vote=vote,
            has_new_names=context.logged.has_new(logged),
            losses=losses,
            weights=weights,
            fingerprints=fingerprints,
            buffers=context.buffers.pack(),
            values=values,
            counts=counts,
        )
        sums = self._sum.finish(control)
        return PassReport(
            votes=[control.vote for control in sums.controls],
            fingerprints=self._layout.sort(control.fingerprints for control in sums.controls),
            logged=context.logged.collect(logged, sums.controls, context.group, self._layout),
            weights=self._layout.sort(control.weights for control in sums.controls),
            sums=sums,
        )

    def complete(self, report: PassReport) -> None:
        """Average the gradients, and exchange the buffers. An error in the losses is left to `apply`.

        Raises:
            RuntimeError: another rank is gone.
        """
        sums = report.sums
        try:
            total, report.loss = self._losses.average(sums.controls)
        except Error as error:  # the same on all ranks
            report.error = error
            return
        plan = self._reducer.plan
        if total:
            report.grads = sums.average(plan, self._context.micro_batch_size / self._scale / total)
        else:
            report.grads = [None] * len(plan.params)
        report.buffers = self._context.buffers.exchange([control.buffers for control in sums.controls])

    def apply(self, report: PassReport) -> bool:
        """Leave the averaged gradient in `.grad`, change the buffers, and add the new names of logged values.

        Does not wait for other ranks, unless each has a part of the gradients only.

        Returns:
            Whether `.grad` holds gradients.

        Raises:
            Error: a loss is not finite, or no parameter got a gradient.
        """
        context = self._context
        context.logged.add_new()
        if report.error is not None:
            raise report.error
        self._sum.assign(report.grads)
        has_gradients = report.loss is not None
        if has_gradients and not self._number and not report.sums.has_gradients:
            raise UsageError(
                f"no trained parameter got a gradient in step {self._step}: compute the loss from the models "
                "that were passed to run.prepare, and do not detach it from them",
                code="SS205",
            )
        if not self._accepts_gradients():
            has_gradients = False
            for param in self._reducer.plan.params:
                param.grad = None
        context.buffers.finish(report.buffers)
        return has_gradients

    def _accepts_gradients(self) -> bool:
        """Return whether an update may use the gradients in `.grad`, the same on all ranks."""
        context = self._context
        plan = self._reducer.plan
        grads = (get_local(param.grad) for param in plan.params if param.grad is not None)
        if not plan.is_divided:
            return context.precision.accepts(grads)
        return context.precision.accepts(grads, lambda is_finite: all(context.group.gather_number(is_finite)))
