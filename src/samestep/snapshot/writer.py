"""How a snapshot is completed: a thread copies the state and prepares files, and the main threads of all ranks decide.

A snapshot that one rank writes is decided as soon as the copy is found to be sound. Of a divided one, each rank
prepares a part, and the ranks decide once all parts are written. Nothing is visible before the thread of rank 0
commits.
"""

import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum, auto

from torch import Tensor

from samestep.snapshot.async_copy import Copy
from samestep.snapshot.inspection import Inspection, SnapshotOrder
from samestep.snapshot.location import Location
from samestep.world.forking import at_rest, at_work

_NICER = 10
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
        tensors: the copies.
        inspection: of the copy. The main thread asks for its result, or this thread if that one ends before.

    Attributes:
        stage: what has been decided.
        prepared: is set when this rank's part is written, or failed.
        failure: the exception that has ended the thread; None if there was none.
    """

    def __init__(
        self,
        copy: Copy,
        location: Location,
        order: SnapshotOrder,
        tensors: Mapping[str, Tensor],
        inspection: Inspection,
    ) -> None:
        self.copy = copy
        self.order = order
        self.inspection = inspection
        self.stage = Stage.COPYING
        self.failure: Exception | None = None
        self._location = location
        self._tensors = tensors
        self.prepared = threading.Event()
        self._decided = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samestep snapshot")
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Return whether the thread has ended, after a decision."""
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
            return
        self.copy.join()
        self.handle(Event.UNSOUND if self.copy.torn or self.inspection.find_infinite() else Event.SOUND)

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
        _lower_priority()
        parts = self._location.prepare(self.order, self._tensors)
        self.prepared.set()
        with at_rest():
            while not self._decided.wait(_POLL_S):
                if not threading.main_thread().is_alive():  # it makes no further update
                    self.decide_alone()
        if self.stage is Stage.COMMITTED:
            self._location.commit(self.order, parts)
        else:
            self._location.abort(self.order)


def _lower_priority() -> None:
    """Lower this thread's priority (nice +10)."""
    if sys.platform == "linux":  # where each thread has its own priority
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICER)
