"""The thread that completes the copy of a state and writes it. It calls no collectives."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from samestep.snapshot.async_copy import Copy
from samestep.world.forking import at_rest, at_work

_NICER = 10
_POLL_S = 0.05


class Refused(Exception):
    """The main thread decided against the snapshot."""


class Writer:
    """A thread that runs `copy` and `write`. The thread that makes the updates joins `copy` and calls `decide`.

    It is no daemon thread: a process whose main thread has ended exits when the snapshot is written.

    Args:
        copy: created between two steps.
        write: writes the copy. It calls its argument before the snapshot becomes visible; that raises `Refused`.
        is_sound: checks the joined copy if the main thread ends without a decision.

    Attributes:
        copy: as given.
        failure: why there is no snapshot; None before the end, and if there is one.
    """

    def __init__(
        self, copy: Copy, write: Callable[[Callable[[], None]], None], is_sound: Callable[[], bool] = lambda: True
    ) -> None:
        self.copy = copy
        self.failure: Exception | None = None
        self._write, self._is_sound = write, is_sound
        self._is_refused = False
        self._decided = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samestep snapshot")
        self._thread.start()

    @property
    def is_decided(self) -> bool:
        """Whether `decide` was called."""
        return self._decided.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def decide(self, accept: bool) -> None:
        """Lets the copy become a snapshot, or not. Call after joining the copy."""
        self._is_refused = not accept
        self._decided.set()

    def settle(self) -> None:
        """Waits until the snapshot is complete or has failed."""
        if not self.is_decided:
            self._decide_alone()
        self._thread.join()

    def _decide_alone(self) -> None:
        self.copy.join()
        self.decide(not self.copy.torn and self._is_sound())

    def _run(self) -> None:
        try:
            with at_work():
                self.copy.run()
                _lower_priority()
                self._write(self._confirm)
        except Exception as error:
            self.failure = error

    def _confirm(self) -> None:
        with at_rest():
            while not self._decided.wait(_POLL_S):
                if not threading.main_thread().is_alive():  # it makes no further update
                    self._decide_alone()
        if self._is_refused:
            raise Refused


def _lower_priority() -> None:
    """Lowers this thread's priority (nice +10)."""
    if sys.platform == "linux":  # where each thread has a priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICER)
