"""One pass over a step's micro-batches, which computes the gradient of the whole batch from all ranks' losses."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.engine.buffers import BatchNormStatistics, OtherBuffers, refuse_lone_sample
from samestep.engine.control import NOT_CALLED, Control, Vote
from samestep.engine.precision import Precision
from samestep.engine.reducer import Reducer
from samestep.errors import InvalidValue, UsageError
from samestep.plan.tree import build_layout
from samestep.world.group import Group

Losses = Tensor | Mapping[Tensor, float | Tensor]  # one, or several with their weights
Inspect = Callable[[int, int, Tensor], None]  # see `Reducer.inspect`
Means = list[dict[str, tuple[float, float]]]  # per micro-batch: name -> the mean of its logged values, and their number
MIN_WEIGHT, MAX_WEIGHT = 1e-20, 1e20  # outside, products of weights and gradients can leave the range of float32


class Report(NamedTuple):
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


class Result(NamedTuple):
    """The result of a pass.

    Attributes:
        loss: weighted average over the whole batch; None if the total weight is 0.
        has_gradients: whether `.grad` holds gradients.
    """

    loss: float | None
    has_gradients: bool


class GradientPass:
    """Passes over the micro-batches of steps, one after the other, for the models of one run.

    A pass is `start`, then for each of this rank's micro-batches `open`, `backward` (once per model) and `close`, then
    `exchange` and `apply`. Until `apply`, the state that snapshots contain does not change.

    Before its own micro-batches and after `exchange`, a rank can also compute micro-batches of other ranks. They change
    nothing; only the function given to `open` gets their gradients.

    Args:
        modules: the prepared models by name. Slot i holds losses of the i-th model, slot 0 losses of all models.
        group: the ranks.
        exact: whether to sum along the canonical tree; otherwise use the backend's all-reduce.
        bucket_cap_bytes: the largest size of a bucket of gradients; None: see `choose_cap_bytes`.
        micro_batch_size: samples of a whole micro-batch.

    Attributes:
        reducer: sums gradients. Set by `set_parameters`.
        waited_s: seconds that the last `backward` waited for other ranks.
    """

    reducer: Reducer

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        group: Group,
        precision: Precision,
        *,
        exact: bool,
        bucket_cap_bytes: int | None,
        micro_batch_size: int,
    ) -> None:
        self._modules, self._group, self._precision = modules, group, precision
        self._exact, self._bucket_cap_bytes, self._micro_batch_size = exact, bucket_cap_bytes, micro_batch_size
        self._statistics = BatchNormStatistics(modules.values())
        self._buffers = OtherBuffers(modules, self._statistics)
        self._names: list[str] = []  # of logged values, in the order of the control block
        self._hooks: Sequence[RemovableHandle] = ()
        self._has_reducer = False
        self.waited_s = 0.0

    def set_parameters(
        self, trained: Sequence[tuple[str, nn.Parameter, int]], untrained: Sequence[nn.Parameter]
    ) -> None:
        """Reduce the gradients of these parameters from now on. Arguments as for `Reducer`."""
        if self._has_reducer:
            self.reducer.remove()
        self._has_reducer, self._trained = True, trained
        self.reducer = Reducer(
            trained, self._group, exact=self._exact, bucket_cap_bytes=self._bucket_cap_bytes,
            num_slots=len(self._modules) + 1, num_values=self._statistics.num_values, untrained=untrained,
        )  # fmt: skip

    def hold_buffers(self) -> None:
        """Remember all buffers, for `undo_buffers`."""
        self._buffers.begin()
        self._statistics.hold()

    def undo_buffers(self) -> None:
        """Restore the values of all buffers that `hold_buffers` remembered."""
        self._buffers.undo()
        self._statistics.undo()

    # --- one pass ---------------------------------------------------------------------------------------------

    def start(self, step: int, sizes: Sequence[int], number: int) -> range:
        """Begin a pass.

        Args:
            step: number of the step, for messages.
            sizes: number of samples of each micro-batch of the step.
            number: number of the pass over this step. From 1 on, gradients that the pass does not compute are kept.

        Returns:
            This rank's micro-batches.
        """
        layout = build_layout(len(sizes), self._group.world_size)
        self._step, self._sizes, self._number, self._layout = step, sizes, number, layout
        self._held = held = layout.ranges[self._group.rank]
        self._num_losses = 1
        # Per micro-batch: slot -> (loss, weight) pairs.
        self._losses: list[dict[int, list[tuple[Tensor, float | Tensor]]]] = [{} for _ in held]
        # A power of two, which changes no bit. If the number of micro-batches is one too, the sum is then the mean.
        self._scale = self._precision.scale / 2 ** (layout.num_micro_batches - 1).bit_length()
        self.reducer.begin(layout, keep_grads=number > 0, num_names=len(self._names))
        self._statistics.begin(layout, self._group.rank)
        self._buffers.begin()
        return held

    def open(self, v: int, inspect: Inspect | None = None) -> None:
        """Begin micro-batch v. `inspect` is called with each of its gradients, see `Reducer.inspect`."""
        self._v = v
        self.reducer.inspect = inspect
        self._losses_of_v = self._losses[v - self._held.start] if v in self._held else {}
        if self._sizes[v] == 1:
            self._hooks = refuse_lone_sample(self._modules, self._step, v, self._group.rank)
        self.reducer.open(v)

    def backward(self, loss: Losses, weight: float | Tensor | None, model: nn.Module | None) -> None:
        """Run the backward of the open micro-batch. Arguments and errors as for `Step.backward`."""
        self.waited_s = 0.0
        if not self.reducer.in_micro_batch:
            raise UsageError(
                "step.backward was called outside the micro-batch loop: call it inside `for batch in step` (list(step) "
                "ends the loop); for another pass, loop over the step again"
            )
        losses = self._losses_of_v
        slot = 0 if model is None else find_slot(self._modules, model)
        if losses and (slot in losses or slot == 0 or 0 in losses):
            raise UsageError(
                f"step.backward was called twice for one model in micro-batch {self._v} of step {self._step}: add the "
                "losses and call it once (or, if their weights differ, step.backward({loss: weight, ...})), or name "
                "the model of each, step.backward(loss, model=...)"
            )
        if isinstance(loss, Mapping) and (weight is not None or not loss):
            raise InvalidValue(
                "step.backward takes several losses as {loss: weight, ...}: at least one, and without weight="
            )
        pairs = [*loss.items()] if isinstance(loss, Mapping) else [(loss, weight)]
        terms = [self._check_term(term, self._sizes[self._v] if own is None else own) for term, own in pairs]
        losses[slot] = [(term.detach(), own) for term, own in terms]
        self._num_losses = max(self._num_losses, len(terms))
        # The first loss comes last, because its backward frees the graph and starts the exchange.
        for k, (term, own) in reversed([*enumerate(terms)]):
            if isinstance(own, Tensor) or own:
                self._run_backward(k, term, own / self._micro_batch_size * self._scale, slot)

    def _check_term(self, loss: Any, weight: Any) -> tuple[Tensor, float | Tensor]:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad or loss.is_complex():
            hint = "take its mean" if isinstance(loss, Tensor) and loss.numel() > 1 else "compute it as a tensor from "\
                "the model's output, outside of torch.no_grad()"  # fmt: skip
            raise InvalidValue(
                f"step.backward needs a scalar loss that depends on the model, not {describe(loss)}: {hint}"
            )
        if not isinstance(weight, Tensor) or weight.device.type == "cpu":
            weight = self._check_weight(weight, self._v)
        return loss, weight

    def _check_weight(self, weight: Any, v: int) -> float:
        try:
            number = float(weight)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if number != 0 and not MIN_WEIGHT <= number <= MAX_WEIGHT:
            raise InvalidValue(
                f"step.backward got weight {weight} in micro-batch {v} of step {self._step}: a weight is 0, or a "
                f"number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
            )
        return number

    def _run_backward(self, k: int, loss: Tensor, factor: float | Tensor, slot: int) -> None:
        inputs = list_params(self._modules, self._trained, slot) if slot else ()
        if slot and not inputs:  # for autograd, an empty list means all parameters
            raise InvalidValue(
                f"step.backward(model=...) in step {self._step} got a model without trained parameters: "
                "pass its optimizer to run.prepare, and set requires_grad of its parameters"
            )
        if slot or k:
            self.reducer.check_graph(loss, (self._number, slot, k))
        if k:
            self.reducer.backward_further(k, loss, factor, inputs)
        else:
            self.reducer.backward(loss, factor, inputs)
            self.waited_s = self.reducer.waited_s

    def close(self) -> None:
        """End the open micro-batch: fold its gradients and its buffers into those of the micro-batches before it."""
        self.reducer.close()
        self.reducer.inspect = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
        if self._v not in self._held:
            self.undo_buffers()
            return
        self._statistics.fold()
        self._buffers.fold(self._v)

    def exchange(self, vote: Vote, fingerprints: list[int], logged: Means) -> Report:
        """Sum the gradients over all ranks, and gather the other contributions of each rank.

        Args:
            vote, fingerprints, logged: contributions of this rank; the last two per micro-batch.

        Raises:
            InvalidValue: a weight is out of range.
            RuntimeError: another rank is gone.
        """
        losses, weights = self._read_losses(0)
        names, num = self._names, len(logged)
        self._control = Control(
            vote=vote,
            buffers_changed=self._buffers.changed,
            has_new_names=any(logged) and any(name not in names for values in logged for name in values),
            losses=losses,
            weights=weights,
            fingerprints=fingerprints,
            used=b"",
            parts=self._statistics.parts(),
            num_losses=self._num_losses,
            values=[[values.get(name, (0.0, 0))[0] for name in names] for values in logged] if names else [[]] * num,
            counts=[[values.get(name, (0.0, 0))[1] for name in names] for values in logged] if names else [[]] * num,
        )
        self._controls = controls = self.reducer.finish(self._control)
        return Report(
            votes=[control.vote for control in controls],
            fingerprints=[mark for control in controls for mark in control.fingerprints],
            logged=self._collect(logged, controls),
            weights=[row for control in controls for row in control.weights],
        )

    def _collect(self, logged: Means, controls: list[Control]) -> Means:
        """Return the logged values of all ranks' micro-batches.

        The control block has no entries for names that a rank uses for the first time. Their values need an additional
        exchange, which also adds the names to the format of the block.
        """
        names = self._names
        has_new_names = any(control.has_new_names for control in controls)
        if not names and not has_new_names:
            return []
        if has_new_names:
            collected = [values for of_rank in self._group.gather(logged) for values in of_rank]
            names += sorted({name for values in collected for name in values} - {*names})
            return collected
        return [
            {name: (value, count) for name, value, count in zip(names, values, counts, strict=True) if count}
            for control in controls
            for values, counts in zip(control.values, control.counts, strict=True)
        ]

    def apply(self) -> Result:
        """Leave the averaged gradient in `.grad`, and advance the buffers.

        Raises:
            Error: a loss is not finite, or no parameter got a gradient.
        """
        controls, reducer = self._controls, self.reducer
        inverses, means = self._average(controls)
        reducer.assign(inverses)
        for k in range(1, max([control.num_losses for control in controls])):
            losses, weights = self._read_losses(k)
            further = reducer.finish_further(k, replace(self._control, losses=losses, weights=weights))
            self._check_terms(k, controls, further)
            inverses, more = self._average(further)
            reducer.assign(inverses)
            means += more
        has_gradients = bool(means)
        if means and not self._number and all(param.grad is None for param in reducer.params):
            raise UsageError(
                f"no trained parameter got a gradient in step {self._step}: compute the loss from the models "
                "that were passed to run.prepare, and do not detach it from them"
            )
        if not self._precision.accepts(param.grad for param in reducer.params if param.grad is not None):
            has_gradients = False
            for param in reducer.params:
                param.grad = None
        self._statistics.finish([control.parts for control in controls])
        for rank, control in enumerate(controls):
            if control.buffers_changed:
                self._group.broadcast_tensors(self._buffers.finish(), rank)
        return Result(math.fsum(means) if means else None, has_gradients)

    def _read_losses(self, k: int) -> tuple[list[list[float]], list[list[float]]]:
        """Return the values and the weights of loss k, per micro-batch of this rank, per slot."""
        num_slots, held = len(self._modules) + 1, self._held
        values = [[0.0] * num_slots for _ in held]
        weights = [[NOT_CALLED] * num_slots for _ in held]
        for v, losses, value_of, weight_of in zip(held, self._losses, values, weights, strict=True):
            for slot, terms in losses.items():
                if k < len(terms):
                    weight_of[slot] = weight = self._check_weight(terms[k][1], v)
                    if weight:
                        value_of[slot] = float(terms[k][0])
        return values, weights

    def _check_terms(self, k: int, first: list[Control], further: list[Control]) -> None:
        """Raise Error if one step.backward got only the first loss, and another one also loss k."""
        rows = [
            (v, [(one == NOT_CALLED, other == NOT_CALLED) for one, other in zip(*pair, strict=True)])
            for held, before, after in zip(self._layout.ranges, first, further, strict=True)
            for v, pair in zip(held, zip(before.weights, after.weights, strict=True), strict=True)
        ]
        for v, row in rows:
            for slot, (is_first_missing, is_missing) in enumerate(row):
                if is_missing and not is_first_missing and any(not other[slot][1] for _, other in rows):
                    raise UsageError(
                        f"step.backward got fewer losses in micro-batch {v} of step {self._step} than in others: pass "
                        "all of them each time, with weight 0 for one that does not count"
                    )

    def _average(self, controls: list[Control]) -> tuple[list[float], list[float]]:
        """Return the factor for the sum of gradients per slot, and the average losses of the slots that have any."""
        rows = [row for control in controls for row in zip(control.losses, control.weights, strict=True)]
        totals: list[float] = []
        means: list[float] = []
        for slot in range(len(self._modules) + 1):
            pairs = [(losses[slot], weights[slot]) for losses, weights in rows if weights[slot] != NOT_CALLED]
            total = math.fsum([weight for _, weight in pairs])
            totals.append(total)
            if total:
                weighted = [loss * weight for loss, weight in pairs]
                if not math.isfinite(sum(weighted)):
                    self._refuse_losses(controls)
                means.append(math.fsum(weighted) / total)
        unit = self._micro_batch_size / self._scale
        shared = totals[0]
        totals = [shared] + [total + shared for total in totals[1:]]
        return [unit / total if total else 0.0 for total in totals], means

    def _refuse_losses(self, controls: list[Control]) -> NoReturn:
        """Raise Error for the first micro-batch whose loss is not finite."""
        for rank, held in enumerate(self._layout.ranges):
            for v, losses in zip(held, controls[rank].losses, strict=True):
                for loss in losses:
                    if not math.isfinite(loss):
                        raise InvalidValue(
                            f"the loss of step {self._step} is {loss} in micro-batch {v} (rank {rank}): nothing of "
                            "this step is saved; check that batch, the learning rate and the precision"
                        )
        raise InvalidValue(f"the losses of step {self._step} are too large to be added up: scale the loss down")


def describe(value: object) -> str:
    """Describe a value in a few words, for a message."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a gradient")


def find_slot(modules: Mapping[str, nn.Module], model: nn.Module) -> int:
    """Return the slot of a prepared model, counted from 1. Raises Error for a model that was not prepared."""
    for slot, module in enumerate(modules.values(), start=1):
        if module is model or getattr(model, "_orig_mod", None) is module:
            return slot
    raise InvalidValue("step.backward(model=...) got a model that was not passed to run.prepare: pass it there, too")


def list_params(
    modules: Mapping[str, nn.Module], trained: Sequence[tuple[str, nn.Parameter, int]], slot: int
) -> tuple[nn.Parameter, ...]:
    """Return the trained parameters of one model. Raises Error if it shares one with another model."""
    held = {id(param) for param in list(modules.values())[slot - 1].parameters()}
    params = [(param, home) for _, param, home in trained if id(param) in held and param.requires_grad]
    if any(home != slot for _, home in params):
        raise InvalidValue("step.backward(model=...) got a model that shares parameters with another: add the losses")
    return tuple(param for param, _ in params)
