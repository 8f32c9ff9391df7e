"""Passes over a step's micro-batches, each of which averages the gradient of the whole batch from all ranks' losses.

With float16, losses are scaled, and a gradient that has overflowed is not used.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from samestep.engine.buffers import Buffers
from samestep.engine.control import (
    Control,
    Means,
    MicroBatchReport,
    PassReports,
    Vote,
    average_losses,
    find_logged,
)
from samestep.engine.exchange import ReductionPlan
from samestep.engine.leaf import Grads, PartialSums, RunBackward, average, drop_grads, run_backward_alone
from samestep.engine.ownership import Ownership
from samestep.engine.sharded_sum import ShardedSum
from samestep.engine.sharded_unit import ShardedModels
from samestep.engine.tree_sum import TreeSum
from samestep.engine.worker_sum import WorkerSum, WorkerUpdates
from samestep.errors import Error, InvalidValue, UsageError
from samestep.plan.tree import Layout
from samestep.torch_internals import get_total_norm, shard_like
from samestep.world.group import Group

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GROWTH_STEPS = 2000  # without an overflow, after which the loss scale is doubled
LEAST_SCALE = 2.0**-30  # no finite gradient overflows with it


class MixedPrecision:
    """float32 with or without TF32, autocast to bfloat16, or to float16 with a dynamic loss scale.

    The scale (Micikevicius et al. 2018, "Mixed precision training") is a power of two, so it changes no bit of a
    gradient that does not overflow. The reduced gradient decides whether there was an overflow, so all ranks agree.
    Such a step makes no update, and the scale is halved.

    Args:
        name: "fp32", "tf32", "bf16" or "fp16".
        device: for autocast.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._dtype = AUTOCAST_DTYPES.get(name)
        self._device_type = device.type
        self._is_scaled = self._dtype is torch.float16
        self.scale = 2.0**16 if self._is_scaled else 1.0
        self._good_steps = 0

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device_type, dtype=self._dtype)

    def accepts(self, gradients: Sequence[Tensor | None], group: Group | None = None) -> bool:
        """Return whether an update may use the reduced gradients.

        Args:
            gradients: those that this rank has, and None for other parameters.
            group: the ranks, if the gradients are divided among them.

        Raises:
            InvalidValue: they overflow at any scale.
        """
        if not self._is_scaled:
            return True
        # The largest absolute value, because a sum of squares may overflow. One read-back for all gradients.
        largest = get_total_norm([each for each in gradients if each is not None and each.numel()], math.inf)
        good = bool(largest.isfinite())
        if group is not None:
            good = all(group.gather_number(good))
        self._good_steps = self._good_steps + 1 if good else 0
        if not good:
            self.scale /= 2
            if self.scale < LEAST_SCALE:
                raise InvalidValue(
                    "the gradient is nan or infinite in fp16 at every loss scale, so that no step has an update: look "
                    'for an operation whose gradient is not finite, such as sqrt at 0, or use precision="bf16"',
                    code="SS206",
                )
        elif self._good_steps == GROWTH_STEPS:
            self.scale *= 2
            self._good_steps = 0
        return good

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a snapshot."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`, unless it is of a run in fp16 that this one continues without it."""
        if self._is_scaled:
            self.scale = state["scale"]
            self._good_steps = state["good_steps"]


class TiedParameters(Protocol):
    """Parameters that are used in several parts of a model, whose gradients are summed apart."""

    def split(self, name: str, param: nn.Parameter) -> Sequence[tuple[str, nn.Parameter]]:
        """Return a trained parameter, with its name, or one for each part in its place."""

    def merge(self) -> None:
        """Leave the sum of the gradients of its parts in the gradient of each parameter."""


@dataclass(eq=False)
class Gradients:
    """Averages the gradients of the models of one run, and what all passes have in common.

    Args:
        modules: the prepared models by name.
        group: the ranks.
        precision: scales losses, and accepts gradients.
        micro_batch_size: samples of a whole micro-batch.
        models: the models, if their parameters are sharded.
        exchange_dtype: see `ReductionPlan`.
        run_backward: see `TreeSum`.
        tied: the parameters of which several gradients are summed apart, and added at the end of a pass; None: none.
        workers: make inner steps, whose changes are averaged in place of gradients; None: there are none.

    Attributes:
        ownership: the rank that gets each parameter's gradient; None: all ranks get all gradients.
        buffers: of the models.
        logged_names: for which reports have values; the same on all ranks.
        plan: the parameters, and how their gradients are summed.
    """

    modules: Mapping[str, nn.Module]
    group: Group
    precision: MixedPrecision
    micro_batch_size: int
    ownership: Ownership | None = None
    models: ShardedModels | None = None
    exchange_dtype: torch.dtype | None = None
    run_backward: RunBackward = run_backward_alone
    tied: TiedParameters | None = None
    workers: WorkerUpdates | None = None

    def __post_init__(self) -> None:
        self.buffers = Buffers(self.modules, self.group)
        self.logged_names: list[str] = []
        self.set_parameters((), ())

    def set_parameters(self, trained: Sequence[tuple[str, nn.Parameter]], untrained: Sequence[nn.Parameter]) -> None:
        """Average the gradients of these parameters from now on. Arguments as for `ReductionPlan`."""
        owners = None if self.ownership is None else self.ownership.assign([param for _, param in trained])
        if self.tied is not None:
            parts = [self.tied.split(*each) for each in trained]
            trained = [*chain.from_iterable(parts)]
            untrained = [leaf for param in untrained for _, leaf in self.tied.split("", param)]
            if owners is not None:
                owners = [of_one for of_one, leaves in zip(owners, parts, strict=True) for _ in leaves]
        self.plan = ReductionPlan(
            trained,
            self.group,
            untrained=untrained,
            owners=owners,
            models=self.models,
            exchange_dtype=self.exchange_dtype,
        )
        if self.workers is not None:
            self.inner_plan = ReductionPlan(trained, self.group, untrained=untrained)

    def free_gathered(self) -> None:
        """Free the parameters that a forward pass without a backward pass has gathered, if parameters are sharded."""
        if self.models is not None:
            self.models.free_gathered()

    def find_wanted(self, model: nn.Module) -> set[int]:
        """Return the numbers of the trained parameters of a prepared model."""
        plain = getattr(model, "_orig_mod", model)
        prefixes = tuple(f"{name}." for name, module in self.modules.items() if module in (model, plain))
        # By name, too: a gathered model of FSDP2 has other parameters. By id: a shared one has the other model's name.
        own = {id(param) for param in plain.parameters()}
        wanted = {
            i
            for i, (path, param) in enumerate(zip(self.plan.names, self.plan.params, strict=True))
            if param.requires_grad and (id(param) in own or path.startswith(prefixes))
        }
        if not wanted:
            raise InvalidValue(
                "step.backward(model=...) got a model without trained parameters: pass it and its optimizer to "
                "run.prepare, and set requires_grad of its parameters",
                code="SS203",
            )
        return wanted


@dataclass
class Reduced:
    """The result of a pass over a step's micro-batches; the same on every rank, but for divided gradients.

    Attributes:
        votes: vote of each rank.
        reports: per micro-batch of the step.
        is_used: whether a micro-batch has used a parameter.
        logged: logged values, per micro-batch of the step; empty if no rank has logged a value yet.
        new_names: of logged values.
        grads: averaged gradients.
        total_weight: of the losses of all micro-batches.
        loss: weighted average over the whole batch; None if the total weight is 0.
        buffers: the new values of changed buffers, by number.
        error: why the pass cannot be applied, on all ranks.
    """

    votes: Sequence[Vote]
    reports: list[MicroBatchReport]
    is_used: bool
    logged: Sequence[Means] = ()
    new_names: Sequence[str] = ()
    grads: Grads = field(default_factory=list)
    total_weight: float = 0.0
    loss: float | None = None
    buffers: Mapping[int, Tensor] = field(default_factory=dict)
    error: Error | None = None


class PassAttempt:
    """One attempt at a pass over a step's micro-batches.

    For each of this rank's micro-batches `backward` and `close`, then `exchange` and `apply`. Until `apply`,
    the state that snapshots contain does not change: if a rank dies, the others drop the attempt and begin another.

    Before its own micro-batches and between `exchange` and `apply`, a rank can also compute those of other ranks. They
    change nothing.

    Args:
        step: number of the step, for messages.
        sizes: number of samples of each micro-batch of the step.
        number: number of the pass over this step.
        layout: how the ranks share the micro-batches.

    Attributes:
        held: this rank's micro-batches.
        fillers: micro-batch to compute after them.
        reports: what its micro-batches report.
        failure: to raise if a backward pass has failed, and the script has caught the error.
    """

    def __init__(self, gradients: Gradients, step: int, sizes: Sequence[int], number: int, layout: Layout) -> None:
        group = gradients.group
        rank = group.replica
        plan = gradients.plan
        workers = gradients.workers
        if workers is not None and number:
            raise UsageError(
                f"step {step} was iterated over twice, and its workers have made their inner steps: use one loop over "
                "the step with workers",
                code="SS615",
            )
        self.held = layout.ranges[rank]
        self.fillers = layout.fillers[rank]
        self._gradients = gradients
        self._layout = layout
        self._step = step
        self._number = number
        self.reports = PassReports(step, sizes, self.held)
        # A power of two, which changes no bit. If the number of micro-batches is one too, the sum is then the mean.
        self._scale = gradients.precision.scale / 2 ** (layout.num_micro_batches - 1).bit_length()
        drop_grads(plan.all)
        plan.guard.begin()
        gradients.buffers.begin(layout)
        partial_sums = PartialSums(layout, rank)
        self._sum: TreeSum | ShardedSum | WorkerSum
        exchange = None
        if group.world_size > 1:
            num_buffers, num_names = len(gradients.buffers.followed), len(gradients.logged_names)
            exchange = plan.begin_exchange(partial_sums, num_buffers, num_names)
        if workers is not None:
            self._sum = WorkerSum(plan, gradients.inner_plan, partial_sums, exchange, workers)
        elif exchange is None or plan.models is None:
            self._sum = TreeSum(plan, partial_sums, exchange, gradients.run_backward)
        else:
            self._sum = ShardedSum(plan, partial_sums, exchange)
        self.failure: UsageError | None = None

    def release(self) -> None:
        """Undo an attempt that has failed, and release its messages: they keep connections to the other ranks open."""
        del self._sum
        self._gradients.buffers.undo()
        self._gradients.plan.forget_exchange()
        self._gradients.buffers.plan.forget_exchange()

    def backward(self, v: int, loss: Tensor, weight: float | Tensor | None, model: nn.Module | None) -> float:
        """Run the backward of micro-batch v. Arguments and errors as for `Step.backward`.

        Returns:
            The seconds in which it waited for other ranks.
        """
        if self.failure is not None:
            raise self.failure
        wanted = None if model is None else self._gradients.find_wanted(model)
        own = self.reports.add_loss(v, loss, weight)
        factor = None
        if isinstance(own, Tensor) or own:
            factor = own / self._gradients.micro_batch_size * self._scale
        try:
            return self._sum.backward(v, loss, factor, wanted)
        except BaseException as error:
            # Some gradients may have been sent, so it cannot be undone.
            self.failure = UsageError(
                f"step.backward raised {type(error).__name__} in micro-batch {v} of step {self._step}, and the script "
                "continued with an incomplete gradient: let the error end the run, which resumes from the newest "
                "snapshot; if memory is short, choose a smaller micro_batch_size instead of another try",
                code="SS202",
            )
            raise

    def pass_back(self, v: int) -> float:
        """Run the backward of micro-batch v from what another rank has computed of it. See `backward`."""
        assert isinstance(self._sum, TreeSum)
        return self._sum.backward(v, None, 1.0, None)

    def end_forward(self) -> None:
        """End the forward pass of the next micro-batch, if backward passes of others follow before its own."""
        self._gradients.buffers.take()

    def end_backward(self, v: int) -> None:
        """End the backward pass of micro-batch v, after `end_forward`. It must not change buffers once more."""
        self._sum.close(v)
        self._gradients.buffers.undo()

    def close(self, v: int) -> None:
        """End micro-batch v: fold its gradients and its buffers into those of the micro-batches before it."""
        if self.failure is not None:
            raise self.failure
        self._sum.close(v)
        buffers = self._gradients.buffers
        if v not in self.held:
            buffers.undo()
            self.reports.terms.pop(v, None)  # it may be computed again
        elif buffers.followed and (v + 1) % self._layout.leaf_size == 0:
            buffers.take()

    def exchange(self, vote: Vote, fingerprints: list[int]) -> Reduced:
        """Average the gradients over all ranks, and gather the other contributions of each rank.

        Args:
            vote, fingerprints: contributions of this rank; the latter per micro-batch.

        Raises:
            InvalidValue: a weight is out of range.
            PeerFailed: another rank is gone.
        """
        gradients = self._gradients
        buffers = gradients.buffers
        names = gradients.logged_names
        logged = self.reports.read_logged()
        num_params = len(gradients.plan.params)
        control = Control(
            vote,
            self.reports.build(fingerprints, logged, names),
            has_new_names=not {*names}.issuperset(chain(*logged)),
            used=self._sum.used.to_bytes(num_params),
            buffers=buffers.pack(),
        )
        controls, sums = self._sum.finish(control)
        votes, of_ranks, have_new_names, used_by_ranks, packed_buffers, _ = zip(*controls, strict=True)
        reports = self._layout.sort(of_ranks[gradients.group.last_ranks])
        used = reduce(or_, map(int.from_bytes, used_by_ranks))
        reduced = Reduced(votes, reports, is_used=bool(used))
        if any(have_new_names):  # an additional exchange
            reduced.logged = self._layout.sort(gradients.group.gather(logged)[gradients.group.last_ranks])
            reduced.new_names = sorted({*chain(*reduced.logged)} - {*names})
        elif names:
            reduced.logged = [find_logged(report, names) for report in reports]
        ranks = range(gradients.group.world_size)[gradients.group.last_ranks]
        try:
            reduced.total_weight, reduced.loss = average_losses(reports, self._step, self._layout, ranks)
        except Error as error:  # the same on all ranks
            reduced.error = error
            return reduced
        reduced.grads = [None] * num_params
        if reduced.total_weight:
            inverse = gradients.micro_batch_size / self._scale / reduced.total_weight
            if gradients.workers is not None:
                inverse = 1 / gradients.workers.count
            reduced.grads = average(sums, used.to_bytes(num_params), inverse)
        if control.buffers:
            reduced.buffers = buffers.exchange(packed_buffers)
        return reduced

    def apply(self, reduced: Reduced) -> bool:
        """Leave the averaged gradient in `.grad`, change the buffers, and add the new names of logged values.

        Does not wait for other ranks, unless each has a part of the gradients only.

        Returns:
            Whether `.grad` holds gradients.

        Raises:
            Error: a loss is not finite, or no parameter got a gradient.
        """
        gradients = self._gradients
        gradients.logged_names += reduced.new_names
        if reduced.error is not None:
            raise reduced.error
        has_gradients = reduced.loss is not None
        if has_gradients and not self._number and not reduced.is_used:
            raise UsageError(
                f"no trained parameter got a gradient in step {self._step}: compute the loss from the models "
                "that were passed to run.prepare, and do not detach it from them",
                code="SS205",
            )
        plan = gradients.plan
        if gradients.precision.accepts(reduced.grads, gradients.group if plan.is_divided else None):
            for param, grad in zip(plan.params, reduced.grads, strict=True):
                param.grad = grad if grad is None or plan.models is None else shard_like(param, grad)
        else:
            has_gradients = False
            drop_grads(plan.params)
        if gradients.tied is not None:
            gradients.tied.merge()
        if reduced.buffers:
            gradients.buffers.finish(reduced.buffers)
        return has_gradients
