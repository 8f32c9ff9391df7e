"""Decides when snapshots of a run are due, and writes them in the background. All ranks call the same methods.

A snapshot of step 40, in the order of time:

| when | main thread of each rank | thread of each rank that writes: `Writer` |
|---|---|---|
| end of step 40 | `save` copies small tensors | copies and checks the others |
| step 41, before its update | `join_copy`: is the copy sound on all ranks? | writes the tensors |
| a later step, if divided | `join_parts`: have all ranks written? | waits |
| from then on | | rank 0: writes the manifest, renames the directory |
| next snapshot, or the end | `_collect` reports a failure | has ended |

A snapshot that one rank writes is decided as soon as the copy is found to be sound. Of a divided one, each rank
prepares a part, and the ranks decide once all parts are written. Nothing is visible before rank 0 commits. A state that
the script has changed during the copy is saved one step later. A full disk loses this snapshot only.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from torch import Tensor

from samestep.config import Interval
from samestep.console import warn
from samestep.engine.control import Saving
from samestep.errors import Error, InvalidValue, NotHealed
from samestep.processes import at_rest, at_work
from samestep.snapshot.async_copy import (
    Copy,
    Inspection,
    Place,
    SnapshotOrder,
    Staging,
    TrainingState,
    WriteDetector,
    list_detectable,
    locate,
)
from samestep.snapshot.location import Location
from samestep.snapshot.manifest import NAME, name_part
from samestep.snapshot.serialization import encode

_POLL_S = 0.05


class Stage(Enum):
    """What has been decided about a snapshot."""

    COPYING = auto()  # nothing: the copy may still be in progress, and no update may begin
    WRITING = auto()  # the copy is sound on all ranks, which write their parts
    COMMITTED = auto()
    ABORTED = auto()


class Event(Enum):
    """What the main thread has found out about a snapshot."""

    SOUND = auto()  # the copy is complete and correct on all ranks
    UNSOUND = auto()
    WRITTEN = auto()  # all ranks have written their parts
    FAILED = auto()  # a rank could not write its part, or may be gone


def advance(stage: Stage, event: Event, *, is_divided: bool) -> Stage:
    """Return the stage after an event. A decision is final; without a sound copy and all parts there is no commit."""
    match stage, event:
        case ((Stage.COMMITTED | Stage.ABORTED), _):
            return stage
        case Stage.COPYING, Event.SOUND:
            return Stage.WRITING if is_divided else Stage.COMMITTED
        case Stage.WRITING, Event.WRITTEN:
            return Stage.COMMITTED
        case _:
            return Stage.ABORTED


class Writer:
    """A thread that copies the state, writes it, and waits for the decision. The main thread joins `copy`, and decides.

    It is not a daemon thread: a process whose main thread has ended exits after the snapshot is written.

    Args:
        copy: created between two steps.
        order: with the tensors that are written: the copies, if there are any.

    Attributes:
        stage: what has been decided.
        prepared: is set when this rank's part is written, or failed.
        failure: the exception that has ended the thread; None if there was none.
    """

    def __init__(self, copy: Copy, location: Location, order: SnapshotOrder) -> None:
        self.copy = copy
        self.order = order
        self.stage = Stage.COPYING
        self.failure: Exception | None = None
        self._location = location
        self.prepared = threading.Event()
        self._decided = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samestep snapshot")
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended, after a decision."""
        return self._decided.is_set() and not self._thread.is_alive()

    def handle(self, event: Event) -> None:
        """Note what the ranks have found out."""
        self.stage = advance(self.stage, event, is_divided=self._location.is_divided)
        if self.stage in (Stage.COMMITTED, Stage.ABORTED):
            self._decided.set()

    def wait_until_written(self) -> None:
        """Wait until the snapshot is complete or has failed. Without a decision, this rank makes it alone."""
        self.decide_alone()
        self._thread.join()

    def decide_alone(self) -> None:
        """Decide without the other ranks, unless it is decided."""
        if self._decided.is_set():
            return
        if self._location.is_divided:  # the other ranks may be gone
            self.handle(Event.FAILED)
        else:
            self.copy.join()
            self.handle(Event.UNSOUND if self.copy.torn or self.copy.inspection.find_infinite() else Event.SOUND)

    def _run(self) -> None:
        try:
            with at_work():
                self._write()
        except Exception as error:
            self.failure = error
            self._location.abort(self.order)
        finally:
            self.prepared.set()

    def _write(self) -> None:
        self.copy.run()
        with suppress(OSError):  # nice +10: each thread has its own priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 10)
        parts = self._location.prepare(self.order)
        self.prepared.set()
        with at_rest():
            while not self._decided.wait(_POLL_S):
                if not threading.main_thread().is_alive():  # it makes no further update
                    self.decide_alone()
        if self.stage is Stage.COMMITTED:
            self._location.commit(self.order, parts)
        else:
            self._location.abort(self.order)


def _refuse_loss(order: SnapshotOrder, name: str | None) -> None:
    """Raise NotHealed if nothing writes a lost snapshot of an order again."""
    if name is not None or order.is_last:
        which = f"of step {order.step}" if name is None else f"{name} of step {order.step}"
        raise NotHealed(f"the snapshot {which} is lost with the rank that was writing it")


class Snapshotter:
    """Schedules and writes the snapshots of a run. In a run without a directory, it takes none.

    Args:
        every: as `snapshot_every` of `RunConfig`.
        location: the location of the run.
        say: prints a message on rank 0.
        gather: as `Group.gather`.

    Attributes:
        saved_step: the step of the newest numbered snapshot, complete or being written; None if there is none.
    """

    def __init__(
        self,
        every: Interval | None,
        location: Location,
        say: Callable[[str], None],
        gather: Callable[[Any], list[Any]],
    ) -> None:
        self._every = every
        self._location = location
        self._gather = gather
        self._say = say
        self.saved_step: int | None = None
        self._unsaved = (-1, "")  # step and reason, if the last snapshot could not be written
        self._is_wanted = False
        self._names_due: list[str] = []
        self._asked: list[str] = []
        self._detector: WriteDetector | None = None
        self._unstable = set[Place]()  # of tensors that the script writes to between updates
        self._staging = Staging()
        self._saved_s = time.monotonic()
        self._writer: Writer | None = None  # of the snapshots that are being written
        # The last two calls of `save`, without tensors: before rank 0 begins to write the next ones, others may be past
        # that.
        self._recent: deque[SnapshotOrder] = deque(maxlen=2)
        if location.directory is not None:
            location.directory.call_before_close(self._wait_alone)

    def resume(self, saved_step: int) -> None:
        """Continue a run from the snapshot of a step."""
        self.saved_step = saved_step

    def take_over(self) -> None:
        """Write the snapshots from now on, on a rank that has become rank 0. The location has been taken over.

        Raises:
            NotHealed: a snapshot that nothing writes again is lost with the rank that was writing it: a named one, for
                which the script asks once only, or the one at the end of a loop.
        """
        directory = self._location.directory
        if directory is None:
            return
        directory.call_before_close(self._wait_alone)
        written = {each.name: each.step for each in directory.store.snapshots() if each.problem is None}
        for order in self._recent:
            for name in order.names:
                if written.get(name, -1) < order.step:
                    _refuse_loss(order, name)
        self.saved_step = written.get(None)

    # --- when -------------------------------------------------------------------------------------------------

    def ask_for(self, name: Any, *, is_taken: bool) -> None:
        """Make a named snapshot due at the end of this body. `is_taken`: whether an earlier start wrote it.

        Raises:
            InvalidValue: the name is not valid.
        """
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidValue(
                f"a snapshot's name is letters, digits and underscores, such as best, not {name!r}", code="SS101"
            )
        if name not in self._asked:
            self._asked.append(name)
        if name not in self._names_due and not is_taken:
            self._names_due.append(name)

    def take_asked(self) -> list[str]:
        """Return the names given to `ask_for` since the last call."""
        asked = self._asked
        self._asked = []
        return asked

    def drop_names(self, why: str) -> None:
        """Forget the named snapshots that are due, and print which and why."""
        for name in self._names_due:
            self._say(f"the snapshot {name} is not taken: {why}")
        self._names_due = []

    def is_time(self) -> bool:
        """Return whether a snapshot is due by this rank's clock, for its vote in the next exchange."""
        if self._location.directory is None or self._every is None:
            return False
        return self._every.has_passed(time.monotonic() - self._saved_s)

    def want(self) -> None:
        """Make a numbered snapshot due after this step, or as soon as the run can resume from the position."""
        self._is_wanted = True

    def take_due(self, *, step: int, epochs_done: int | None, numbered: bool, ending: bool) -> list[str | None]:
        """Return the names of the snapshots that are due between two steps, once; None: a numbered one. On all ranks.

        Args:
            step: the number of steps done.
            epochs_done: the number of epochs done, at an epoch's end after its body; else None.
            numbered: whether a run can be resumed at this position, so that a numbered snapshot may be written.
            ending: whether the run ends here: then a numbered snapshot is due.

        Raises:
            Error: another process has taken the run over.
        """
        if self._location.path is None:
            return []
        self._collect()
        names: list[str | None] = [*self._names_due]
        self._names_due = []
        every = self._every
        is_new = numbered and self.saved_step != step
        if is_new and every is not None and (ending or self._is_wanted or every.is_due(step, epochs_done)):
            names.append(None)  # last: a script that resumes from it would not request the named ones again
        return names

    def save(self, state: TrainingState, step: int, names: Sequence[str | None], *, ending: bool) -> None:
        """Start to write the snapshots of `take_due`, after `wait_until_written`. All ranks call this.

        Args:
            ending: whether the run ends here: then all are complete when this returns.

        Raises:
            Error: the state is not finite, or not the same on all ranks, or another process has taken the run over.
        """
        if None in names:
            self.saved_step = step
            self._saved_s = time.monotonic()
            self._is_wanted = False
        order = SnapshotOrder(step, names, is_last=ending, share=state.share)
        self._recent.append(order)
        self._begin(state, self._complete(order, state))
        if ending:
            try:
                self.wait_until_written()
            finally:
                self._wait_alone()  # after an exception, the script may change the tensors that are being written

    def _begin(self, state: TrainingState, order: SnapshotOrder) -> None:
        """Begin to copy and write a state."""
        targets: dict[str, Tensor] = {}
        # No step follows the last snapshot, so it needs no copy. Without memory for one, the next step waits. (Of a
        # lack of memory, torch raises a RuntimeError.)
        with suppress(MemoryError, RuntimeError):
            if not order.is_last:
                targets = self._staging.take(order.tensors)
        stable = {*map(locate, list_detectable(state.stable))} - self._unstable
        copy = Copy(order.tensors, targets, stable=stable, inspection=Inspection(state, order.step))
        self._writer = Writer(copy, self._location, replace(order, tensors=targets or order.tensors))
        if order.tensors and not targets:
            self._writer.prepared.wait()

    def _complete(self, order: SnapshotOrder, state: TrainingState) -> SnapshotOrder:
        """Add what this rank stores of a state to an order. It gets no names if this rank or rank 0 fails."""
        directory = self._location.directory
        try:
            if directory is not None:
                structure, tensors = encode(state.contents, state.share.is_mine)
                meta = directory.mark(
                    epoch=state.contents["position"]["epoch"],
                    world_size=self._location.group.world_size,
                    notes=state.notes,
                )
                order = replace(order, structure=structure, tensors=tensors, meta=meta)
            elif self._location.is_divided:
                _, tensors = encode({"objects": state.contents["objects"]}, state.share.is_mine)
                order = replace(order, tensors=tensors)
        except OSError as error:
            self._report(order, error)
            order = replace(order, names=())
        try:
            return self._location.align(order, state)
        except OSError as error:
            self._report(order, error)
            return SnapshotOrder(order.step, is_last=order.is_last, share=order.share)

    # --- write ------------------------------------------------------------------------------------------------

    def detect_writes(self, stable: Iterable[Tensor]) -> None:
        """Begin to detect writes to tensors, before the loop's first step. `stable`: see `TrainingState`.

        Tensors that the script writes to before the step's update are copied at once in all snapshots.
        """
        if self._location.path is not None:
            self._detector = WriteDetector(list_detectable(stable))
            self._saved_s = time.monotonic()

    @property
    def saving(self) -> Saving:
        """Return what this rank does for a snapshot, for the other ranks."""
        if self._writer is None:
            return Saving.NOTHING if self._detector is None else Saving.WATCHING
        if self._writer.stage is Stage.COPYING:
            return Saving.COPYING
        is_written = self._writer.stage is Stage.WRITING and self._writer.prepared.is_set()
        return Saving.WRITTEN if is_written else Saving.NOTHING

    def join_copy(self) -> None:
        """Wait until the state is copied. All ranks call this before an update.

        Raises:
            Error: the copied state is not finite, or not the same on all ranks.
        """
        if self._detector is not None:
            self._unstable |= {locate(tensor) for tensor in self._detector.find_changed()}
            self._detector = None
        writer = self._writer
        if writer is None or writer.stage is not Stage.COPYING:
            return
        writer.copy.join()
        inspection = writer.copy.inspection
        try:
            if writer.copy.has_failed:
                inspection.look_again()
            reports = self._gather((bool(writer.copy.torn), inspection.find_infinite()))
            if self._drop_if_lost(writer, len(reports)):
                return
            if any(is_torn for is_torn, _ in reports):
                writer.handle(Event.UNSOUND)
                self._unstable |= {*writer.copy.torn}
                self._take_again()
                return
            inspection.conclude(next((label for _, label in reports if label), ""))
        except Error:  # after another exception, the check of this rank decides
            writer.handle(Event.UNSOUND)
            raise
        writer.handle(Event.SOUND)

    def join_parts(self) -> None:
        """Wait until all ranks have written their parts of a divided snapshot, or failed, and decide. All call this."""
        writer = self._writer
        if writer is None or writer.stage is not Stage.WRITING:
            return
        writer.prepared.wait()
        failures = self._gather("" if writer.failure is None else str(writer.failure) or repr(writer.failure))
        if self._drop_if_lost(writer, len(failures)):
            return
        failed = next((rank for rank, failure in enumerate(failures) if failure), None)
        writer.handle(Event.WRITTEN if failed is None else Event.FAILED)
        if failed is not None:
            self._report(
                writer.order,
                OSError(f"{name_part(failed)} is missing: rank {failed} could not write it ({failures[failed]})"),
            )

    def _drop_if_lost(self, writer: Writer, num_living: int) -> bool:
        """Drop divided snapshots, and return True, if a rank has died before all had written their parts.

        Args:
            num_living: the number of ranks that have answered, the same on all of them.

        Raises:
            NotHealed: nothing writes such a snapshot again, see `take_over`.
        """
        order = writer.order
        if num_living >= order.share.num_parts:
            return False
        writer.handle(Event.FAILED)
        for name in order.names:
            _refuse_loss(order, name)
        self._report(order, OSError("a rank died before it had written its part"))
        return True

    def wait_until_written(self) -> None:
        """Wait until all snapshots are written. All ranks call this. Errors as for `join_copy`."""
        self.join_copy()
        self.join_parts()
        if self._writer is not None:
            self._writer.wait_until_written()
        self._collect()

    def _take_again(self) -> None:
        """Make the pending snapshots due again after this step, on all ranks."""
        order = self._recent.pop()
        self._names_due = [*(name for name in order.names if name is not None), *self._names_due]
        if None in order.names:
            self.saved_step = None
            self._is_wanted = True
        warn(
            self._say,
            f"the snapshot of step {order.step} is taken one step later: the model or an optimizer was changed between "
            "that step and the next update; from now on, what was changed is copied before the step continues",
            start="the snapshot of step",
        )

    def _collect(self) -> None:
        """Report the result of a writer that has ended."""
        writer = self._writer
        if writer is None or not writer.has_ended:
            return
        self._writer = None
        if isinstance(writer.failure, Error):
            raise writer.failure
        if writer.failure is not None and writer.stage is Stage.COMMITTED:
            self._report(writer.order, writer.failure)

    def _report(self, order: SnapshotOrder, error: Exception) -> None:
        """Report that this rank could not write the snapshots of an order. Without names, it was reported before."""
        if None in order.names:
            self.saved_step = None
        directory = self._location.directory
        if order.names and directory is not None:
            self._unsaved = order.step, directory.explain_failure(order.step, error)
            self._location.warn(self._unsaved[1] + ("" if order.is_last else ", and the run continues"))

    # --- end --------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """The script has left the loop, so that the ranks decide no more about the pending snapshots."""
        if self._writer is not None:
            self._writer.decide_alone()

    def end(self, step: int) -> str:
        """Complete all snapshots and logs. All ranks call this at the end of the loop, after `step` steps.

        Returns:
            Why the snapshot of the step could not be written; "" if it could, and on ranks that do not write.
        """
        self.wait_until_written()
        problem = self._location.end()
        failed_step, reason = self._unsaved
        if failed_step != step:
            reason = f"the snapshot of step {step} {problem}" if problem else ""
            if problem:
                self._location.warn(reason)
        if self._location.directory is not None:
            self._location.directory.complete_logs()
        return reason

    def _wait_alone(self) -> None:
        """Complete the pending snapshots without collectives, because the other ranks may be gone."""
        if self._writer is not None:
            with suppress(Error):
                self._writer.wait_until_written()
                self._collect()

    def close(self) -> bool:
        """Complete the pending snapshots, and close the location. Returns the result of `Location.close`."""
        self._wait_alone()
        return self._location.close()
