"""The data set of a loop, with the plan by which it is read and the orders that a sampler gives."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from samestep.data.lanes import Lanes
from samestep.data.loader import seed_all
from samestep.data.source import Shard, read_shards
from samestep.data.spec import DataSpec, is_stream, read_data_arguments
from samestep.errors import InvalidType, InvalidValue
from samestep.plan.loop_plan import LoopPlan
from samestep.plan.order import Indices, check_order, derive

Sampler = Callable[[int], Iterable[int]]


class SamplerOrders:
    """Calls the sampler once for each epoch of a loop, and keeps the orders of the newest epochs.

    Args:
        sampler: maps an epoch to the indices of its samples.
        seed: the seed of the run. The global generators are seeded from it before a call.
        num_samples: length of the data set.
        first_epoch: the loop's first epoch.
        epoch_length: number of samples of an epoch, if the sampler gave it before a restart. Else the sampler is called
            for the first epoch.

    Attributes:
        epoch_length: number of samples of each epoch.

    Raises:
        InvalidType, InvalidValue: as `find`.
    """

    def __init__(
        self, sampler: Sampler, seed: int, num_samples: int, first_epoch: int, epoch_length: int | None
    ) -> None:
        self._sampler = sampler
        self._seed = seed
        self._num_samples = num_samples
        self._open: dict[int, Indices] = {}
        self._is_proven = False  # the sampler gives the same indices when it is called again
        if epoch_length is None:
            order = self._call_sampler(first_epoch)
            epoch_length = len(order)
            self._open[first_epoch] = order
        self.epoch_length = epoch_length

    def find(self, epoch: int) -> Indices:
        """Return the order of an epoch. Calls the sampler if it is later than all known ones. See `LoopPlan`.

        Raises:
            InvalidType, InvalidValue: the sampler gave something else than indices, other ones in a second call, or
                more or fewer than for the first epoch.
        """
        if epoch not in self._open:
            assert epoch > max(self._open, default=-1), f"the order of epoch {epoch} was dropped"
            order = self._call_sampler(epoch)
            if len(order) != self.epoch_length:
                raise InvalidValue(
                    f"sampler({epoch}) gave {len(order)} indices, and {self.epoch_length} for the epochs before: give "
                    "as many for each epoch, or use one loop per length",
                    code="SS312",
                )
            self._open[epoch] = order
        return self._open[epoch]

    def restore(self, epoch: int, indices: Indices) -> None:
        """Set the order of an epoch, which the sampler gave in an earlier start.

        The sampler may depend on a state that has changed since the epoch began, so it is not called again.
        """
        self._open[epoch] = check_order(indices, self._num_samples, epoch)

    def open_epochs(self, epochs: range) -> Mapping[int, Indices]:
        """Find the orders of epochs, and forget those of earlier ones."""
        self._open = {epoch: self.find(epoch) for epoch in epochs}
        return self._open

    def state_dict(self) -> dict[str, Any]:
        """Return the order of the newest epoch, for a snapshot. It gives the length of the others."""
        epoch = max(self._open)
        return {"epoch": epoch, "indices": self._open[epoch]}

    def _call_sampler(self, epoch: int) -> Indices:
        order = self._call_once(epoch)
        if not self._is_proven and not np.array_equal(order, self._call_once(epoch)):
            raise InvalidValue(
                f"sampler({epoch}) gave other indices when it was called again: let them depend on the epoch, on "
                "what run.prepare restores, on run.state and on the global generators, which the run seeds",
                code="SS308",
            )
        self._is_proven = True
        return order

    def _call_once(self, epoch: int) -> Indices:
        seed_all(derive(self._seed, "order", step=epoch))
        return check_order(self._sampler(epoch), self._num_samples, epoch)  # a generator runs only here


@dataclass(frozen=True)
class LoopData:
    """The data set of a loop, with the plan by which it is read.

    Attributes:
        planned: the number of steps of the run at the loop's end in the script, without `max_steps`.
        plan: the samples of each step, as indices of the data set.
        spec: the data set, and how to load micro-batches from it.
        lanes: the data set, if it is a stream; else None.
        shards: shards of the data set, if it is a source; else ().
        shards_hash: see `read_shards`.
        orders: the orders of epochs, if a sampler gives them; else None.
    """

    planned: int
    plan: LoopPlan
    spec: DataSpec
    lanes: Lanes | None
    shards: tuple[Shard, ...]
    shards_hash: str
    orders: SamplerOrders | None

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers that identify the loop."""
        return {**({"shards": self.shards_hash} if self.shards else {}), **self.plan.numbers}


def open_loop_data(
    data: Any,
    count: int,
    *,
    seed: int,
    batch_size: int,
    micro_batch_size: int,
    endless: bool,
    sampler: Any,
    start: tuple[int, int],
    epoch_length: int | None = None,
    **arguments: Any,
) -> LoopData:
    """Check what the script passed to `run.epochs` or `run.steps`, and plan the loop.

    Args:
        data, count, sampler, arguments: what the script passed.
        endless: whether the data set is repeated and no step is short, as in `run.steps`.
        start: the step and the epoch where the loop begins.
        epoch_length: the number of samples that the sampler gave for an epoch of this loop before a restart.

    Raises:
        Error: `data` is not a data set, or the arguments contradict each other.
    """
    for name in ("shuffle", "drop_last", "pin_memory"):
        if not isinstance(arguments.get(name), bool | None):
            raise InvalidValue(f"{name} must be True or False, not {arguments[name]!r}", code="SS101")
    if sampler is not None and not callable(sampler):
        raise InvalidType(
            "sampler must be a function, sampler(epoch) -> sample indices, equal on all ranks, not a "
            f"{type(sampler).__name__}",
            code="SS102",
        )
    if sampler is not None and arguments.get("shuffle"):
        raise InvalidValue(
            "sampler and shuffle=True were both given: the sampler decides the order, leave shuffle out", code="SS104"
        )
    spec = read_data_arguments(data, sizes=(micro_batch_size, batch_size), takes_streams=endless, **arguments)
    lanes = None
    if is_stream(spec.dataset):
        if sampler is not None or arguments.get("shuffle"):
            raise InvalidValue("a stream decides its order itself: leave sampler and shuffle out", code="SS104")
        lanes = Lanes(spec.dataset, batch_size // micro_batch_size, micro_batch_size, seed, start[0])
        spec = replace(spec, dataset=lanes, shuffle=False)
    shards, shard_sizes, shards_hash = read_shards(spec.dataset)
    orders = None if sampler is None else SamplerOrders(sampler, seed, len(spec), start[1], epoch_length)
    plan = LoopPlan(
        length=len(spec),
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        seed=seed,
        is_endless=endless,
        shuffle=spec.shuffle,
        drop_last=spec.drop_last,
        is_stream=lanes is not None,
        shard_sizes=shard_sizes,
        find_order=None if orders is None else orders.find,
        epoch_length=None if orders is None else orders.epoch_length,
        first_step=start[0],
        first_epoch=start[1],
    )
    return LoopData(plan.plan_end(count), plan, spec, lanes, shards, shards_hash, orders)
