"""The position of a run: its finished steps, and the loops that they belong to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from samestep.errors import Error
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.run_record import find_different
from samestep.snapshot.snapshotter import Snapshotter
from samestep.train.batches import Batches

ENDLESS = 2**63


@dataclass(frozen=True)
class Place:
    """The position of a loop in its run.

    Attributes:
        number: number of the loop, from 0, in the order of the script.
        steps_done: number of steps of the run before the next one of the loop.
        last_step: number of finished steps when it ends, unless it ends early.
        planned_step: the same without `max_steps`.
        num_past: number of loops that had ended in the snapshot that the run was resumed from.
        is_past: this is one of them, so it has no step left.
        is_further: an earlier loop of this process has run.
        is_replayed: the script's lines before this loop have run again, on the restored state of a step inside it.
        warning: a warning about a past loop whose length has changed; "" if it has not.
    """

    number: int
    steps_done: int
    last_step: int
    planned_step: int
    num_past: int
    is_past: bool = False
    is_further: bool = False
    is_replayed: bool = False
    warning: str = ""


class Position:
    """The position of the run. The ends of its loops are part of every snapshot.

    Attributes:
        steps_done: steps finished so far, over all restarts.
        resumed_step: `steps_done` of the snapshot that this start resumed from; 0 without one.
        began_step: `steps_done` when the current loop began.
        num_evaluations: evaluations since the current step or epoch began; each has a different random seed.
    """

    def __init__(self) -> None:
        self.steps_done = self.resumed_step = self.began_step = self.num_evaluations = 0
        self._ends: list[list[int]] = []  # per finished loop: its end, and its planned end
        self._num_begun = self._num_past = 0

    def state_dict(self) -> dict[str, Any]:
        """The ends of the loops; empty before the first loop has ended."""
        return {"loops": self._ends} if self._ends else {}

    def load_state_dict(self, position: Mapping[str, Any]) -> None:
        """Resume from the position in a snapshot."""
        self._ends, self.steps_done = position.get("loops", []), position["step"]
        self.resumed_step, self._num_past = self.steps_done, len(self._ends)

    def begin(self, first_step: int, num_steps: int, max_steps: int | None) -> Place:
        """Place the script's next loop, of `num_steps` steps, which follows `first_step` steps of the run."""
        number, self._num_begun = self._num_begun, self._num_begun + 1
        planned_step = first_step + num_steps
        if number < self._num_past:
            end, was = self._ends[number]
            warning = ""
            if planned_step != was:
                warning = (
                    f"loop {number + 1} of this run ended at step {end} and is not continued, although its planned "
                    f"end is now step {planned_step} (was {was}): resume from a step before {end} to change it"
                )
            return Place(number, end, end, planned_step, self._num_past, is_past=True, warning=warning)
        return Place(
            number,
            steps_done=max(first_step, self.resumed_step),
            last_step=min(planned_step, max_steps or ENDLESS),
            planned_step=planned_step,
            num_past=self._num_past,
            is_further=number > self._num_past,
            is_replayed=0 < number == self._num_past,
        )

    def enter(self, place: Place) -> None:
        """Begin the loop at `place`."""
        self.steps_done = self.began_step = place.steps_done

    def end(self, place: Place) -> None:
        """End the loop at `place`."""
        if not place.is_past:
            self._ends = [*self._ends, [self.steps_done, place.planned_step]]


def place_loop(
    position: Position,
    snapshotter: Snapshotter,
    batches: Batches,
    num_steps: int,
    max_steps: int | None,
    say: Callable[[str], None],
) -> Place:
    """Places the script's next loop, and records it. On all ranks. Errors as for `record_loop`."""
    place = position.begin(batches.first_step, num_steps, max_steps)
    snapshotter.once(lambda: record_loop(snapshotter.directory, place, batches))
    if place.warning:
        say(place.warning)
    return place


def record_loop(directory: RunDirectory | None, place: Place, batches: Batches) -> None:
    """Compare a loop with the run's record of it, or record it.

    The record's numbers are those of the first loop; the others are in a list. Entries of loops that the snapshot
    does not contain are of steps that were never saved, and are replaced.

    Raises:
        Error: the run was resumed inside this loop or after it, and the loop was another one.
    """
    if directory is None:
        return
    recorded = directory.record.get("loops", [])
    loops = recorded if place.is_further else recorded[: place.num_past]
    numbers = {"first_step": batches.first_step, "first_epoch": batches.first_epoch, **batches.numbers}
    if 0 < place.number <= len(loops):
        if different := find_different(loops[place.number - 1], numbers):
            raise Error(
                f"loop {place.number + 1} of the run in {directory.named} was another one ({different}): use its "
                f"numbers, or resume from step {batches.first_step} or before"
            )
    elif place.number:
        loops = [*loops, numbers]
    if loops != recorded:
        directory.write_loops(loops)
