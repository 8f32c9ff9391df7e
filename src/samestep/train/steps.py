"""The loop a person writes: epochs of steps, steps of micro-batches."""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from samestep.data.failure import write_traceback
from samestep.data.loader import Loaded, Loader, seed_all, to_device
from samestep.engine.buffers import refuse_lone_sample
from samestep.engine.control import NOT_CALLED, Control
from samestep.errors import Error
from samestep.plan.ledger import combine
from samestep.plan.seeds import derive
from samestep.plan.tree import build_layout
from samestep.train import logs
from samestep.train.logs import describe
from samestep.train.misuse import refuse_unpacking
from samestep.train.stateful import find_slot, learning_rates, list_params
from samestep.train.tally import Tally, Value

if TYPE_CHECKING:
    from samestep.train.loop import Loop
    from samestep.train.run import Run


Losses = Tensor | Mapping[Tensor, float | Tensor]  # one, or several and their weights
MIN_WEIGHT, MAX_WEIGHT = 1e-20, 1e20  # beyond, products of weights and gradients leave what float32 can hold


class Epoch:
    """One pass over the data set: iterate over it for its steps.

    Attributes:
        number: counted from 0 over the whole run.
        num_steps: optimizer steps in a whole epoch.
    """

    def __init__(self, loop: "Loop", number: int, num_steps: int, tally: Tally) -> None:
        self.number, self.num_steps = number, num_steps
        self._loop, self._end, self._tally = loop, loop.batches.end_of(number), tally
        self._is_begun = False
        self.done = False

    def __iter__(self) -> Iterator["Step"]:
        if self._is_begun:
            raise Error(f"the steps of epoch {self.number} can be iterated over once: take the next epoch")
        self._is_begun = True
        refuse_unpacking(sys._getframe(1), "an epoch", "for step in epoch")
        loop, end = self._loop, self._end
        loop.warn_of_changed_data()  # such as by set_epoch, in the first lines of the epoch's body
        while loop.steps_done < end and not loop.ending:
            yield from loop.next_step(last=loop.steps_done + 1 == end)
        self.done = True

    @property
    def metrics(self) -> dict[str, float]:
        """The averages of `step.metrics` over the epoch's steps so far, also those before a restart, weighted as there.

        Raises:
            Error: read before the epoch's first step is done, or after the epoch.
        """
        if self._tally.epoch != self.number:
            raise Error(
                f"epoch.metrics of epoch {self.number} was read before its first step was done, or in another epoch: "
                "read it in the epoch's body, after the loop over its steps"
            )
        return self._tally.averages()


class Step:
    """One optimizer step: iterate over it for this rank's micro-batches, on the device.

    When the inner loop ends, `.grad` of every parameter is the whole batch's gradient, averaged by weight, the same
    on all ranks. Iterate once more for a second pass over the same micro-batches with other noise (a GAN).

    Attributes:
        number: counted from 0 over the whole run.
        open: within the loop over its micro-batches.
        has_gradients: that loop has left some in `.grad`.
        is_skipped: no micro-batch had a weight above 0 so far, so that there is no gradient.
        num_passes: how often that loop has run.
        row: what `metrics.jsonl` gets of it, in the steps that are logged.
        fingerprint: of the samples used, for the ledger.
    """

    def __init__(self, run: "Run", loop: "Loop", number: int, loader: Loader) -> None:
        self.number = number
        self._run, self._loop, self._loader = run, loop, loader
        spans = loop.batches.micro_batches(number)
        self._sizes = [stop - start for start, stop in spans]
        self._layout = build_layout(len(spans), run.world_size)
        self._cache: list[Loaded] = []
        self.num_passes = 0
        self._loss: float | None = None
        self._calls: logs.Calls = []  # of step.log
        self._metrics: dict[str, tuple[Value, float]] = {}
        self.open = self.has_gradients = self._is_left = False
        self.is_skipped = True
        self.row: dict[str, float] = {}
        self.fingerprint = 0

    @property
    def num_samples(self) -> int:
        """The samples of the step, over all ranks."""
        return sum(self._sizes)

    @property
    def loss(self) -> Tensor:
        """The loss, averaged by weight over the whole batch: the same scalar on all ranks. nan where nothing counts.

        Raises:
            Error: read before or inside the micro-batch loop.
        """
        self._check_is_over("step.loss")
        loss = self._loss if self._loss is not None else math.nan
        return torch.tensor(loss, dtype=torch.float32, device=self._run.device)

    @property
    def metrics(self) -> dict[str, float]:
        """The loss and the values of `step.log` by name, averaged by weight over the whole batch: the same floats on
        all ranks. Those logged after the micro-batch loop are as this rank gave them.

        Raises:
            Error: read before or inside the micro-batch loop.
        """
        self._check_is_over("step.metrics")
        return {name: float(value) for name, (value, _) in self._metrics.items()}

    def weighted_metrics(self) -> dict[str, tuple[Value, float]]:
        """The values of `metrics`, without waiting for a GPU, and the weights that they count with in their epoch."""
        return self._metrics

    def _check_is_over(self, what: str) -> None:
        self.check_not_left()
        if self.open or not self.num_passes:
            raise Error(
                f"{what} of step {self.number} was read {'inside' if self.open else 'before'} the micro-batch loop: "
                "read it after the loop, when the values of all ranks are in"
            )

    def __iter__(self) -> Iterator[Any]:
        run, layout = self._run, self._layout
        if self.num_passes == 0 and self.number == self._loop.began_step:
            refuse_unpacking(sys._getframe(1), "a step", "for batch in step")
        self.check_not_left()
        if self._loop.step is not self:
            raise Error(f"step {self.number} is over, since step {self._loop.steps_done} has begun")
        if self.open:
            raise Error(f"step {self.number} is iterated over inside its own loop: use one loop after the other")
        if self.num_passes == 0:
            run._misuse.check_used(run._reducer)
        run._follow_optimizers()
        reducer = run._reducer
        self.open = True
        held = layout.ranges[run.rank]
        schedules = run._misuse.read_schedules()
        self._losses: list[dict[int, list[tuple[Any, Any]]]] = [{} for _ in held]  # by slot
        # A power of two, which changes no bit. With it, the sum over a full step of as many micro-batches is the mean.
        self._scale = run._precision.scale / 2 ** (layout.num_micro_batches - 1).bit_length()
        self._calls = [{} for _ in held]
        reducer.begin(layout, keep_grads=self.num_passes > 0, num_names=len(run._tally.names))
        run._statistics.begin(layout)
        run._buffers.begin()
        for k, v in enumerate(held):
            if self.num_passes == 0:
                run._watchdog.enter("loading", self.number)
                self._cache.append(self._load())
            run._watchdog.enter("forward", self.number)
            self._k, self._v = k, v
            batch = to_device(self._cache[k].batch, run.device, non_blocking=True)
            seed_all(derive(run.seed, "compute", step=self.number, pass_=self.num_passes, micro_batch=v))
            guards = refuse_lone_sample(run._modules, self.number, v, run.rank) if self._sizes[v] == 1 else ()
            reducer.open(v)
            try:
                yield batch
            except GeneratorExit:
                self._is_left = True
                run._watchdog.leave(self.number)
                raise
            reducer.close()
            for guard in guards:
                guard.remove()
            run._statistics.fold(held.start, v)
            run._buffers.fold(v)
        run._misuse.check_schedules(schedules, self.number)
        self._finish()
        run._watchdog.enter("updating", self.number)
        seed_all(derive(run.seed, "after", step=self.number, pass_=self.num_passes))
        self.num_passes += 1
        self.open = False

    def check_not_left(self) -> None:
        """Raises Error where the loop over the micro-batches was left before its end."""
        if self._is_left:
            raise Error(
                f"the loop over the micro-batches of step {self.number} was left by break (or return, or an error), so "
                "its gradient is not complete: let it run to its end; to end early, call run.stop()"
            )

    def backward(self, loss: Losses, *, weight: float | Tensor | None = None, model: nn.Module | None = None) -> None:
        """Runs this micro-batch's backward; its part of the batch's gradient is added up with all others.

        Args:
            loss: a scalar, the mean over the micro-batch (over `weight` units of it). For several losses that are means
                over different units, a dict of loss -> weight, in the same order in all micro-batches: each is averaged
                over the batch by its own weights, and the averages are added up. Each costs a backward and an exchange.
            weight: what `loss` is a mean over, such as the number of tokens; None: the micro-batch's samples. A
                tensor is best on the CPU. 0: the micro-batch does not count.
            model: the one prepared model that gets gradients; None: all. Once per model and micro-batch.

        Raises:
            Error: outside the micro-batch loop, a second time for a model, a loss that is no scalar or depends on
                no parameter, a negative weight, not as many losses as in other micro-batches.
        """
        run = self._run
        if not run._reducer._in_micro_batch:
            raise Error("step.backward was called outside the micro-batch loop: call it inside `for batch in step`")
        losses = self._losses[self._k]
        slot = 0 if model is None else find_slot(run._modules, model)
        if losses and (slot in losses or slot == 0 or 0 in losses):
            raise Error(
                f"two step.backward into one model in micro-batch {self._v} of step {self.number}: add the losses and "
                "call it once (or, where their weights differ, step.backward({loss: weight, ...})), or name the model "
                "that each is for, step.backward(loss, model=...)"
            )
        if isinstance(loss, Mapping) and (weight is not None or not loss):
            raise Error("step.backward takes several losses as {loss: weight, ...}: at least one, and without weight=")
        pairs = [*loss.items()] if isinstance(loss, Mapping) else [(loss, weight)]
        terms = [self._check_term(term, self._sizes[self._v] if own is None else own) for term, own in pairs]
        losses[slot] = [(term.detach(), own) for term, own in terms]
        # The first loss comes last: its backward frees the graph, and its sums travel meanwhile.
        for k, (term, own) in reversed([*enumerate(terms)]):
            if isinstance(own, Tensor) or own:
                self._run_backward(k, term, own / run.micro_batch_size * self._scale, slot)

    def _check_term(self, loss: Any, weight: Any) -> tuple[Tensor, float | Tensor]:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad or loss.is_complex():
            hint = "take its mean" if isinstance(loss, Tensor) and loss.numel() > 1 else "compute it as a tensor from "\
                "the model's output, outside of torch.no_grad()"  # fmt: skip
            raise Error(f"step.backward needs a scalar loss that depends on the model, not {describe(loss)}: {hint}")
        if not isinstance(weight, Tensor) or weight.device.type == "cpu":
            weight = _check_weight(weight, self.number, self._v)
        return loss, weight

    def _run_backward(self, k: int, loss: Tensor, factor: float | Tensor, slot: int) -> None:
        run = self._run
        inputs = list_params(run._modules, run._trained, slot) if slot else ()
        if slot and not inputs:  # which autograd would take for all that there are
            raise Error(
                f"step.backward(model=...) in step {self.number} got a model without a parameter to train: "
                "pass its optimizer to run.prepare, and let its parameters require gradients"
            )
        if slot or k:
            run._reducer.check_graph(loss, (self.num_passes, slot, k))
        run._watchdog.enter("backward", self.number)
        if k:
            run._reducer.backward_further(k, loss, factor, inputs)
        else:
            run._reducer.backward(loss, factor, inputs)
            run._watchdog.move("backward", "reducing", run._reducer.waited_s)
        run._watchdog.enter("forward", self.number)

    def log(self, **values: float | Tensor) -> None:
        """Adds to the metrics of this step, averaged over the batch with the weights of step.backward; no sync.

        After the loop over the micro-batches, where all ranks have the same, it takes values as they are. The averages
        are in `metrics`, and in `metrics.jsonl` every `log_every` steps.

        Raises:
            Error: before the micro-batch loop, after the step, or a value that is no number.
        """
        if self._loop.step is not self or self._loop.steps_done > self.number or not (self.open or self.num_passes):
            raise Error(
                f"step.log of step {self.number} was called outside of its body: call it in or after its micro-batch "
                "loop, or run.log elsewhere"
            )
        for name, given in values.items():
            value = logs.read_number(name, given)
            if self.open:
                total, count = self._calls[self._k].get(name, (0.0, 0))
                self._calls[self._k][name] = (total + value, count + 1)
                continue
            self._metrics[name] = (value, self.num_samples)
            if self._run._logs_step(self.number + 1):
                self.row[f"train/{name}"] = float(value)

    def _load(self) -> Loaded:
        try:
            return next(self._loader)
        except Error as error:
            rank, cause = self._run.rank, error.__cause__
            where = write_traceback(error, self._run._snapshotter.logs, rank)
            raise Error(f"{str(error).rstrip('.')}, on rank {rank} in step {self.number}{where}", rank=rank) from cause

    def _finish(self) -> None:
        """All of this rank's micro-batches are done: exchanges, averages, and leaves the gradient in `.grad`."""
        run, reducer = self._run, self._run._reducer
        losses, weights = self._read_losses(0)
        names, means_logged = run._tally.names, logs.settle(self._calls)
        control = Control(
            stop=run._signals.heard if run._signals else 0,
            buffers_changed=run._buffers.changed,
            has_new_names=any(name not in names for values in means_logged for name in values),
            snapshot=run._snapshotter.is_time(),
            copying=run._snapshotter.is_copying,
            losses=losses,
            weights=weights,
            fingerprints=[loaded.fingerprint for loaded in self._cache],
            used=b"",
            parts=run._statistics.parts(),
            num_losses=max((len(terms) for losses in self._losses for terms in losses.values()), default=1),
            values=[[values.get(name, (0.0, 0))[0] for name in names] for values in means_logged],
            counts=[[values.get(name, (0.0, 0))[1] for name in names] for values in means_logged],
        )
        run._watchdog.enter("reducing", self.number)
        try:
            controls = reducer.finish(control)
        except RuntimeError as error:
            self._loop.explain_loss(error)
            raise
        self._loop.check_copying([told.copying for told in controls])
        self._loop.take_votes([told.stop for told in controls], any(told.snapshot for told in controls))
        inverses, means = self._average(controls)
        reducer.assign(inverses)
        for k in range(1, max(told.num_losses for told in controls)):
            losses, weights = self._read_losses(k)
            further = reducer.finish_further(k, replace(control, losses=losses, weights=weights))
            self._check_terms(k, controls, further)
            inverses, more = self._average(further)
            reducer.assign(inverses)
            means += more
        self._loss = math.fsum(means) if means else None
        self.is_skipped &= not means
        if self._loss is not None and not self.num_passes and all(param.grad is None for param in reducer.params):
            raise Error(
                f"no parameter that is trained got a gradient in step {self.number}: compute the loss from the models "
                "that run.prepare got, and do not detach it from them"
            )
        self.has_gradients = self._loss is not None
        if not run._precision.accepts(param.grad for param in reducer.params if param.grad is not None):
            self.has_gradients = False
            for param in reducer.params:
                param.grad = None
        if self.has_gradients and self.num_passes == 0:
            run._misuse.unused_step = self.number
        run._statistics.finish([told.parts for told in controls])
        for rank, told in enumerate(controls):
            if told.buffers_changed:
                run._group.broadcast_tensors(run._buffers.finish(), rank)
        weights = [row for told in controls for row in told.weights]
        logged = logs.average(logs.collect(means_logged, controls, names, run._group), weights, self._sizes)
        if self._loss is not None:
            self._metrics["loss"] = (self._loss, math.fsum(w for row in weights for w in row if w > 0))
        self._metrics |= logged
        if run._logs_step(self.number + 1):
            self.row |= {} if self._loss is None else {"train/loss": self._loss}
            self.row |= learning_rates(run._objects) | {f"train/{name}": value for name, (value, _) in logged.items()}
        if self.num_passes == 0 and run.dir is not None:
            self.fingerprint = combine([mark for told in controls for mark in told.fingerprints])

    def _read_losses(self, k: int) -> tuple[list[list[float]], list[list[float]]]:
        """The values and the weights of loss k, per micro-batch of this rank, per slot."""
        num_slots, held = len(self._run._modules) + 1, self._layout.ranges[self._run.rank]
        values = [[0.0] * num_slots for _ in held]
        weights = [[NOT_CALLED] * num_slots for _ in held]
        for v, losses, value_of, weight_of in zip(held, self._losses, values, weights, strict=True):
            for slot, terms in losses.items():
                if k < len(terms):
                    weight_of[slot] = weight = _check_weight(terms[k][1], self.number, v)
                    if weight:
                        value_of[slot] = float(terms[k][0])
        return values, weights

    def _check_terms(self, k: int, first: list[Control], further: list[Control]) -> None:
        """Raises Error where a step.backward had the first loss, and loss k only in another micro-batch."""
        rows = [
            (v, [(one == NOT_CALLED, other == NOT_CALLED) for one, other in zip(*pair, strict=True)])
            for held, told, more in zip(self._layout.ranges, first, further, strict=True)
            for v, pair in zip(held, zip(told.weights, more.weights, strict=True), strict=True)
        ]
        for v, row in rows:
            for slot, (is_first_missing, is_missing) in enumerate(row):
                if is_missing and not is_first_missing and any(not other[slot][1] for _, other in rows):
                    raise Error(
                        f"step.backward got fewer losses in micro-batch {v} of step {self.number} than in others: give "
                        "all of them each time, with weight 0 where one does not count"
                    )

    def _average(self, controls: list[Control]) -> tuple[list[float], list[float]]:
        """Per slot, what to multiply the sum of gradients with; and the average losses of the slots that have any."""
        rows = [row for told in controls for row in zip(told.losses, told.weights, strict=True)]
        totals: list[float] = []
        means: list[float] = []
        for slot in range(len(self._run._modules) + 1):
            pairs = [(losses[slot], weights[slot]) for losses, weights in rows if weights[slot] != NOT_CALLED]
            total = math.fsum([weight for _, weight in pairs])
            totals.append(total)
            if total:
                weighted = [loss * weight for loss, weight in pairs]
                if not math.isfinite(sum(weighted)):
                    self._refuse_losses(controls)
                means.append(math.fsum(weighted) / total)
        unit = self._run.micro_batch_size / self._scale
        shared = totals[0]
        totals = [shared] + [total + shared for total in totals[1:]]
        return [unit / total if total else 0.0 for total in totals], means

    def _refuse_losses(self, controls: list[Control]) -> NoReturn:
        """Names the first micro-batch whose loss is not finite."""
        for rank, held in enumerate(self._layout.ranges):
            for v, losses in zip(held, controls[rank].losses, strict=True):
                for loss in losses:
                    if not math.isfinite(loss):
                        raise Error(
                            f"the loss of step {self.number} is {loss} in micro-batch {v} (rank {rank}): nothing of "
                            "this step is saved; look at that batch, the learning rate and the precision"
                        )
        raise Error(f"the losses of step {self.number} are too large to be added up: scale the loss down")


def _check_weight(weight: Any, step: int, v: int) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if number != 0 and not MIN_WEIGHT <= number <= MAX_WEIGHT:
        raise Error(
            f"step.backward got weight {weight} in micro-batch {v} of step {step}: a weight is 0, or a number from "
            f"{MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        )
    return number
