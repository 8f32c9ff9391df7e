"""The plan of one loop: all that follows from the length of its data, from the sizes of a step and from the seed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Self

import numpy as np

from samestep.plan.ledger import combine, fingerprint
from samestep.plan.order import Indices, Order, build_order
from samestep.plan.schedule import Schedule, Span
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

    Steps and epochs are numbered over all loops of the run. All epochs of a loop have the same length.

    Attributes:
        length: samples of the data set; `STREAM_LENGTH` for a stream.
        batch_size, micro_batch_size, seed: those of the run.
        is_endless: whether the data set is repeated and no step is short, as in `run.steps`.
        shuffle: whether each epoch has another order, if there is no sampler.
        drop_last: whether to leave out the last step of an epoch if it is short. No effect if the loop is endless.
        is_stream: whether the data set is read in lanes, one per micro-batch of a step.
        shard_sizes: the samples of each shard, if the data set is stored in shards.
        find_order: with a sampler, maps an epoch to the order that the sampler gives or has given. None: no sampler.
        epoch_length: with a sampler, the samples of each epoch.
        first_step, first_epoch: where the loop begins.

    Raises:
        InvalidValue: the sizes do not fit together, see `Schedule`.

    Example::

        >>> plan = LoopPlan(length=10, batch_size=4, micro_batch_size=2, seed=0, shuffle=False)
        >>> plan.steps_per_epoch, plan.micro_batches(1), plan.micro_batches(2)
        (3, ((4, 6), (6, 8)), ((8, 10),))
        >>> plan.epoch_of(5), plan.micro_batches(5), plan.indices((18, 20)).tolist()
        (1, ((18, 20),), [8, 9])
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
    epoch_length: int | None = None
    first_step: int = 0
    first_epoch: int = 0

    def __post_init__(self) -> None:
        _ = self._schedule  # raises its errors now

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
            epoch_length=numbers["epoch_length"] if numbers["sampler"] == "given" else None,
            first_step=numbers.get("first_step", 0),
            first_epoch=numbers.get("first_epoch", 0),
        )

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers that identify the loop, except for those of the run and for its beginning."""
        return {
            **({"num_lanes": self.num_micro_batches} if self.is_stream else {}),
            **({"epoch_length": self.epoch_length} if self.has_sampler else {}),
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
    def num_micro_batches(self) -> int:
        """V, the number of micro-batches of a full step. A stream has as many lanes."""
        return self.batch_size // self.micro_batch_size

    # --- steps and epochs -------------------------------------------------------------------------------------

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of each epoch. Not for endless loops."""
        return self._schedule.num_steps

    def plan_end(self, count: int) -> int:
        """Return the number of steps of the run after a loop of `count` epochs, or steps if it is endless."""
        return self.first_step + (count if self.is_endless else count * self.steps_per_epoch)

    def epochs_of(self, step: int) -> range:
        """Return the epochs that have a sample in step `step` of the run."""
        epochs = self._schedule.epochs_of(step - self.first_step)
        return range(self.first_epoch + epochs.start, self.first_epoch + epochs.stop)

    def epoch_of(self, step: int) -> int:
        """Return the epoch in which step `step` of the run begins."""
        return self.epochs_of(step).start

    def num_steps_within(self, epoch: int) -> int:
        """Return the number of steps of the run that need no sample of the epochs after `epoch`."""
        return self.first_step + self._schedule.count_within(epoch + 1 - self.first_epoch)

    def num_steps_until(self, epoch: int) -> int:
        """Return the number of steps of the run after which all samples of an epoch are used."""
        return self.first_step + self._schedule.count_until(epoch + 1 - self.first_epoch)

    def epochs_done(self, steps_done: int) -> int | None:
        """Return the number of completed epochs if an epoch ends after `steps_done` steps of the run, else None."""
        if self.is_endless or (steps_done - self.first_step) % self.steps_per_epoch:
            return None
        return self.epoch_of(steps_done)

    def next_epoch(self, steps_done: int) -> int:
        """Return the first epoch of the next loop, if this one ends after `steps_done` steps of the run."""
        return self.epochs_of(steps_done - 1).stop if steps_done > self.first_step else self.first_epoch

    # --- samples ----------------------------------------------------------------------------------------------

    def micro_batches(self, step: int) -> tuple[Span, ...]:
        """Return the micro-batches of step `step`: spans of positions of the loop."""
        return self._cut(step)

    def indices(self, span: Span) -> Indices:
        """Return the samples of a micro-batch."""
        pieces = self._take(span)
        return pieces[0][1] if len(pieces) == 1 else np.concatenate([samples for _, samples in pieces])

    def plan_step(self, step: int) -> StepSamples:
        """Return the samples of step `step`, with their epochs."""
        taken = [self._take(span) for span in self.micro_batches(step)]
        prints = [fingerprint(np.concatenate([samples for _, samples in pieces])) for pieces in taken]
        return StepSamples(tuple(piece for pieces in taken for piece in pieces), combine(prints))

    def count_uses(self, epoch: int) -> Indices:
        """Return how often an epoch uses each sample of the data set, including those that `drop_last` leaves out."""
        if not self.has_sampler:
            return np.ones(self.length, dtype=np.int64)
        order = self._order_of(epoch)
        return np.bincount(order.take(0, len(order)))

    @property
    def num_dropped(self) -> int:
        """The number of samples of each epoch that no step uses."""
        return self._schedule.num_dropped

    def _take(self, span: Span) -> list[tuple[int, Indices]]:
        pieces = [(self.first_epoch + number, part) for number, part in self._schedule.pieces(span)]
        return [(epoch, self._order_of(epoch).take(*part)) for epoch, part in pieces]

    @cached_property
    def _order_of(self) -> Callable[[int], Order]:
        return self.find_order or lru_cache(maxsize=2)(self._build_order)

    def _build_order(self, epoch: int) -> Order:
        sizes = self.shard_sizes
        return build_order(self.length, seed=self.seed, epoch=epoch, shuffle=self.shuffle, shard_sizes=sizes)

    @cached_property
    def _schedule(self) -> Schedule:
        length = self.length if self.epoch_length is None else self.epoch_length
        return Schedule(length, self.batch_size, self.micro_batch_size, self.drop_last, self.is_endless)

    @cached_property
    def _cut(self) -> Callable[[int], tuple[Span, ...]]:
        return lru_cache(maxsize=64)(lambda step: self._schedule.micro_batches(step - self.first_step))

    # --- ranks and their loaders ------------------------------------------------------------------------------

    def task(self, step: int, v: int) -> Task:
        """Return the task of micro-batch v of a step."""
        span = self.micro_batches(step)[v]
        return Task(self.indices(span), derive(self.seed, "data", step=step, micro_batch=v))

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
