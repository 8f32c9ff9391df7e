"""Streams: an IterableDataset, read in lanes that depend neither on the ranks nor on the workers.

A step has V micro-batches, and micro-batch v of every step comes from lane v of V. A lane is read in order, by the rank
that computes its micro-batch.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from samestep.data.content import hash_content
from samestep.data.loader import seed_all
from samestep.data.sample_errors import describe_error
from samestep.data.spec import has_lanes
from samestep.errors import Error, InvalidType, InvalidValue
from samestep.plan.loop_plan import STREAM_LENGTH, Task
from samestep.plan.seeds import derive
from samestep.torch_internals import as_worker

END = object()  # of an iterator


class LaneStart(NamedTuple):
    """A point from which a lane can be read again.

    Attributes:
        num_samples: number of samples before this point.
        num_passes: how often the lane has begun again.
        state: the lane's `state_dict`; None without one, and at the beginning.
    """

    num_samples: int
    num_passes: int
    state: Any


class LanePosition(NamedTuple):
    """The position of a lane after one of its micro-batches.

    Attributes:
        lane: number of the lane.
        num_samples: number of samples that the lane has given.
        mark: hash of the last sample.
        start: the point before that micro-batch, which is read again after a restart, to compare the mark.
    """

    lane: int
    num_samples: int
    mark: str
    start: LaneStart

    @property
    def row(self) -> dict[str, Any]:
        """Return the position for a snapshot, or for another rank."""
        return {"samples": self.num_samples, "mark": self.mark, "start": [*self.start]}

    @classmethod
    def from_row(cls, lane: int, row: Mapping[str, Any]) -> "LanePosition":
        """Return the position of `row`."""
        return cls(lane, row["samples"], row["mark"], LaneStart(*row["start"]))


class _Lane:
    """A lane, read from its beginning or from a state. It begins again when it ends.

    Attributes:
        num_samples: how many samples it has given.
        last: the last one.
        start: the point before the last `draw`.
    """

    def __init__(self, dataset: Any, lane: int, num_lanes: int, start: LaneStart | None) -> None:
        self._dataset = dataset
        self._lane = lane
        self._num_lanes = num_lanes
        self._is_given = has_lanes(dataset)
        self.num_samples = 0
        self._num_passes = -1
        self.last: Any = None
        self.start = LaneStart(0, 0, None)
        self._samples: Any = None
        self._iterator: Iterator[Any] = iter(())
        if start is not None:
            self.num_samples = start.num_samples
            self._num_passes = start.num_passes - 1
            self._begin_pass(start.state)

    def draw(self, count: int) -> list[Any]:
        """Return the next samples."""
        self.start = self._read_start()
        samples: list[Any] = []
        with self._reporting():
            try:
                while len(samples) < count:
                    sample = next(self._iterator, END)
                    samples.append(self._draw_first() if sample is END else sample)
            except Error:
                raise
            except Exception as error:
                raise Error(
                    f"the stream failed in lane {self._lane} of {self._num_lanes}, at its sample "
                    f"{self.num_samples + len(samples)} ({describe_error(error)})",
                    code="SS301",
                ) from error
        self.num_samples = self.num_samples + count
        self.last = samples[-1]
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
            name = type(self._dataset).__name__
            raise InvalidType(
                f"{name} cannot be copied for each of the {self._num_lanes} lanes ({type(error).__name__}: {error}): "
                "give it a method lane(lane, num_lanes) that returns the samples of one",
                code="SS314",
            ) from None

    def _read_start(self) -> LaneStart:
        """Return the point from which the next sample can be read again."""
        has_state = all(callable(getattr(self._samples, name, None)) for name in ("state_dict", "load_state_dict"))
        if not has_state:
            return LaneStart(self.num_samples, self._num_passes, None)
        try:
            state = copy.deepcopy(self._samples.state_dict())
        except Exception as error:
            raise InvalidType(
                f"the state_dict of lane {self._lane} of {self._num_lanes} of the stream "
                f"({type(self._dataset).__name__}) cannot be copied ({type(error).__name__}: {error}): return numbers, "
                "strings, lists, dicts and tensors",
                code="SS314",
            ) from error
        return LaneStart(self.num_samples, self._num_passes, state)


class Lanes:
    """A stream as a data set with indices: sample i is at position i of the run's steps, which are all full.

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

    def resume(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Continue at the positions in a snapshot. `rows`: see `LanePosition.row`."""
        for lane, row in enumerate(rows):
            self.positions[lane] = LanePosition.from_row(lane, row)

    def move(self, positions: Mapping[int, LanePosition]) -> None:
        """Note the positions that are newer than the known ones. A lane that is opened later begins at its start."""
        for lane, position in positions.items():
            if lane not in self.positions or self.positions[lane].num_samples < position.num_samples:
                self.positions[lane] = position

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

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of one micro-batch. A request for an earlier sample begins the lane again."""
        lane, start = self._locate(indices[0])
        reader = self._open.get(lane)
        if reader is None or reader.num_samples != start:
            reader = self._open[lane] = self._reopen(lane, start)
        return reader.draw(len(indices))

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the lane of a sample, and its position there."""
        micro_batch, offset = divmod(index, self._size)
        step, lane = divmod(micro_batch, self.num_lanes)
        return lane, step * self._size + offset

    def _reopen(self, lane: int, start: int) -> _Lane:
        """Open a lane at position `start`. Read the samples before with the generators seeded as they were then."""
        position = self.positions.get(lane)
        known = None if position is None else position.start
        has_state = known is not None and known.state is not None and known.num_samples <= start
        reader = _Lane(self.dataset, lane, self.num_lanes, known if has_state else None)
        if reader.num_samples == start:
            return reader
        while (at := reader.num_samples) < start:
            self._seed_for(lane, at // self._size)
            reader.draw(min(self._size - at % self._size, start - at))
            is_known = position is not None and position.num_samples == reader.num_samples
            if position is not None and is_known and hash_content(reader.last) != position.mark:
                raise InvalidValue(
                    f"sample {reader.num_samples - 1} of lane {lane} of {self.num_lanes} of the stream "
                    f"({type(self.dataset).__name__}) is not the same as before the restart: let its samples depend on "
                    "the lane, the number of lanes and the seeded generators alone, and let state_dict hold all else, "
                    "such as a shuffle buffer",
                    code="SS314",
                )
        self._seed_for(lane, start // self._size)
        return reader

    def _seed_for(self, lane: int, step: int) -> None:
        seed_all(derive(self._seed, "data", step=self._first_step + step, micro_batch=lane))

    def read_lane_position(self, task: Task) -> LanePosition:
        """Return the lane's position after the micro-batch that was just read."""
        lane, _ = self._locate(int(task.indices[0]))
        reader = self._open[lane]
        return LanePosition(lane, reader.num_samples, hash_content(reader.last), reader.start)
