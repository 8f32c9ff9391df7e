"""The plan of one loop: all that follows from the length of its data, from the sizes of a step and from the seed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Self

import numpy as np

from samestep.errors import InvalidValue
from samestep.hashing import hash_short
from samestep.plan.ledger import combine
from samestep.plan.order import Indices, Order, build_order, derive
from samestep.plan.tree import Layout, Span, check_numbers, check_positive

STREAM_LENGTH = 1 << 62  # the length of a stream, whose end is not known


class Task(NamedTuple):
    """One micro-batch to load.

    Args:
        indices: the samples, in order.
        seed: passed to `seed_all` before the first sample is read (augmentation, collate_fn).
        place: the step and the number of the micro-batch.
    """

    indices: Indices
    seed: int
    place: tuple[int, int] = (0, 0)


class StepSamples(NamedTuple):
    """The samples of a step, in order.

    Attributes:
        by_epoch: those of each epoch.
        fingerprint: the ledger's fingerprint of them.
    """

    samples: Indices
    by_epoch: Mapping[int, Indices]
    fingerprint: int


@dataclass(frozen=True, kw_only=True, eq=False)
class LoopPlan:
    """The samples of each step of a loop, its epochs and its end. Reads no files and no data.

    Steps and epochs are numbered over all loops of the run. All epochs of a loop have the same length n, and position p
    of the loop is position `p % n` of its epoch `p // n`. The last step of an epoch is short if `batch_size` does not
    divide n: it has fewer micro-batches, and the last one may be smaller. In an endless loop, a step that crosses the
    end of an epoch continues in the next one (or in several, if the data set is tiny).

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
        InvalidValue: a size is not an integer above 0, `micro_batch_size` does not divide `batch_size`, the data set is
            empty, or `drop_last` leaves no step.

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
        check_positive("the length of the data set", self.length)
        check_numbers(self.batch_size, self.micro_batch_size, 1)
        if self.num_dropped == self._num_samples:
            raise InvalidValue(
                f"drop_last leaves no step of a data set of length {self.length} with batch_size {self.batch_size}: "
                f"lower batch_size to at most {self.length}, or remove drop_last",
                code="SS108",
            )

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
        """The numbers that identify the loop, except for those of the run."""
        return {
            "first_step": self.first_step,
            "first_epoch": self.first_epoch,
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

    @cached_property
    def _num_samples(self) -> int:
        """Number of samples of each epoch."""
        return self.length if self.epoch_length is None else self.epoch_length

    @cached_property
    def num_dropped(self) -> int:
        """The number of samples of each epoch that no step uses."""
        return self._num_samples % self.batch_size if self.drop_last and not self.is_endless else 0

    @cached_property
    def steps_per_epoch(self) -> int:
        """Number of steps of each epoch. Not for endless loops."""
        return -(-(self._num_samples - self.num_dropped) // self.batch_size)

    @property
    def has_short_step(self) -> bool:
        """Whether the last step of an epoch has fewer samples than the others."""
        return not self.is_endless and (self._num_samples - self.num_dropped) % self.batch_size != 0

    def plan_end(self, count: int) -> int:
        """Return the number of steps of the run after a loop of `count` epochs, or steps if it is endless."""
        return self.first_step + (count if self.is_endless else count * self.steps_per_epoch)

    def _span(self, step: int) -> Span:
        """Return the positions of step `step`."""
        number = step - self.first_step
        if self.is_endless:
            return number * self.batch_size, (number + 1) * self.batch_size
        epoch, step_of_epoch = divmod(number, self.steps_per_epoch)
        start = epoch * self._num_samples + step_of_epoch * self.batch_size
        return start, min(start + self.batch_size, (epoch + 1) * self._num_samples)

    def epochs_of(self, step: int) -> range:
        """Return the epochs that have a sample in step `step` of the run."""
        start, stop = self._span(step)
        first = self.first_epoch
        return range(first + start // self._num_samples, first + (stop - 1) // self._num_samples + 1)

    def epoch_of(self, step: int) -> int:
        """Return the epoch in which step `step` of the run begins."""
        return self.first_epoch + self.micro_batches(step)[0][0] // self._num_samples

    def num_steps_within(self, epoch: int) -> int:
        """Return the number of steps of the run that need no sample of the epochs after `epoch`."""
        count = epoch + 1 - self.first_epoch
        return self.plan_end(count * self._num_samples // self.batch_size if self.is_endless else count)

    def num_steps_until(self, epoch: int) -> int:
        """Return the number of steps of the run after which all samples of an epoch are used."""
        count = epoch + 1 - self.first_epoch
        return self.plan_end(-(-count * self._num_samples // self.batch_size) if self.is_endless else count)

    def epochs_done(self, steps_done: int) -> int | None:
        """Return the number of completed epochs if an epoch ends after `steps_done` steps of the run, else None."""
        if self.is_endless or (steps_done - self.first_step) % self.steps_per_epoch:
            return None
        return self.epoch_of(steps_done)

    def next_epoch(self, steps_done: int) -> int:
        """Return the first epoch of the next loop, if this one ends after `steps_done` steps of the run."""
        return self.epochs_of(steps_done - 1).stop if steps_done > self.first_step else self.first_epoch

    # --- samples ----------------------------------------------------------------------------------------------

    @cached_property
    def micro_batches(self) -> Callable[[int], tuple[Span, ...]]:
        """Maps a step to its micro-batches: spans of positions of the loop."""
        return lru_cache(maxsize=64)(self._cut_step)

    def _cut_step(self, step: int) -> tuple[Span, ...]:
        start, stop = self._span(step)
        starts = range(start, stop, self.micro_batch_size)
        return tuple(zip(starts, (*starts[1:], stop), strict=True))

    def indices(self, span: Span) -> Indices:
        """Return the samples of a micro-batch."""
        return np.concatenate([*self._split(span).values()])

    def plan_step(self, step: int) -> StepSamples:
        """Return the samples of step `step`, with their epochs."""
        prints = [hash_short(self.indices(span).data) for span in self.micro_batches(step)]
        by_epoch = self._split(self._span(step))
        return StepSamples(np.concatenate([*by_epoch.values()]), by_epoch, combine(prints))

    def count_uses(self, epoch: int) -> Indices:
        """Return how often an epoch uses each sample of the data set, including those that `drop_last` leaves out."""
        if not self.has_sampler:
            return np.ones(self.length, dtype=np.int64)
        order = self._order_of(epoch)
        return np.bincount(order[0 : len(order)])

    def _split(self, span: Span) -> dict[int, Indices]:
        """Return the samples of a span by epoch."""
        start, stop = span
        length = self._num_samples
        by_epoch: dict[int, Indices] = {}
        for number in range(start // length, (stop - 1) // length + 1):
            epoch = self.first_epoch + number
            offset = number * length
            by_epoch[epoch] = np.asarray(self._order_of(epoch)[max(start - offset, 0) : min(stop - offset, length)])
        return by_epoch

    @cached_property
    def _order_of(self) -> Callable[[int], Order]:
        return self.find_order or lru_cache(maxsize=2)(self._build_order)

    def _build_order(self, epoch: int) -> Order:
        return build_order(self.length, seed=self.seed, epoch=epoch, shuffle=self.shuffle, shard_sizes=self.shard_sizes)

    # --- ranks and their loaders ------------------------------------------------------------------------------

    def task(self, step: int, v: int) -> Task:
        """Return the task of micro-batch v of a step."""
        span = self.micro_batches(step)[v]
        return Task(self.indices(span), derive(self.seed, "data", step=step, micro_batch=v), (step, v))

    def tasks(
        self,
        start: int,
        stop: int,
        *,
        rank: int,
        layout: Callable[[int], Layout],
        borrow: Callable[[int, int], Sequence[int]] | None = None,
    ) -> Iterator[Task]:
        """Yield the tasks of a rank for steps start..stop-1 of the run, in order.

        Args:
            layout: maps a number of micro-batches to their layout.
            borrow: maps a step and its number of micro-batches to those of other ranks that this rank loads first.
                None: none.
        """
        for step in range(start, stop):
            num_micro_batches = len(self.micro_batches(step))
            shares = layout(num_micro_batches)
            borrowed = borrow(step, num_micro_batches) if borrow is not None else ()
            for v in (*borrowed, *shares.ranges[rank], *shares.fillers[rank]):
                yield self.task(step, v)

    def count_workers(self, most: int, num_held: int) -> int:
        """Return the number of loader workers of a rank: `most`, or fewer for a stream.

        Workers take turns with the micro-batches, and a lane must stay in one worker. So a stream gets a number of
        workers that divides the rank's lanes evenly.

        Args:
            num_held: the number of micro-batches of the rank in a full step.
        """
        if not self.is_stream or not most:
            return most
        return max(count for count in range(1, num_held + 1) if num_held % count == 0 and count <= most)
