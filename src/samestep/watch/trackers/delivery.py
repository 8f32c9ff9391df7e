"""Passes rows of metrics to trackers, each on a thread of its own."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from samestep.config import find_trackers
from samestep.errors import Error
from samestep.watch.trackers.protocol import Tracker, TrackerInfo
from samestep.world.environment import advise

MAX_BYTES = 64 << 20  # of rows that wait for one tracker
PATIENCE_S = 60.0  # at the end, for one call of a tracker
_ROW_BYTES = 1 << 10  # estimate for a row of numbers


class Trackers:
    """All trackers of a run. A tracker that fails never stops the training.

    Args:
        trackers: trackers, and names, whose entry points build them without arguments.
        warn: prints a message. Called on the thread that calls the methods.
    """

    def __init__(self, trackers: Iterable[Tracker | str], warn: Callable[[str], None]) -> None:
        self._trackers = [find_trackers()[each].load()() if isinstance(each, str) else each for each in trackers]
        self._warn = warn
        self._running: list[_Delivery] = []

    def start(self, info: TrackerInfo) -> None:
        """Start all trackers.

        Raises:
            Error: a tracker raised it, for example because its package is missing. In a new run, TypeError and
                ImportError become an Error, because they mean a wrong argument. The other trackers are finished then.
                After any other exception, such as one about the network, the run continues without the tracker and
                starts it later.
        """
        try:
            for tracker in self._trackers:
                delivery = _Delivery(tracker, info)
                delivery.start()
                self._running.append(delivery)
        except BaseException:
            self.finish("failed")
            raise

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log the values of step `step` to all trackers. Returns at once."""
        if self._running:
            values = {name: _copy(value) for name, value in values.items()}
        for delivery in self._running:
            delivery.put(values, step)
            if failure := delivery.take_failure():
                self._warn(f"tracker {delivery.name} failed, and its rows are kept to be tried again: {failure}")

    def finish(self, status: str) -> None:
        """Deliver the remaining rows and close all trackers. They can be started again. A second call does nothing."""
        for delivery in self._running:
            delivery.close(status)
        for delivery in self._running:
            if failure := delivery.join():
                self._warn(f"tracker {delivery.name} {failure}")
        self._running = []


class _Delivery:
    """The rows of one tracker, and the thread that passes them on.

    If the tracker raises an exception, the row stays in the queue, and is tried again when the next row arrives and at
    the end. If it fails twice and the next row succeeds between, the row itself is the cause, and it is dropped.
    """

    def __init__(self, tracker: Tracker, info: TrackerInfo) -> None:
        self.name = type(tracker).__name__
        self._tracker = tracker
        self._info = info
        self._is_started = False
        self._rows: deque[tuple[Mapping[str, Any], int, int]] = deque()  # values, step, bytes
        self._put_bytes = self._taken_bytes = 0  # each is counted by one thread
        self._num_rows = self._num_sent = self._num_calls = 0
        self._failure = self._status = ""
        self._is_reported = False
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._deliver, name=f"tracker {self.name}", daemon=True)

    def start(self) -> None:
        """Start the tracker and the thread. Raises as `Trackers.start`."""
        try:
            self._tracker.start(self._info)
            self._is_started = True
        except Error:
            raise
        except Exception as error:
            if isinstance(error, TypeError | ImportError) and not self._info.resumed_step:
                advice = f"correct its arguments or its installation, or train without it: {advise(trackers='none')}"
                raise Error(f"tracker {self.name} cannot start ({_describe(error)}): {advice}", code="SS807") from error
            self._failure = _describe(error)
        self._thread.start()

    def put(self, values: Mapping[str, Any], step: int) -> None:
        """Add a row to the queue. If too many rows wait, it is dropped."""
        num_bytes = _ROW_BYTES + sum(getattr(value, "nbytes", 0) for value in values.values())
        self._num_rows += 1
        if self._put_bytes - self._taken_bytes + num_bytes <= MAX_BYTES:
            self._put_bytes += num_bytes
            self._rows.append((values, step, num_bytes))
        self._news.set()

    def take_failure(self) -> str:
        """Return the first failure, once; "" if there is none, or it was returned before."""
        if not self._failure or self._is_reported:
            return ""
        self._is_reported = True
        return self._failure

    def close(self, status: str) -> None:
        """Let the thread deliver what is left, and finish the tracker."""
        self._status = status
        self._news.set()

    def join(self) -> str:
        """Wait for the thread. Return a description of failures; "" if all rows were delivered."""
        num_calls = -1
        while self._thread.is_alive() and self._num_calls != num_calls:
            num_calls = self._num_calls
            self._thread.join(PATIENCE_S)
        num_lost = self._num_rows - self._num_sent
        lost = f"{num_lost} of {self._num_rows} rows"
        if self._thread.is_alive():
            return f"did not return within {PATIENCE_S:.0f} s at the end" + (f"; {lost} are lost" if num_lost else "")
        return f"has lost {lost}" + (f" ({self._failure})" if self._failure else "") if num_lost else ""

    def _deliver(self) -> None:
        status = ""
        while not status:
            self._news.wait()
            self._news.clear()
            status = self._status
            self._is_started = self._is_started or self._try(partial(self._tracker.start, self._info))
            if self._is_started:
                self._send_rows()
        if self._is_started:
            self._try(partial(self._tracker.finish, status))

    def _send_rows(self) -> None:
        """Pass on rows until one fails."""
        while self._rows:
            if self._send(0):
                continue
            if len(self._rows) < 2 or not self._send(1):
                return
            if not self._send(0):
                self._take(0)

    def _send(self, place: int) -> bool:
        """Pass on the row at a place of the queue. Return whether the tracker took it."""
        values, step, _ = self._rows[place]
        is_taken = self._try(partial(self._tracker.log, values, step))
        if is_taken:
            self._num_sent += 1
            self._take(place)
        return is_taken

    def _take(self, place: int) -> None:
        self._taken_bytes += self._rows[place][2]
        del self._rows[place]

    def _try(self, call: Callable[[], None]) -> bool:
        """Call a method of the tracker, and return whether it succeeded. No failure of a tracker ends the run."""
        try:
            call()
        except Exception as error:
            self._failure = _describe(error)
            return False
        finally:
            self._num_calls += 1
        return True


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _copy(value: Any) -> Any:
    """Return a value that the training does not change: tensors are copied to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value.copy() if isinstance(value, np.ndarray) else value
