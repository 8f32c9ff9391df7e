"""The micro-batches of a loop's steps: calls the sampler, and loads what this rank computes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from samestep.data.lanes import LanePosition
from samestep.data.loader import Loaded, Loader
from samestep.data.source import keep_order
from samestep.errors import InvalidValue
from samestep.hashing import hash_short
from samestep.plan.loop_plan import Task
from samestep.train.context import RunContext
from samestep.train.determinism import keeping_generators
from samestep.train.loop_data import LoopData


class Feed:
    """Loads the micro-batches of a loop on this rank.

    Args:
        has_steps: whether the loop has steps left.
        borrow: (step, number of micro-batches) -> those of other ranks that this rank loads, too; None: none.

    Attributes:
        data: the data set.
        plan: the samples of each step.
        loader: gives this rank's micro-batches, in their order, from some step on.
    """

    def __init__(
        self,
        context: RunContext,
        data: LoopData,
        borrow: Callable[[int, int], Sequence[int]] | None,
        *,
        has_steps: bool,
    ) -> None:
        self.data = data
        self.plan = data.plan
        self._context = context
        self._state = context.state
        self._borrow = borrow
        self._loaded_end = context.state.steps_done  # the step up to which the loader has the samples
        self._loader_begin = context.state.steps_done  # the first step of the loader's micro-batches
        self._is_closed = False
        if has_steps:
            self._find_orders()
        self.loader = self._open_loader({} if data.lanes is None else data.lanes.positions)

    def load(self, step: int, v: int) -> Loaded:
        """Return micro-batch v of a step. Call it for each micro-batch of this rank, in their order.

        Raises:
            Error: the data set failed.
        """
        if step >= self._loader_begin:
            loaded = next(self.loader)
            assert loaded.place == (step, v), f"the next micro-batch is not {v} of step {step}"
            return loaded
        alone = replace(self.data.spec, num_workers=0)
        positions = self.loader.positions
        with Loader(alone, [self.plan.task(step, v)], device=self._context.device, positions=positions) as loader:
            loaded = next(loader)
        positions |= loader.positions
        if self.data.lanes is not None and self._has_workers:
            self.data.lanes.close()  # the workers read on
        return loaded

    def divide_again(self) -> None:
        """Load what this rank computes now that the group has changed. The present step is loaded in this process."""
        if self._is_closed:
            return
        self.loader.close()
        self._loader_begin = max(self._state.steps_done, self._state.newest_step + 1)
        positions = self.loader.positions
        if self.data.lanes is not None:
            self.data.lanes.move(positions.values())
        self.loader = self._open_loader(positions)

    def load_further(self) -> None:
        """If the next step is not known yet, call the sampler for its epochs, and load them."""
        if self._state.steps_done != self._loaded_end:
            return
        self._find_orders()
        self._loader_begin = self._state.steps_done
        self.loader.begin(self._begin_tasks())

    def gather_lanes(self) -> list[LanePosition]:
        """Gather the positions of a stream's lanes from the ranks that read them, on all ranks. [] without a stream."""
        lanes = self.data.lanes
        if lanes is None:
            return []
        context = self._context
        steps_done = self._state.steps_done
        while True:
            for positions in context.group.gather([*self.loader.positions.values()]):
                lanes.move(positions)  # if the rank that reads a lane dies, another one continues from there
            behind = lanes.list_behind(steps_done)
            if not behind:
                return [lanes.positions[lane] for lane in sorted(lanes.positions)]
            # A rank has died after it had read them. The rank that reads these lanes now does so again.
            own = context.divide_step(lanes.num_lanes).ranges[context.group.replica]
            with keeping_generators():
                for lane in behind:
                    if lane in own:
                        self.load(steps_done - 1, lane)

    def close(self) -> None:
        """End the workers."""
        self._is_closed = True
        self.loader.close()

    def _open_loader(self, positions: Mapping[int, LanePosition]) -> Loader:
        context = self._context
        most = 0 if self._state.loop.is_past else self.data.spec.num_workers
        held = context.divide_step(self.plan.num_micro_batches).ranges[context.group.replica]
        num_workers = self.plan.count_workers(most, len(held))
        self._has_workers = num_workers > 0
        spec = replace(self.data.spec, num_workers=num_workers)
        return Loader(spec, self._begin_tasks(), device=context.device, positions=positions)

    def _begin_tasks(self) -> Iterator[Task]:
        """Return this rank's tasks for the steps whose samples are known."""
        context = self._context
        return self.plan.tasks(
            self._loader_begin,
            self._loaded_end,
            rank=context.group.replica,
            layout=context.divide_step,
            borrow=self._borrow,
        )

    def _find_orders(self) -> None:
        """With a sampler, get the orders of the next step's epochs, check that all ranks have the same, and keep them.

        The loader workers do not read ahead over the end of these epochs, where a sampler may depend on the last step.
        """
        self._loaded_end = self._state.loop.last_step
        orders = self.data.orders
        if orders is None:
            return
        context = self._context
        directory = context.location.path
        epochs = self.plan.epochs_of(self._state.steps_done)
        self._loaded_end = min(self._loaded_end, self.plan.num_steps_within(epochs[-1]))
        for epoch, indices in orders.open_epochs(epochs).items():
            if len(set(context.group.gather(hash_short(indices.data)))) > 1:
                raise InvalidValue(
                    f"sampler({epoch}) gave other indices on other ranks: seed it from the epoch, not the rank",
                    code="SS308",
                )
            if directory is not None and (
                problem := context.location.once(partial(keep_order, directory, epoch, indices))
            ):
                context.say(problem)
