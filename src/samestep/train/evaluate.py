"""Computes scores over a data set: every sample once, the same bits at any number of ranks."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from samestep.data.loader import Loader, locate_error, seed_all, to_device
from samestep.data.spec import DataSpec, read_data_arguments
from samestep.engine.control import average_weighted, read_later
from samestep.errors import Error, InvalidType, InvalidValue
from samestep.plan.loop_plan import Task
from samestep.plan.order import derive
from samestep.plan.tree import Layout, Span, check_positive
from samestep.train.context import RunContext
from samestep.train.guards import Call, wait_for_call
from samestep.train.prepared import Prepared
from samestep.train.stopping import Services
from samestep.world.transport import attempt, read_outcomes

Row = dict[str, Any]  # name -> list, or (value, weight)


class PerMicroBatch(NamedTuple):
    """A score that is one object for a whole micro-batch. The result of `evaluate` is a list of these objects."""

    value: Any


@dataclass(frozen=True)
class Evaluator:
    """Scores data sets with the models of one run."""

    context: RunContext
    prepared: Prepared
    services: Services

    def evaluate(
        self, score: Callable[[Any], Mapping[str, Any]], data: Any, *, micro_batch_size: int | None, **arguments: Any
    ) -> dict[str, Any]:
        """Score every sample. Arguments, result and errors as for `Run.evaluate`."""
        if not callable(score):
            raise InvalidType(
                f"run.evaluate needs a function score(batch) -> dict, not a {type(score).__name__}: call "
                "run.evaluate(score, data)",
                code="SS102",
            )
        self.context.state.count_evaluation()
        if micro_batch_size is not None:
            check_positive("micro_batch_size", micro_batch_size)
        spec = read_data_arguments(data, **arguments)
        size = micro_batch_size or spec.micro_batch_size or self.context.config.micro_batch_size
        spans = [(start, min(start + size, len(spec))) for start in range(0, len(spec), size)]
        try:
            return self._evaluate(score, spec, spans)
        finally:
            seed_all(self._derive("after"))

    def _derive(self, purpose: str, v: int = 0, stage: int = 0) -> int:
        state = self.context.state
        pass_ = 2**32 + state.num_evaluations  # distinct from those of steps
        seed = self.context.config.seed
        return derive(seed, purpose, step=state.steps_done, pass_=pass_, micro_batch=v, stage=stage)

    def _evaluate(
        self, score: Callable[[Any], Mapping[str, Any]], spec: DataSpec, spans: Sequence[Span]
    ) -> dict[str, Any]:
        """Score the micro-batches of all ranks. `spans`: their samples."""
        group = self.context.group
        steps_done = self.context.state.steps_done
        self.services.watchdog.enter("reducing", steps_done)
        wait_for_call(group, Call.EVALUATE)

        def score_all() -> tuple[Layout, BaseException | None, list[Any]]:
            layout = self.context.build_layout(len(spans))
            compute = partial(self._score, score, spec, spans, layout)
            # The script may catch an exception, so the other ranks must not wait for this one.
            failure, outcome = (None, ("value", compute())) if self._waits_inside else attempt(compute)
            self.services.watchdog.enter("reducing", steps_done)
            return layout, failure, group.gather((outcome, self.services.stopping.cast_vote()))

        layout, failure, gathered = group.complete(score_all)
        # A validation can be long: react to a signal before the next step.
        self.services.stopping.take_votes([vote for _, vote in gathered])
        self.services.watchdog.enter("script", steps_done)
        if failure is not None:
            raise failure
        rows = read_outcomes({rank: outcome for rank, (outcome, _) in enumerate(gathered)})
        return _merge(layout.sort(rows[group.last_ranks]))

    @property
    def _waits_inside(self) -> bool:
        """Whether the other ranks wait for this one inside of the model."""
        return self.prepared.gradients.plan.models is not None or self.context.group.ranks_per_replica > 1

    def _call(self, score: Callable[[Any], Mapping[str, Any]], batch: Any, v: int) -> Mapping[str, Any]:
        """Return the scores of a micro-batch; none if another rank has them."""
        runner = self.prepared.runner
        if runner is None:
            return score(batch)
        scores = runner.score(score, batch, partial(self._derive, "evaluate", v))
        return scores if runner.has_results else {}

    def _score(
        self, score: Callable[[Any], Mapping[str, Any]], spec: DataSpec, spans: Sequence[Span], layout: Layout
    ) -> list[Row]:
        """Return the scores of this rank's micro-batches."""
        context = self.context
        steps_done = self.context.state.steps_done
        num_own = len(layout.ranges[context.group.replica])
        numbers = [*layout.ranges[context.group.replica], *layout.fillers[context.group.replica]]
        tasks = (Task(np.arange(*spans[v]), self._derive("data", v)) for v in numbers)
        spec = replace(spec, num_workers=min(spec.num_workers, len(numbers)))
        rows: list[Row] = []
        modes = {each: each.training for module in self.prepared.objects.modules.values() for each in module.modules()}
        evaluating = dict.fromkeys(modes, False)
        gradients = {
            param: param.grad for module in self.prepared.objects.modules.values() for param in module.parameters()
        }
        without = dict.fromkeys(gradients)
        self.prepared.gradients.buffers.hold()
        self.services.watchdog.enter("validating", steps_done)
        try:
            with Loader(spec, tasks, device=context.device) as loader, torch.no_grad():
                for v, loaded in zip(numbers, loader, strict=True):
                    seed_all(self._derive("evaluate", v))
                    _set("training", evaluating)  # each time: a score function may call model.train()
                    _set("grad", without)  # and backward(), such as to weigh an input
                    start, stop = spans[v]
                    scores = self._call(score, to_device(loaded.batch, context.device), v)
                    rows.append(_read(scores, stop - start))
                    self.prepared.gradients.buffers.undo()
                    self.services.watchdog.enter("validating", steps_done)
            if (runner := self.prepared.runner) is not None:
                runner.finish()
            return [_to_numbers(row) for row in rows[:num_own]]
        except Error as error:
            raise locate_error(error, context.location.logs, context.group.number, "run.evaluate") from error.__cause__
        finally:
            self.prepared.gradients.buffers.undo()
            self.prepared.gradients.free_gathered()
            _set("training", modes)
            _set("grad", gradients)


def _set(attribute: str, values: Mapping[Any, Any]) -> None:
    """Set an attribute of each key to its value, where it differs."""
    for thing, value in values.items():
        if getattr(thing, attribute) is not value:
            setattr(thing, attribute, value)


def _read(scores: Mapping[str, Any], num_samples: int) -> Row:
    """Check a micro-batch's scores, without a device synchronization."""
    if not isinstance(scores, Mapping):
        raise InvalidType(
            f"the score function returned a {type(scores).__name__}: return a dict of name -> value", code="SS223"
        )
    return {name: _read_score(name, value, num_samples) for name, value in scores.items()}


def _read_score(name: str, value: Any, num_samples: int) -> list[Any] | tuple[Any, ...]:
    """Return a list, or a value and its weight, which the script cannot change any more."""
    if isinstance(value, PerMicroBatch):
        return [_copy(value.value)]
    if isinstance(value, list) and len(value) == num_samples:
        return [*map(_copy, value)]
    pair = value if isinstance(value, tuple) and len(value) == 2 else (value, num_samples)
    for number in pair:
        if not isinstance(number, Real) and not (isinstance(number, Tensor) and number.numel() == 1):
            raise InvalidType(
                f"score {name!r} is neither a number, nor (number, weight), nor a list with one entry for each of "
                f"{num_samples} samples, but {type(value).__name__}: average it, or turn it into such a list",
                code="SS223",
            )
    return tuple(read_later(number) if isinstance(number, Tensor) else number for number in pair)


def _copy(entry: Any) -> Any:
    return entry.detach().clone() if isinstance(entry, Tensor) else copy.copy(entry)


def _to_numbers(row: Row) -> Row:
    """Convert values and weights to Python numbers."""
    return {name: v if isinstance(v, list) else (float(v[0]), float(v[1])) for name, v in row.items()}


def _merge(rows: list[Row]) -> dict[str, Any]:
    """Combine the rows of all micro-batches, in order, into lists and into means with exactly rounded sums."""
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values: list[Any] = [row.get(name) for row in rows]
        if len({*map(type, values)}) > 1:
            raise InvalidValue(
                f"score {name!r} is not the same kind of value in all micro-batches, or is missing in some: return it "
                "each time, with weight 0 if it does not count",
                code="SS223",
            )
        if isinstance(values[0], list):
            merged[name] = [entry for value in values for entry in value]
            continue
        for _, weight in values:
            if not 0 <= weight < math.inf:
                raise InvalidValue(
                    f"score {name!r} has weight {weight}: a weight is a finite number of at least 0", code="SS223"
                )
        merged[name], total = average_weighted(values)
        if total == 0:
            raise InvalidValue(
                f"the total weight of score {name!r} is 0: no sample of the data set counts", code="SS223"
            )
    return merged
