"""Streams: an IterableDataset, read in lanes that depend neither on the ranks nor on the workers.

A step has V micro-batches, and micro-batch v of every step comes from lane v of V. A lane is read in order, by the rank
that computes its micro-batch.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from samestep.data.loader import describe_error, seed_all
from samestep.data.spec import has_lanes
from samestep.errors import Error, InvalidType, InvalidValue
from samestep.hashing import hash_content
from samestep.plan.loop_plan import STREAM_LENGTH, Task
from samestep.plan.order import derive
from samestep.torch_internals import as_worker

END = object()  # of an iterator


class LanePosition(NamedTuple):
    """The position of a lane after one of its micro-batches, which is read again after a restart, to compare the mark.

    Attributes:
        lane: number of the lane.
        num_samples: number of samples that the lane has given.
        mark: hash of the last one.
        start: number of samples before the micro-batch.
        num_passes: how often the lane had begun again before it.
        state: the lane's `state_dict` before it; None without one, and at the beginning.
    """

    lane: int
    num_samples: int
    mark: str
    start: int
    num_passes: int
    state: Any


class _Lane:
    """A lane, read from its beginning or from a position with a state. It begins again when it ends.

    Attributes:
        position: after the last `draw`.
    """

    def __init__(self, dataset: Any, lane: int, num_lanes: int, position: LanePosition | None) -> None:
        self._dataset = dataset
        self._lane = lane
        self._num_lanes = num_lanes
        self._is_given = has_lanes(dataset)
        self._num_passes = -1
        self._samples: Any = None
        self._iterator: Iterator[Any] = iter(())
        self.position = LanePosition(lane, 0, "", 0, 0, None)
        if position is not None:
            self.position = self.position._replace(num_samples=position.start)
            self._num_passes = position.num_passes - 1
            self._begin_pass(position.state)

    def draw(self, count: int) -> list[Any]:
        """Return the next samples."""
        samples: list[Any] = []
        start = self.position.num_samples
        with self._reporting():
            try:
                before = (start, self._num_passes, self._copy_state())
                while len(samples) < count:
                    sample = next(self._iterator, END)
                    samples.append(self._draw_first() if sample is END else sample)
            except Error:
                raise
            except Exception as error:
                raise Error(
                    f"the stream failed in lane {self._lane} of {self._num_lanes}, at its sample "
                    f"{start + len(samples)} ({describe_error(error)})",
                    code="SS301",
                ) from error
        self.position = LanePosition(self._lane, start + count, hash_content(samples[-1]), *before)
        return samples

    def _reporting(self) -> AbstractContextManager[None]:
        """Report the lane as a worker by `get_worker_info`, unless the data set has a method `lane`."""
        return as_worker(None if self._is_given else self._lane, self._num_lanes, self._dataset)

    def _draw_first(self) -> Any:
        self._begin_pass(None)
        try:
            return next(self._iterator)
        except StopIteration:
            raise InvalidValue(
                f"lane {self._lane} of {self._num_lanes} of the stream ({type(self._dataset).__name__}) gave no "
                f"sample: each micro-batch of a step has a lane, so give it at least {self._num_lanes} shards, or use "
                "fewer and larger micro-batches",
                code="SS313",
            ) from None

    def _begin_pass(self, state: Any) -> None:
        self._num_passes += 1
        with self._reporting():
            self._samples = self._dataset.lane(self._lane, self._num_lanes) if self._is_given else self._copy()
            if callable(set_epoch := getattr(self._samples, "set_epoch", None)):
                set_epoch(self._num_passes)
            if state is not None:
                self._samples.load_state_dict(copy.deepcopy(state))
            self._iterator = iter(self._samples)

    def _copy(self) -> Any:
        try:
            return copy.deepcopy(self._dataset)
        except Exception as error:
            raise InvalidType(
                f"{type(self._dataset).__name__} cannot be copied for each of the {self._num_lanes} lanes "
                f"({type(error).__name__}: {error}): give it a method lane(lane, num_lanes) that returns the samples "
                "of one",
                code="SS314",
            ) from None

    def _copy_state(self) -> Any:
        """Return what `load_state_dict` needs to read the next sample again; None if the lane has no state."""
        has_state = all(callable(getattr(self._samples, name, None)) for name in ("state_dict", "load_state_dict"))
        return copy.deepcopy(self._samples.state_dict()) if has_state else None


class Lanes:
    """A stream as a data set with indices. Index i is position i in the steps of the loop, which are all full.

    Args:
        dataset: the stream. Lane v is `dataset.lane(v, num_lanes)`, or without this method a copy of it for which
            `get_worker_info` reports worker v of `num_lanes`.
        micro_batch_size: samples of a lane in each step.
        seed: the seed of the run.
        first_step: first step of the loop.
    """

    def __init__(self, dataset: Any, num_lanes: int, micro_batch_size: int, seed: int, first_step: int) -> None:
        self.dataset = dataset
        self._seed = seed
        self._first_step = first_step
        self._size = micro_batch_size
        self.num_lanes = num_lanes
        self.positions: dict[int, LanePosition] = {}
        self._open: dict[int, _Lane] = {}

    def __len__(self) -> int:
        return STREAM_LENGTH

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def move(self, positions: Iterable[LanePosition]) -> None:
        """Note the positions that are newer than the known ones. A lane that is opened later begins at its start."""
        for position in positions:
            known = self.positions.get(position.lane)
            if known is None or known.num_samples < position.num_samples:
                self.positions[position.lane] = position

    def list_behind(self, steps_done: int) -> list[int]:
        """Return the lanes whose positions are not those after so many steps of the run."""
        num_samples = (steps_done - self._first_step) * self._size
        known = {lane: position.num_samples for lane, position in self.positions.items()}
        return [lane for lane in range(self.num_lanes) if known.get(lane, 0) < num_samples]

    def close(self) -> None:
        """Close the lanes that this process has open. A further request opens them again."""
        self._open.clear()

    def indices(self, lane: int, step: int) -> NDArray[np.int64]:
        """Return the indices of a lane's micro-batch in a step of the loop."""
        first = (step * self.num_lanes + lane) * self._size
        return np.arange(first, first + self._size)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of one micro-batch. A request for an earlier one begins the lane again."""
        step, lane = divmod(indices[0] // self._size, self.num_lanes)
        reader = self._open.get(lane)
        if reader is None or reader.position.num_samples != step * self._size:
            reader = self._open[lane] = self._reopen(lane, step)
        return reader.draw(self._size)

    def _reopen(self, lane: int, step: int) -> _Lane:
        """Open a lane at a step. Read the samples before with the generators seeded as they were then."""
        start = step * self._size
        known = self.positions.get(lane)
        has_state = known is not None and known.state is not None and known.start <= start
        reader = _Lane(self.dataset, lane, self.num_lanes, known if has_state else None)
        if reader.position.num_samples == start:
            return reader
        while (num_samples := reader.position.num_samples) < start:
            self._seed_for(lane, num_samples // self._size)
            reader.draw(self._size)
            found = reader.position
            if known is not None and found.num_samples == known.num_samples and found.mark != known.mark:
                raise InvalidValue(
                    f"sample {found.num_samples - 1} of lane {lane} of {self.num_lanes} of the stream "
                    f"({type(self.dataset).__name__}) is not the same as before the restart: let its samples depend on "
                    "the lane, the number of lanes and the seeded generators alone, and let state_dict hold all else, "
                    "such as a shuffle buffer",
                    code="SS314",
                )
        self._seed_for(lane, step)
        return reader

    def _seed_for(self, lane: int, step: int) -> None:
        seed_all(derive(self._seed, "data", step=self._first_step + step, micro_batch=lane))

    def read_lane_position(self, task: Task) -> LanePosition:
        """Return the lane's position after the micro-batch that was just read."""
        return self._open[task.place[1]].position
