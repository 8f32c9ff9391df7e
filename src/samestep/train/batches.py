"""Applies the plan to a data set: the samples of each step, and those that this rank loads."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.config import Interval
from samestep.data.lanes import Lanes
from samestep.data.loader import Task, seed_all
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
from samestep.files import read_bytes, replace_file
from samestep.plan.compute_checks import Check, plan_checks
from samestep.plan.epochs import Epochs
from samestep.plan.ledger import fingerprint
from samestep.plan.order import GivenOrder, Order, build_order
from samestep.plan.schedule import EndlessSchedule, Span
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
        is_endless: whether an epoch's end is not the end of a step, as in `run.steps`.
        has_sampler: whether the script's sampler gives the order of an epoch. It is called by `open_epochs`.
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
        self.has_sampler, self.is_endless = sampler is not None, endless
        self._epochs = Epochs(
            batch_size, micro_batch_size, drop_last=bool(spec.drop_last), is_endless=endless, first_step=start[0],
            first_epoch=start[1], length=None if self.has_sampler else len(spec),
        )  # fmt: skip
        self._build_order = lru_cache(maxsize=2)(self._build)
        self._given: dict[int, GivenOrder] = {}  # the orders of the epochs that are open
        self._opened: list[int] = []  # since the last call of `take_opened`
        self._is_proven = False  # the sampler gives the same indices when it is called again
        self.micro_batches = lru_cache(maxsize=64)(self._epochs.micro_batches)

    def _build(self, epoch: int) -> Order:
        return build_order(
            len(self.spec), seed=self._seed, epoch=epoch, shuffle=self.spec.shuffle, shard_sizes=self._shard_sizes
        )

    def _find_order(self, epoch: int) -> Order:
        return self._given[epoch] if self.has_sampler else self._build_order(epoch)

    # --- a sampler --------------------------------------------------------------------------------------------

    def resume(self, step: int, epoch: int, order: Mapping[str, Any] | None = None) -> None:
        """With a sampler: continue after `step` steps of the run. Within an epoch with its order, see `state_dict`."""
        if order is None:
            self._epochs.begin(epoch, self._epochs.place_of(step))
            return
        self._epochs.begin(order["epoch"], order["start"])
        self._add(GivenOrder(order["indices"], len(self.spec), order["epoch"]))

    def state_dict(self, steps_done: int) -> dict[str, Any]:
        """Return the order of an epoch that is not complete after `steps_done` steps, if a sampler gave it.

        The sampler may depend on a state that has changed since the epoch began, so it is not called again.
        """
        place = self._epochs.place_of(steps_done)
        if not self.has_sampler or place >= self._epochs.end:
            return {}
        epoch = self._epochs.epoch_at(place)
        order = {"epoch": epoch, "start": self._epochs.start_of(epoch), "indices": self._given[epoch].indices}
        return {"order": order}

    def open_epochs(self, step: int) -> None:
        """Get the orders of the epochs of step `step` from the sampler, unless they are known.

        Raises:
            InvalidType, InvalidValue: the sampler gave something else than indices, or other ones in a second call.
        """
        while self._epochs.end < self._epochs.place_of(step + 1):
            epoch = self._epochs.next_epoch
            order = self._call_sampler(epoch)
            if not self._is_proven and not np.array_equal(order.indices, self._call_sampler(epoch).indices):
                raise InvalidValue(
                    f"sampler({epoch}) gave other indices when it was called again: let them depend on the epoch, on "
                    "what run.prepare restores, on run.state and on the global generators, which the run seeds"
                )
            self._is_proven = True
            self._add(order)
        first = self.epoch_of(step)
        self._given = {epoch: order for epoch, order in self._given.items() if epoch >= first}

    def take_opened(self) -> list[int]:
        """Return the epochs whose orders are known since the last call."""
        opened, self._opened = self._opened, []
        return opened

    def _call_sampler(self, epoch: int) -> GivenOrder:
        assert self._sampler is not None
        seed_all(derive(self._seed, "order", step=epoch))
        try:
            given = self._sampler(epoch)
            if not isinstance(given, Iterable):
                raise InvalidType(f"sampler({epoch}) gave {given!r}: return the epoch's sample indices, such as a list")
            return GivenOrder(given, len(self.spec), epoch)  # a generator runs only here
        except Exception as error:
            error.add_note(f"raised in sampler({epoch})")
            raise

    def _add(self, order: GivenOrder) -> None:
        epoch = self._epochs.next_epoch
        self._epochs.add(len(order))
        self._given[epoch] = order
        self._opened.append(epoch)

    # --- steps and epochs -------------------------------------------------------------------------------------

    @property
    def unit(self) -> str:
        """What the planned end of the loop counts: "step", or "epoch" if the lengths of later epochs are not known."""
        return "epoch" if self.has_sampler and not self.is_endless else "step"

    def plan(self, count: int) -> int:
        """Return the planned end of a loop of `count` epochs, or steps if it is endless: a `unit` of the run."""
        if self.is_endless:
            return self.first_step + count
        return self.first_epoch + count if self.has_sampler else self.end_of(self.first_epoch + count - 1)

    def find_end(self, planned: int) -> int | None:
        """Return the number of steps of the run at a planned end.

        Epochs whose length is not known yet count as if they had the length of the last known one. None: none is known.
        """
        if self.unit == "step":
            return planned
        is_open = bool(self._given) or planned <= self._epochs.next_epoch
        return self._epochs.start_of(planned) if is_open else None

    def find_known_end(self, last_step: int) -> int:
        """Return the step up to which the samples are known: at most `last_step`, and with a sampler less."""
        return min(last_step, self._epochs.step_at(self._epochs.end)) if self.has_sampler else last_step

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers that identify the loop."""
        return {
            **({} if self.lanes is None else {"num_lanes": self.lanes.num_lanes}),
            **({"shards": self._shards_mark} if self.shards else {}),
            "data_length": len(self.spec),
            "mode": "steps" if self.is_endless else "epochs",
            "shuffle": self.spec.shuffle,
            "drop_last": self.spec.drop_last,
            "sampler": "given" if self.has_sampler else "default",
        }

    def epoch_of(self, step: int) -> int:
        """Return the epoch in which step `step` of the run begins."""
        return self._epochs.epoch_at(self._epochs.place_of(step))

    def end_of(self, epoch: int) -> int:
        """Return the number of finished steps of the run when an epoch ends. Not for endless batches."""
        return self._epochs.start_of(epoch + 1)

    def count_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch. Not for endless batches."""
        return self._epochs.start_of(epoch + 1) - self._epochs.start_of(epoch)

    def epochs_done(self, steps_done: int) -> int | None:
        """Return the number of completed epochs if an epoch ends after `steps_done` steps of the run, else None."""
        epoch = self.epoch_of(steps_done)
        return None if self.is_endless or self._epochs.start_of(epoch) != steps_done else epoch

    def next_epoch(self, steps_done: int) -> int:
        """Return the first epoch of the next loop, if this one ends after `steps_done` steps of the run."""
        if self.has_sampler:
            return self._epochs.next_epoch
        return self._epochs.epochs_of(steps_done - 1).stop if steps_done > self.first_step else self.first_epoch

    def indices(self, step: int, span: Span) -> NDArray[np.int64]:
        """Return the samples at a span of positions of step `step`."""
        pieces = [self._find_order(epoch).take(start, stop) for epoch, start, stop in self._epochs.pieces(step, span)]
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

    def fingerprint_order(self, epoch: int) -> int:
        """Return a hash of the order that a sampler gave for an epoch, so that ranks can compare it."""
        return fingerprint(self._given[epoch].indices)

    def keep_order(self, epoch: int, run_dir: Path) -> str:
        """Write the order that a sampler gave, for the audit of the ledger. Returns a warning, or ""."""
        path, content = run_dir / order_file(epoch), io.BytesIO()
        np.save(content, self._given[epoch].indices)
        try:
            path.parent.mkdir(exist_ok=True)
            replace_file(path, content.getbuffer(), sync=True)
        except OSError as error:
            return f"the order of epoch {epoch} could not be written ({error}): the run continues"
        return ""
