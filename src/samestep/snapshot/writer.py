"""One snapshot on its way, in a thread of its own: copied, written, hashed, renamed, without any collective."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from samestep.snapshot.async_copy import Copy
from samestep.world.forking import at_rest, at_work

_NICER = 10
_POLL_S = 0.05


class Saving:
    """Begins at once. The thread that makes the updates joins `copy` before the next one, and decides.

    The thread is no daemon: a process whose main thread has ended, by itself or by an exception, ends when the
    snapshot is written.

    Args:
        copy: begun between two steps.
        write: writes what was copied. It is to call its argument, which raises `Refused`, before what it has written
            becomes a snapshot.
        is_sound: asked of the joined copy where the updates' thread has ended, or ends, without a decision.

    Attributes:
        copy: as given.
        failure: why there is no snapshot; None while it is on its way, and when it is there.
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
        """Whether the thread is through."""
        return not self._thread.is_alive()

    def decide(self, accept: bool) -> None:
        """Lets what was copied become a snapshot, or not. Once the copy is joined."""
        self._is_refused = not accept
        self._decided.set()

    def settle(self) -> None:
        """Waits until the snapshot is there, or has failed."""
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
                _step_back()
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


def _step_back() -> None:
    """From here on, this thread takes what the ranks of this machine leave: nobody waits for it."""
    if sys.platform == "linux":  # where each thread has a priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICER)


class Refused(Exception):
    """What was copied is not to become a snapshot."""
