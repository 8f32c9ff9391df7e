"""Trackers: destinations of metrics besides `metrics.jsonl`. Each gets its rows on a thread of its own."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch

from samestep.config import find_trackers
from samestep.errors import Error
from samestep.world.environment import advise

MAX_BYTES = 64 << 20  # of rows that wait for one tracker
PATIENCE_S = 60.0  # at the end, for one call of a tracker
_ROW_BYTES = 1 << 10  # estimate for a row of numbers


@dataclass(frozen=True)
class TrackerInfo:
    """The description of a run that a tracker gets at its start.

    Attributes:
        name: name of the run.
        dir: run directory; None if the run has none.
        config: the `config` argument of `Run`.
        resumed_step: number of steps completed before this start; 0 for a new run.
        options: the options that identify the run, such as `batch_size` and `seed`.
        environment: versions of samestep, torch and python, the device and the world size of this start.
        git_commit: commit of the script's work tree; "" outside a work tree.
        git_is_dirty: whether tracked files of the work tree differ from that commit.
        data: hashes of a few samples of the data set; empty if the run has no directory.

    Example::

        >>> import samestep
        >>> info = samestep.TrackerInfo("digits", None, {}, resumed_step=0, options={"seed": 1}, git_commit="4f1c2a9")
        >>> info.describe()
        {'seed': 1, 'git_commit': '4f1c2a9', 'git_is_dirty': False}
    """

    name: str
    dir: Path | None
    config: Mapping[str, Any]
    resumed_step: int
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    git_commit: str = ""
    git_is_dirty: bool = False
    data: Sequence[str] = ()

    def describe(self) -> dict[str, Any]:
        """Return what to record besides `config`: options, environment, git commit and data, without empty entries.

        Example: see `TrackerInfo`.
        """
        git = {"git_commit": self.git_commit, "git_is_dirty": self.git_is_dirty} if self.git_commit else {}
        data = {"data": " ".join(self.data)} if any(self.data) else {}
        return {**self.options, **self.environment, **git, **data}


class Tracker(Protocol):
    """A destination for metrics. Pass any object with these methods in `trackers=[...]`. It is used on rank 0 only.

    `start` is called on the main thread, `log` and `finish` on a thread of the tracker, so that a slow service does not
    delay the training. A row for which `log` raises an exception is lost.

    Example::

        >>> class Rows(list):
        ...     def start(self, info):
        ...         self.append(f"start at step {info.resumed_step}")
        ...     def log(self, values, step):
        ...         self.append((step, sorted(values)))
        ...     def finish(self, status):
        ...         self.append(status)
        >>> import samestep, torch
        >>> rows = Rows()
        >>> run = samestep.Run(None, batch_size=2, trackers=[rows], log_every=2)
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> run.prepare(model=model, optimizer=optimizer)
        >>> for step in run.steps(torch.ones(8, 1), 2):
        ...     for x in step:
        ...         step.backward(model(x).mean())
        ...     optimizer.step()
        ...
        >>> rows
        ['start at step 0', (2, ['train/learning_rate', 'train/loss']), 'done']
    """

    def start(self, info: TrackerInfo) -> None:
        """Called before the first step. Steps after `info.resumed_step` may have been logged by an earlier process.

        Example: see `Tracker`.
        """

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Called for each row of metrics: numbers, strings and tensors by name, after `step` steps.

        Example: see `Tracker`.
        """

    def finish(self, status: str) -> None:
        """Called at the end. `status` is "done", "stopped" (the run can be resumed) or "failed".

        Example: see `Tracker`.
        """


def to_number(value: Any) -> float | int | None:
    """Convert a number, one-element tensor or numpy scalar to a Python number; None for other values."""
    if not isinstance(value, (int, float)):
        try:
            value = value.item()
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return None
    return value if isinstance(value, (int, float)) else None


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
        """Start all trackers. A resumed run continues without one that cannot start.

        Raises:
            Error: a tracker raised it, for example because its package is missing. In a new run, also after any other
                exception. The other trackers are finished then.
        """
        try:
            for tracker in self._trackers:
                self._start(tracker, info)
        except BaseException:
            self.finish("failed")
            raise

    def _start(self, tracker: Tracker, info: TrackerInfo) -> None:
        name = type(tracker).__name__
        try:
            tracker.start(info)
        except Error:
            raise
        except Exception as error:
            if info.resumed_step:
                self._warn(f"tracker {name} cannot start, and gets no rows: {_describe(error)}")
                return
            raise Error(
                f"tracker {name} cannot start ({_describe(error)}): correct its arguments or its installation, or "
                f"train without it: {advise(trackers='none')}",
                code="SS807",
            ) from error
        self._running.append(_Delivery(tracker, name))

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log the values of step `step` to all trackers. Returns at once."""
        if self._running:
            values = {name: _copy(value) for name, value in values.items()}
        for delivery in self._running:
            delivery.put(values, step)
            self._report(delivery)

    def finish(self, status: str) -> None:
        """Deliver the remaining rows and close all trackers. They can be started again. A second call does nothing."""
        for delivery in self._running:
            delivery.close(status)
        for delivery in self._running:
            delivery.join()
            self._report(delivery)
        self._running = []

    def _report(self, delivery: "_Delivery") -> None:
        """Print the first failure of a tracker."""
        if delivery.failure and not delivery.is_reported:
            delivery.is_reported = True
            self._warn(f"tracker {delivery.name} has failed, and may lack rows: {delivery.failure}")


class _Delivery:
    """The rows that wait for a tracker, and the thread that passes them on.

    Attributes:
        failure: why it has not taken something; "" if it has taken all.
        is_reported: it has been printed.
    """

    def __init__(self, tracker: Tracker, name: str) -> None:
        self.name = name
        self.failure = ""
        self.is_reported = False
        self._tracker = tracker
        self._calls: SimpleQueue[tuple[Callable[[], None], int] | None] = SimpleQueue()  # and the bytes of their rows
        self._put_bytes = self._taken_bytes = 0  # each is counted by one thread
        self._thread = threading.Thread(target=self._deliver, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, values: Mapping[str, Any], step: int) -> None:
        """Add a row to the queue. If too many rows wait, it is dropped."""
        num_bytes = _ROW_BYTES + sum(getattr(value, "nbytes", 0) for value in values.values())
        if self._put_bytes - self._taken_bytes + num_bytes > MAX_BYTES:
            self.failure = f"it is slow, and rows of {MAX_BYTES >> 20} MB wait for it"
            return
        self._put_bytes += num_bytes
        self._calls.put((partial(self._tracker.log, values, step), num_bytes))

    def close(self, status: str) -> None:
        """Let the thread deliver what is left, finish the tracker, and end."""
        self._calls.put((partial(self._tracker.finish, status), 0))
        self._calls.put(None)

    def join(self) -> None:
        """Wait for the thread, as long as its calls return."""
        num_left = -1
        while self._thread.is_alive() and self._calls.qsize() != num_left:
            num_left = self._calls.qsize()
            self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self.failure = f"it did not return within {PATIENCE_S:.0f} s at the end"

    def _deliver(self) -> None:
        while (each := self._calls.get()) is not None:
            call, num_bytes = each
            try:
                call()
            except Exception as error:  # no failure of a tracker ends the run
                self.failure = _describe(error)
            self._taken_bytes += num_bytes


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _copy(value: Any) -> Any:
    """Return a value that the training does not change: tensors are copied to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value.copy() if isinstance(value, np.ndarray) else value
