"""The plan of one loop: all that follows from the length of its data, from the sizes of a step and from the seed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Self

import numpy as np

from samestep.plan.epochs import Epochs
from samestep.plan.ledger import combine, fingerprint
from samestep.plan.order import Indices, Order, build_order
from samestep.plan.schedule import Span
from samestep.plan.seeds import derive
from samestep.plan.tree import Layout, build_layout

STREAM_LENGTH = 1 << 62  # the length of a stream, whose end is not known


class Task(NamedTuple):
    """One micro-batch to load.

    Args:
        indices: the samples, in order.
        seed: passed to `seed_all` before the first sample is read (augmentation, collate_fn).
    """

    indices: Indices
    seed: int


@dataclass(frozen=True)
class StepSamples:
    """The samples of a step.

    Attributes:
        pieces: an epoch and samples of it, for each span of an epoch in a micro-batch, in order.
        fingerprint: the ledger's fingerprint of them.
    """

    pieces: tuple[tuple[int, Indices], ...]
    fingerprint: int

    @property
    def samples(self) -> Indices:
        """The samples of all micro-batches, in order."""
        return np.concatenate([samples for _, samples in self.pieces])


@dataclass(frozen=True, kw_only=True, eq=False)
class LoopPlan:
    """The samples of each step of a loop, its epochs and its end. Reads no files and no data.

    Steps and epochs are numbered over all loops of the run. With a sampler, the lengths of epochs are known only from
    `open_epochs` on; nothing else changes.

    Attributes:
        length: samples of the data set; `STREAM_LENGTH` for a stream.
        batch_size, micro_batch_size, seed: those of the run.
        is_endless: whether the data set is repeated and no step is short, as in `run.steps`.
        shuffle: whether each epoch has another order, if there is no sampler.
        drop_last: whether to leave out the last step of an epoch if it is short. No effect if the loop is endless.
        is_stream: whether the data set is read in lanes, one per micro-batch of a step.
        shard_sizes: the samples of each shard, if the data set is stored in shards.
        find_order: with a sampler, maps an epoch to the order that the sampler gives or has given. None: no sampler.
        first_step, first_epoch: where the loop begins.

    Raises:
        InvalidValue: the sizes do not fit together, see `Schedule`.

    Example::

        >>> plan = LoopPlan(length=10, batch_size=4, micro_batch_size=2, seed=0, shuffle=False)
        >>> plan.count_steps(epoch=0), plan.micro_batches(1), plan.micro_batches(2)
        (3, ((4, 6), (6, 8)), ((8, 10),))
        >>> plan.epoch_of(5), plan.indices(5, (8, 10)).tolist()
        (1, [8, 9])
    """

    length: int
    batch_size: int
    micro_batch_size: int
    seed: int
    is_endless: bool = False
    shuffle: bool = True
    drop_last: bool = False
    is_stream: bool = False
    shard_sizes: Sequence[int] | Indices = ()
    find_order: Callable[[int], Order] | None = None
    first_step: int = 0
    first_epoch: int = 0

    def __post_init__(self) -> None:
        _ = self._epochs  # raises its errors now

    @classmethod
    def from_numbers(
        cls,
        numbers: Mapping[str, Any],
        *,
        shard_sizes: Sequence[int] = (),
        find_order: Callable[[int], Order] | None = None,
    ) -> Self:
        """Build the plan of a recorded loop.

        Args:
            numbers: those of the run, with `numbers` of the loop.
            shard_sizes, find_order: as the attributes, if the loop has shards or a sampler.

        Raises:
            KeyError: a number is missing.
        """
        return cls(
            length=numbers["data_length"],
            batch_size=numbers["batch_size"],
            micro_batch_size=numbers["micro_batch_size"],
            seed=numbers["seed"],
            is_endless=numbers["mode"] == "steps",
            shuffle=numbers["shuffle"],
            drop_last=numbers["drop_last"],
            is_stream="num_lanes" in numbers,
            shard_sizes=shard_sizes,
            find_order=find_order if numbers["sampler"] == "given" else None,
            first_step=numbers.get("first_step", 0),
            first_epoch=numbers.get("first_epoch", 0),
        )

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers that identify the loop, except for those of the run and for its beginning."""
        return {
            **({"num_lanes": self.num_micro_batches} if self.is_stream else {}),
            "data_length": self.length,
            "mode": "steps" if self.is_endless else "epochs",
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "sampler": "given" if self.has_sampler else "default",
        }

    @property
    def has_sampler(self) -> bool:
        """Whether the script's sampler gives the order of an epoch."""
        return self.find_order is not None

    @property
    def drops_tail(self) -> bool:
        """Whether the last samples of an epoch are left out if they do not fill a step."""
        return self.drop_last and not self.is_endless

    @property
    def num_micro_batches(self) -> int:
        """V, the number of micro-batches of a full step. A stream has as many lanes."""
        return self.batch_size // self.micro_batch_size

    # --- the orders of a sampler ------------------------------------------------------------------------------

    def open_epochs(self, step: int) -> None:
        """With a sampler: find the orders of the epochs of step `step`, unless they are known. Raises its errors."""
        while self.has_sampler and self._epochs.end < self._epochs.place_of(step + 1):
            self._open_epoch()

    def _open_epoch(self) -> None:
        self._epochs.add(len(self._order_of(self._epochs.next_epoch)))

    def resume(self, step: int, epoch: int, start: int | None = None) -> None:
        """With a sampler: continue after `step` steps of the run.

        Args:
            epoch, start: the result of `find_open`. Without a start, the epoch begins at the step.
        """
        if start is None:
            self._epochs.begin(epoch, self._epochs.place_of(step))
        else:
            self._epochs.begin(epoch, start)
            self._open_epoch()

    def find_open(self, steps_done: int) -> tuple[int, int] | None:
        """With a sampler: return the epoch that is open after `steps_done` steps, and the place where it begins.

        None: no epoch is open, because one has ended there.
        """
        place = self._epochs.place_of(steps_done)
        if place >= self._epochs.end:
            return None
        epoch = self._epochs.epoch_at(place)
        return epoch, self._epochs.start_of(epoch)

    # --- steps and epochs -------------------------------------------------------------------------------------

    @property
    def unit(self) -> str:
        """What the planned end of the loop counts: "step", or "epoch" if the lengths of later epochs are not known."""
        return "epoch" if self.has_sampler and not self.is_endless else "step"

    def plan_end(self, count: int) -> int:
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
        is_known = self._epochs.has_lengths or planned <= self._epochs.next_epoch
        return self._epochs.start_of(planned) if is_known else None

    def find_known_end(self, last_step: int) -> int:
        """Return the step up to which the samples are known: at most `last_step`, and with a sampler less."""
        return min(last_step, self._epochs.step_at(self._epochs.end)) if self.has_sampler else last_step

    def epoch_of(self, step: int) -> int:
        """Return the epoch in which step `step` of the run begins."""
        return self._epochs.epoch_at(self._epochs.place_of(step))

    def end_of(self, epoch: int) -> int:
        """Return the number of finished steps of the run when an epoch ends. Not for endless loops."""
        return self._epochs.start_of(epoch + 1)

    def count_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch. Not for endless loops."""
        return self._epochs.start_of(epoch + 1) - self._epochs.start_of(epoch)

    def num_steps_until(self, epoch: int) -> int:
        """Return the number of steps of the run after which all samples of an epoch are used."""
        place = self._epochs.start_of(epoch + 1)
        return self.first_step - (-place // self.batch_size) if self.is_endless else place

    def epochs_done(self, steps_done: int) -> int | None:
        """Return the number of completed epochs if an epoch ends after `steps_done` steps of the run, else None."""
        epoch = self.epoch_of(steps_done)
        return None if self.is_endless or self._epochs.start_of(epoch) != steps_done else epoch

    def next_epoch(self, steps_done: int) -> int:
        """Return the first epoch of the next loop, if this one ends after `steps_done` steps of the run."""
        if self.has_sampler:
            return self._epochs.next_epoch
        return self._epochs.epochs_of(steps_done - 1).stop if steps_done > self.first_step else self.first_epoch

    # --- samples ----------------------------------------------------------------------------------------------

    def micro_batches(self, step: int) -> tuple[Span, ...]:
        """Return the micro-batches of step `step`: spans of positions of its epoch, or of the loop if it is endless."""
        return self._cut(step)

    def indices(self, step: int, span: Span) -> Indices:
        """Return the samples of a micro-batch of step `step`."""
        pieces = self._take(step, span)
        return pieces[0][1] if len(pieces) == 1 else np.concatenate([samples for _, samples in pieces])

    def plan_step(self, step: int) -> StepSamples:
        """Return the samples of step `step`, with their epochs."""
        self.open_epochs(step)
        taken = [self._take(step, span) for span in self.micro_batches(step)]
        prints = [fingerprint(np.concatenate([samples for _, samples in pieces])) for pieces in taken]
        return StepSamples(tuple(piece for pieces in taken for piece in pieces), combine(prints))

    def count_uses(self, epoch: int) -> Indices:
        """Return how often an epoch uses each sample of the data set, including those that `drop_last` leaves out."""
        if not self.has_sampler:
            return np.ones(self.length, dtype=np.int64)
        order = self._order_of(epoch)
        return np.bincount(order.take(0, len(order)))

    def count_dropped(self, epoch: int) -> int:
        """Return the number of samples of an epoch that no step uses."""
        length = len(self._order_of(epoch)) if self.has_sampler else self.length
        return length % self.batch_size if self.drops_tail else 0

    def _take(self, step: int, span: Span) -> list[tuple[int, Indices]]:
        pieces = self._epochs.pieces(step, span)
        return [(epoch, self._order_of(epoch).take(start, stop)) for epoch, start, stop in pieces]

    @cached_property
    def _order_of(self) -> Callable[[int], Order]:
        return self.find_order or lru_cache(maxsize=2)(self._build_order)

    def _build_order(self, epoch: int) -> Order:
        sizes = self.shard_sizes
        return build_order(self.length, seed=self.seed, epoch=epoch, shuffle=self.shuffle, shard_sizes=sizes)

    @cached_property
    def _epochs(self) -> Epochs:
        return Epochs(
            self.batch_size,
            self.micro_batch_size,
            drop_last=self.drop_last,
            is_endless=self.is_endless,
            first_step=self.first_step,
            first_epoch=self.first_epoch,
            length=None if self.has_sampler else self.length,
        )

    @cached_property
    def _cut(self) -> Callable[[int], tuple[Span, ...]]:
        return lru_cache(maxsize=64)(self._epochs.micro_batches)

    # --- ranks and their loaders ------------------------------------------------------------------------------

    def task(self, step: int, v: int) -> Task:
        """Return the task of micro-batch v of a step."""
        span = self.micro_batches(step)[v]
        return Task(self.indices(step, span), derive(self.seed, "data", step=step, micro_batch=v))

    def tasks(
        self,
        start: int,
        stop: int,
        *,
        rank: int,
        layout: Callable[[int], Layout],
        borrow: Callable[[int, int], Sequence[int]] = lambda step, num_micro_batches: (),
    ) -> Iterator[Task]:
        """Yield the tasks of a rank for steps start..stop-1 of the run, in order.

        Args:
            layout: maps a number of micro-batches to their layout.
            borrow: maps a step and its number of micro-batches to those of other ranks that this rank loads first.
        """
        for step in range(start, stop):
            num_micro_batches = len(self.micro_batches(step))
            shares = layout(num_micro_batches)
            for v in (*borrow(step, num_micro_batches), *shares.ranges[rank], *shares.find_fillers(rank)):
                yield self.task(step, v)

    def count_workers(self, most: int, *, rank: int, world_size: int) -> int:
        """Return the number of loader workers of a rank: `most`, or fewer for a stream.

        Workers take turns with the micro-batches, and a lane must stay in one worker. So a stream gets a number of
        workers that divides the rank's lanes evenly.
        """
        if not self.is_stream or not most:
            return most
        held = len(build_layout(self.num_micro_batches, world_size).ranges[rank])
        return max(count for count in range(1, held + 1) if held % count == 0 and count <= most)
