"""Waits for messages of gloo that may never be complete."""

import threading
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Protocol

from samestep.errors import PeerFailed
from samestep.world.process_group import NO_LIMIT


class Transfer(Protocol):
    """A message that is under way, or several."""

    def wait(self, timeout: timedelta = ..., /) -> object:
        """Wait until it is complete."""


def wait_for_messages(messages: Sequence[Transfer]) -> None:
    """Wait for messages of gloo. Their own limit is the one with which the group was opened."""
    for message in messages:
        message.wait(NO_LIMIT)


class Waiter:
    """Waits for messages in another thread, so that this one can give up.

    If a rank dies after it has sent the beginning of a message, the wait for its rest ends only with gloo's timeout: a
    connection that closes fails the receives that have not begun, and that of the next message.
    """

    def __init__(self) -> None:
        self._requests = SimpleQueue[Sequence[Transfer] | None]()
        self._results = SimpleQueue[RuntimeError | None]()
        thread = threading.Thread(
            target=_run, args=(self._requests, self._results), name="samestep waiter", daemon=True
        )
        thread.start()

    def wait(self, messages: Sequence[Transfer]) -> None:
        """Wait for messages.

        Raises:
            RuntimeError: another rank is gone.
            PeerFailed: `give_up` was called, before or meanwhile.
        """
        self._requests.put(messages)
        error = self._results.get()
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame: the cycle would keep the messages

    def give_up(self) -> None:
        """End the present wait, or the next one. The waiter is not used again. In any thread."""
        self._results.put(PeerFailed("another rank has died"))

    def close(self) -> None:
        """End the thread when it no longer waits."""
        self._requests.put(None)


def _run(requests: SimpleQueue[Sequence[Transfer] | None], results: SimpleQueue[RuntimeError | None]) -> None:
    while (messages := requests.get()) is not None:
        error = _wait(messages)
        del messages  # they keep the connections open
        results.put(error)
        del error


def _wait(messages: Sequence[Transfer]) -> RuntimeError | None:
    try:
        wait_for_messages(messages)
    except RuntimeError as error:
        return error.with_traceback(None)  # it would refer to the messages
    return None
