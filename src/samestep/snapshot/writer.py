"""How a snapshot is completed: a thread copies the state and prepares files, and the main threads of all ranks decide.

A snapshot that one rank writes is decided as soon as the copy is found to be sound. Of a divided one, each rank
prepares a part, and the ranks decide once all parts are written. Nothing is visible before the thread of rank 0
commits.
"""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum, auto
from typing import TYPE_CHECKING

from samestep.snapshot.async_copy import Copy
from samestep.snapshot.inspection import SnapshotOrder
from samestep.snapshot.location import Location
from samestep.world.forking import at_rest, at_work

if TYPE_CHECKING:
    from torch import Tensor

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
        is_sound: checks the complete copy if the main thread ends without a decision.

    Attributes:
        stage: what has been decided.
        failure: the exception that has ended the thread; None if there was none.
    """

    def __init__(
        self,
        copy: Copy,
        location: Location,
        order: SnapshotOrder,
        tensors: "Mapping[str, Tensor]",
        is_sound: Callable[[], bool] = lambda: True,
    ) -> None:
        self.copy = copy
        self.stage = Stage.COPYING
        self.failure: Exception | None = None
        self._location = location
        self._order = order
        self._tensors = tensors
        self._is_sound = is_sound
        self._prepared = threading.Event()
        self._decided = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samestep snapshot")
        self._thread.start()

    @property
    def has_prepared(self) -> bool:
        """Return whether this rank's part is written, or failed."""
        return self._prepared.is_set()

    @property
    def has_ended(self) -> bool:
        """Return whether the thread has ended, after a decision."""
        return self._decided.is_set() and not self._thread.is_alive()

    def handle(self, event: Event) -> None:
        """Note what the ranks have found out."""
        self.stage = advance(self.stage, event, is_divided=self._location.is_divided)
        if self.stage in (Stage.COMMITTED, Stage.ABORTED):
            self._decided.set()

    def wait_until_prepared(self) -> None:
        """Wait until this rank's part is written, or failed."""
        self._prepared.wait()

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
        self.handle(Event.UNSOUND if self.copy.torn or not self._is_sound() else Event.SOUND)

    def _run(self) -> None:
        try:
            with at_work():
                self._write()
        except Exception as error:
            self.failure = error
            self._location.abort(self._order)
        finally:
            self._prepared.set()

    def _write(self) -> None:
        self.copy.run()
        _lower_priority()
        parts = self._location.prepare(self._order, self._tensors)
        self._prepared.set()
        with at_rest():
            while not self._decided.wait(_POLL_S):
                if not threading.main_thread().is_alive():  # it makes no further update
                    self.decide_alone()
        if self.stage is Stage.COMMITTED:
            self._location.commit(self._order, parts)
        else:
            self._location.abort(self._order)


def _lower_priority() -> None:
    """Lower this thread's priority (nice +10)."""
    if sys.platform == "linux":  # where each thread has its own priority
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICER)
