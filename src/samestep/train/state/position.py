"""The position of a run: its completed steps, and the loops to which they belong."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from samestep.errors import RunDirectoryError
from samestep.plan.loop_plan import LoopPlan
from samestep.snapshot.location import RunLocation
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.run_record import find_different
from samestep.train.inputs.loop_data import LoopData
from samestep.train.inputs.samples import check_shards

ENDLESS = 2**63


@dataclass(frozen=True)
class Place:
    """The place of a loop in its run.

    Attributes:
        number: number of the loop, from 0, in the order of the script.
        last_step: number of completed steps when the loop ends, unless it ends early. `ENDLESS` while a sampler has not
            given the length of an epoch yet; then as if all later epochs had the length of the current one.
        planned: the loop's end in the script, without `max_steps`: a step or an epoch, see `LoopPlan.unit`.
        is_past: whether the loop had ended in the snapshot from which the run resumed, so that it has no step left.
        is_further: whether an earlier loop of this process has run.
        is_replayed: whether the script's lines before this loop ran again, although the restored state is from a step
            inside it.
    """

    number: int
    last_step: int
    planned: int
    is_past: bool
    is_further: bool
    is_replayed: bool


class Position:
    """The position of the run. The ends of its loops are part of every snapshot.

    Attributes:
        steps_done: steps completed so far, over all restarts.
        resumed_step: `steps_done` of the snapshot from which this start resumed; 0 without one.
        began_step: `steps_done` when the current loop began.
        lanes: the positions in a stream (`LanePosition.row`) in that snapshot.
        num_evaluations: evaluations since the current step or epoch began; each gets a different seed.
    """

    def __init__(self) -> None:
        self.steps_done = self.resumed_step = self.began_step = self.num_evaluations = 0
        self.lanes: list[dict[str, Any]] = []
        self._epoch = 0
        self._order: Mapping[str, Any] | None = None  # see `LoopData.state_dict`
        # Per finished loop: its end, its planned end, and with a sampler the first epoch of the next loop.
        self._ends: list[list[int]] = []
        self._num_begun = self._num_past = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the ends of the loops; empty before the first loop has ended."""
        return {"loops": self._ends} if self._ends else {}

    def load_state_dict(self, position: Mapping[str, Any]) -> None:
        """Resume from the position in a snapshot."""
        self._ends = position.get("loops", [])
        self.steps_done = position["step"]
        self.lanes = position.get("lanes", [])
        self._epoch = position["epoch"]
        self._order = position.get("order")
        self.resumed_step, self._num_past = self.steps_done, len(self._ends)

    def begin_loop(
        self,
        data: LoopData,
        planned: int,
        max_steps: int | None,
        location: RunLocation,
        say: Callable[[str], None],
    ) -> Place:
        """Move to the script's next loop, and record it. On all ranks.

        Raises:
            RunDirectoryError: the run was resumed inside or after this loop, and the loop was a different one then.
        """
        plan = data.plan
        number = self._num_begun
        self._num_begun = self._num_begun + 1
        end, was, *further = self._ends[number] if number < self._num_past else (None, planned)
        if plan.has_sampler and number <= self._num_past and self.resumed_step:
            if end is None:
                data.resume(self.resumed_step, self._epoch, self._order)
            elif further:  # else the loop had no sampler, which `_record` refuses
                data.resume(end, further[0])
        place = Place(
            number,
            last_step=find_last_step(plan, planned, max_steps) if end is None else end,
            planned=planned,
            is_past=end is not None,
            is_further=number > self._num_past,
            is_replayed=0 < number == self._num_past,
        )
        location.once(lambda: self._record(location.directory, place, data))
        if planned != was:
            say(
                f"loop {number + 1} of this run ended at step {end} and is not continued, although its planned "
                f"end is now {plan.unit} {planned} (was {was}): resume from a step before {end} to change it"
            )
        self.steps_done = self.began_step = max(plan.first_step, self.resumed_step) if end is None else end
        return place

    def _record(self, directory: RunDirectory | None, place: Place, data: LoopData) -> None:
        """Compare a loop with the run's record of it, or record it.

        The record's numbers are those of the first loop; a list has those of the others. Entries of loops that began
        after the snapshot belong to steps that were never saved, and are replaced.
        """
        if directory is None:
            return
        recorded = directory.record.get("loops", [])
        loops = recorded if place.is_further else recorded[: self._num_past]
        numbers = {"first_step": data.plan.first_step, "first_epoch": data.plan.first_epoch, **data.numbers}
        if 0 < place.number <= len(loops):
            check_shards(data, directory.path, loops[place.number - 1].get("shards"))
            if different := find_different(loops[place.number - 1], numbers):
                raise RunDirectoryError(
                    f"loop {place.number + 1} of the run in {directory.named} was a different one ({different}): "
                    f"restore its values, or resume from step {data.plan.first_step} or earlier"
                )
        elif place.number:
            loops = [*loops, numbers]
        if loops != recorded:
            directory.write_loops(loops)

    def end_loop(self, place: Place, plan: LoopPlan) -> None:
        """End the loop at `place`."""
        if not place.is_past:
            next_epoch = [plan.next_epoch(self.steps_done)] if plan.has_sampler else []
            self._ends = [*self._ends, [self.steps_done, place.planned, *next_epoch]]


def find_last_step(plan: LoopPlan, planned: int, max_steps: int | None) -> int:
    """Return `Place.last_step` of a loop."""
    end = plan.find_end(planned)
    return min(ENDLESS if end is None else end, max_steps or ENDLESS)
