"""The data set of a loop, with the plan by which it is read."""

from dataclasses import dataclass, replace
from typing import Any

from samestep.data.lanes import Lanes
from samestep.data.source import Shard, read_shards
from samestep.data.spec import DataSpec, is_stream, read_data_arguments
from samestep.errors import InvalidType, InvalidValue
from samestep.plan.loop_plan import LoopPlan
from samestep.train.inputs.sampler_orders import SamplerOrders


@dataclass(frozen=True)
class LoopData:
    """The data set of a loop, with the plan by which it is read.

    Attributes:
        count: number of epochs of the loop, or of steps in a loop over steps.
        plan: the samples of each step, as indices of the data set.
        spec: the data set, and how to load micro-batches from it.
        lanes: the data set, if it is a stream; else None.
        shards: shards of the data set, if it is a source; else ().
        shards_hash: see `read_shards`.
        orders: the orders of epochs, if a sampler gives them; else None.
    """

    count: int
    plan: LoopPlan
    spec: DataSpec
    lanes: Lanes | None
    shards: tuple[Shard, ...]
    shards_hash: str
    orders: SamplerOrders | None

    @property
    def planned(self) -> int:
        """The number of steps of the run at the loop's end in the script, without `max_steps`."""
        return self.plan.plan_end(self.count)

    @property
    def num_epochs(self) -> int | None:
        """Number of epochs of the run when the loop ends; None in a loop over steps."""
        return None if self.plan.is_endless else self.plan.first_epoch + self.count

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
        kind = type(sampler).__name__
        raise InvalidType(
            f"sampler must be a function, sampler(epoch) -> sample indices, equal on all ranks, not a {kind}",
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
    return LoopData(count, plan, spec, lanes, shards, shards_hash, orders)
