"""The protocol of trackers, the description of a run that they get, and shared conversions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


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
    """A destination of metrics. Pass any object with these methods in `trackers=[...]`. It is used on rank 0 only.

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


def is_histogram(value: Any) -> bool:
    """Return whether a value is a tensor of several numbers."""
    return hasattr(value, "numel") and value.numel() > 1
