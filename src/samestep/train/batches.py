"""Applies the plan to a data set: the samples of each step, and those that this rank loads."""

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.config import Interval
from samestep.data.lanes import Lanes
from samestep.data.loader import Task
from samestep.data.source import (
    Mark,
    Shard,
    explain_change,
    explain_rewrite,
    format_shards,
    mark_shards,
    parse_shards,
    read_shards,
)
from samestep.data.spec import is_stream, understand
from samestep.errors import InvalidType, InvalidValue, RunDirectoryError
from samestep.files import open_regular, read_bytes, replace_file
from samestep.plan.compute_checks import Check, plan_checks
from samestep.plan.ledger import fingerprint
from samestep.plan.order import GivenOrder, Order, build_order
from samestep.plan.schedule import EndlessSchedule, Schedule, Span
from samestep.plan.seeds import derive
from samestep.plan.tree import build_layout
from samestep.watch.records import order_file, shards_file
from samestep.world.environment import advise

STREAM_LENGTH = 1 << 62
OTHER_SHARDS = "the data set's shards are not those that the run began with"

Sampler = Callable[[int], Iterable[int]]


class Batches:
    """The samples of one loop's steps. Steps and epochs are numbered over all loops of the run.

    Args:
        data, sampler, arguments: what the script passed to `run.epochs` or `run.steps`.
        endless: whether the data set is repeated and no step is short, as in `run.steps`.
        start: the step and the epoch where the loop begins.
        check_every: number of steps between those in which ranks also compute micro-batches of other ranks. None:
            never.

    Raises:
        Error: `data` is not a data set, or the arguments contradict each other.

    Attributes:
        spec: the data set.
        first_step, first_epoch: where the loop begins.
        lanes: the data set, if it is a stream; else None.
        shards: shards of the data set, if it is a source; else ().
        length: number of samples of one epoch.
        steps_per_epoch: None for endless batches (`run.steps`).
        has_sampler: whether the script's sampler gives the order of an epoch.
        order: `order(epoch)` -> the index of the sample at each position.
        micro_batches: `micro_batches(step)` -> the micro-batches of a step of the run, as spans of positions.
    """

    def __init__(
        self,
        data: Any,
        *,
        seed: int,
        batch_size: int,
        micro_batch_size: int,
        endless: bool,
        sampler: Any,
        start: tuple[int, int],
        check_every: Interval | None = None,
        **arguments: Any,
    ) -> None:
        for name in ("shuffle", "drop_last", "pin_memory"):
            if not isinstance(arguments.get(name), bool | None):
                raise InvalidValue(f"{name} must be True or False, not {arguments[name]!r}")
        if sampler is not None and not callable(sampler):
            kind = type(sampler).__name__
            raise InvalidType(
                f"sampler must be a function, sampler(epoch) -> sample indices, equal on all ranks, not a {kind}"
            )
        if sampler is not None and arguments.get("shuffle"):
            raise InvalidValue(
                "sampler and shuffle=True were both given: the sampler decides the order, leave shuffle out"
            )
        spec = understand(data, sizes=(micro_batch_size, batch_size), takes_streams=endless, **arguments)
        self.lanes: Lanes | None = None
        if is_stream(spec.dataset):
            if sampler is not None or arguments.get("shuffle"):
                raise InvalidValue("a stream decides its order itself: leave sampler and shuffle out")
            schedule = EndlessSchedule(STREAM_LENGTH, batch_size, micro_batch_size)
            self.lanes = Lanes(spec.dataset, schedule, seed, start[0])
            spec = replace(spec, dataset=self.lanes, shuffle=False)
        self.spec, self._seed, self._check_every = spec, seed, check_every
        self.shards: tuple[Shard, ...]
        self.shards, self._shard_sizes, self._shards_mark = read_shards(spec.dataset)
        self._sampler: Sampler | None = sampler
        self.first_step, self.first_epoch = start
        self.has_sampler = sampler is not None
        self.order = lru_cache(maxsize=2)(self._build_order)
        self.micro_batches = lru_cache(maxsize=64)(self._cut)
        self.length = len(spec) if sampler is None else len(self.order(self.first_epoch))
        self.schedule: Schedule | EndlessSchedule
        if endless:
            self.schedule = EndlessSchedule(self.length, batch_size, micro_batch_size)
            self.steps_per_epoch = None
        else:
            self.schedule = Schedule(self.length, batch_size, micro_batch_size, spec.drop_last)
            self.steps_per_epoch = self.schedule.num_steps

    def _build_order(self, epoch: int) -> Order:
        if self._sampler is None:
            return build_order(
                len(self.spec), seed=self._seed, epoch=epoch, shuffle=self.spec.shuffle, shard_sizes=self._shard_sizes
            )
        given = self._sampler(epoch)
        if not isinstance(given, Iterable):
            raise InvalidType(f"sampler({epoch}) gave {given!r}: return the epoch's sample indices, such as a list")
        order = GivenOrder(given, len(self.spec))
        if epoch > (first := self.first_epoch) and len(order) != self.length:
            raise InvalidValue(
                f"sampler({epoch}) gave {len(order)} indices and sampler({first}) {self.length}: return equally many"
            )
        return order

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers that identify the loop."""
        return {
            **({} if self.lanes is None else {"num_lanes": self.lanes.num_lanes}),
            **({"shards": self._shards_mark} if self.shards else {}),
            "data_length": self.length,
            "mode": "steps" if self.steps_per_epoch is None else "epochs",
            "shuffle": self.spec.shuffle,
            "drop_last": self.spec.drop_last,
            "sampler": "given" if self.has_sampler else "default",
        }

    def epoch_of(self, step: int) -> int:
        """Return the epoch in which step `step` of the run begins."""
        step -= self.first_step
        if self.steps_per_epoch is None:
            return self.first_epoch + self.schedule.span(step)[0] // self.length
        return self.first_epoch + step // self.steps_per_epoch

    def end_of(self, epoch: int) -> int:
        """Return the number of finished steps of the run when an epoch ends. Not for endless batches."""
        assert self.steps_per_epoch is not None
        return self.first_step + (epoch - self.first_epoch + 1) * self.steps_per_epoch

    def epochs_done(self, steps_done: int) -> int | None:
        """Return the number of completed epochs if an epoch ends after `steps_done` steps of the run, else None."""
        if self.steps_per_epoch is None or (steps_done - self.first_step) % self.steps_per_epoch:
            return None
        return self.epoch_of(steps_done)

    def epochs_of(self, step: int) -> range:
        """Return the epochs that have a sample in step `step` of the run."""
        if self.steps_per_epoch is not None:
            return range(self.epoch_of(step), self.epoch_of(step) + 1)
        start, stop = self.schedule.span(step - self.first_step)
        return range(self.first_epoch + start // self.length, self.first_epoch + (stop - 1) // self.length + 1)

    def next_epoch(self, steps_done: int) -> int:
        """Return the first epoch of the next loop, if this one ends after `steps_done` steps of the run."""
        return self.epochs_of(steps_done - 1).stop if steps_done > self.first_step else self.first_epoch

    def _cut(self, step: int) -> tuple[Span, ...]:
        step -= self.first_step
        return self.schedule.micro_batches(step if self.steps_per_epoch is None else step % self.steps_per_epoch)

    def indices(self, step: int, span: Span) -> NDArray[np.int64]:
        """Return the samples at a span of positions of step `step`."""
        start, stop = span
        if self.steps_per_epoch is not None:
            return self.order(self.epoch_of(step)).take(start, stop)
        pieces = []
        while start < stop:
            epoch, offset = divmod(start, self.length)
            end = min(stop - start + offset, self.length)
            pieces.append(self.order(self.first_epoch + epoch).take(offset, end))
            start += end - offset
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def find_checks(self, step: int, world_size: int) -> tuple[Check, ...]:
        """Return the micro-batches of step `step` that two ranks compute; () if the step is not checked."""
        every = None if self._check_every is None else self._check_every.steps
        if every is None or (step + 1) % every:
            return ()
        return plan_checks(len(self.micro_batches(step)), world_size, step // every)

    def task(self, step: int, v: int) -> Task:
        """Return the task of micro-batch v of a step."""
        span = self.micro_batches(step)[v]
        return Task(self.indices(step, span), derive(self._seed, "data", step=step, micro_batch=v))

    def tasks(self, start: int, stop: int, *, rank: int, world_size: int) -> Iterator[Task]:
        """Yield the tasks of this rank for steps start..stop-1 of the run, in order."""
        for step in range(start, stop):
            spans = self.micro_batches(step)
            borrowed = [check.v for check in self.find_checks(step, world_size) if check.checker == rank]
            for v in (*borrowed, *build_layout(len(spans), world_size).ranges[rank]):
                yield self.task(step, v)

    def count_workers(self, rank: int, world_size: int) -> int:
        """Return the number of loader workers of a rank.

        Workers take turns with the micro-batches, and a lane must stay in one worker. So a stream gets a number of
        workers that divides the rank's lanes evenly.
        """
        most = self.spec.num_workers
        if self.lanes is None or not most:
            return most
        held = len(build_layout(self.lanes.num_lanes, world_size).ranges[rank])
        return max(count for count in range(1, held + 1) if held % count == 0 and count <= most)

    def check_shards(self, run_dir: Path, mark: str | None) -> None:
        """Compare the shards with those that the loop had in earlier starts.

        Args:
            mark: the entry "shards" in the loop's recorded numbers.

        Raises:
            RunDirectoryError: they differ; the message names them.
        """
        if mark is None or mark == self._shards_mark:
            return
        try:
            before, _ = parse_shards(read_bytes(run_dir / shards_file(mark)))
        except (OSError, ValueError):
            return  # the numbers differ, which is an error, too
        raise RunDirectoryError(
            f"{OTHER_SHARDS}: {explain_change(before, self.shards)}; restore them, or start with {advise(fresh=True)}"
        )

    def check_marks(self, run_dir: Path, *, overrides: bool) -> list[Mark]:
        """Return the marks of the shards, for `keep_shards`. Compares them with those of an earlier start.

        Raises:
            RunDirectoryError: the content of shards has changed and `overrides` is False; the message names them.
        """
        before: list[Mark] = []
        with suppress(OSError, ValueError):
            _, before = parse_shards(read_bytes(run_dir / shards_file(self._shards_mark)))
        marks = mark_shards(self.spec.dataset, before)
        if not overrides and (changed := explain_rewrite(self.shards, before, marks)):
            raise RunDirectoryError(
                f"{OTHER_SHARDS}: {changed}; restore them; to continue with the new content, pass override=True to "
                f"run.prepare, or start with {advise(override=True)}"
            )
        return marks

    def keep_shards(self, run_dir: Path, marks: list[Mark]) -> str:
        """Write the list of shards, for the audit of the ledger and for later starts. Returns a warning, or ""."""
        path = run_dir / shards_file(self._shards_mark)
        try:
            content = format_shards(self.shards, marks)
            if path.exists() and read_bytes(path) == content:
                return ""
            path.parent.mkdir(exist_ok=True)
            replace_file(path, content, sync=True)
        except OSError as error:
            return f"the list of the data set's shards could not be written ({error}): the run continues"
        return ""

    def order_fingerprint(self, epoch: int) -> int:
        """Return a hash of the order that a sampler gave for an epoch, so that ranks can compare it."""
        order = self.order(epoch)
        return fingerprint(order.take(0, len(order)))

    def keep_order(self, epoch: int, run_dir: Path, steps_done: int) -> str:
        """Write the order that a sampler gave, for the audit of the ledger.

        Returns:
            A warning about the file; "" if there is none.

        Raises:
            InvalidValue: before a restart, the epoch had a different order.
        """
        path, order = run_dir / order_file(epoch), self.order(epoch)
        indices = order.take(0, len(order))
        local_epoch, local_step = epoch - self.first_epoch, steps_done - self.first_step
        first = local_epoch * (self.steps_per_epoch or self.length)
        is_begun = (local_step if self.steps_per_epoch else self.schedule.span(local_step)[0]) > first
        problem = ""
        try:
            if is_begun and path.exists():
                problem = _compare_order(path, epoch, indices)
            path.parent.mkdir(exist_ok=True)
            content = io.BytesIO()
            np.save(content, indices)
            replace_file(path, content.getbuffer(), sync=True)
        except OSError as error:
            return f"the order of epoch {epoch} could not be written ({error}): the run continues"
        return problem


def _compare_order(path: Path, epoch: int, indices: NDArray[np.int64]) -> str:
    """Compare an epoch's order with the one in its file. Returns a warning about the file. Raises Error and OSError."""
    with open(path, "rb", opener=open_regular) as file:
        content = io.BytesIO(file.read())
    try:
        kept = np.load(content, allow_pickle=False)
    except Exception as error:  # of several kinds
        return f"{path} is damaged ({error}), and written again from sampler({epoch})"
    if not np.array_equal(kept, indices):
        raise InvalidValue(
            f"sampler({epoch}) gave other indices than before the restart: make them depend on epoch alone"
        )
    return ""
