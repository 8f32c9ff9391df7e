"""Trackers: TensorBoard, Weights & Biases, and the protocol for others."""

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from samestep.errors import Error
from samestep.files import read_bytes, replace_file
from samestep.watch.records import METRICS, RECORD, read_or_empty, read_rows


@dataclass(frozen=True)
class TrackerInfo:
    """The run, as a tracker gets it at its start.

    Attributes:
        name: name of the run.
        dir: run directory; None if the run has none.
        config: the `config` argument of `Run`.
        resumed_step: number of steps done before this start; 0 for a new run.
    """

    name: str
    dir: Path | None
    config: Mapping[str, Any]
    resumed_step: int


class Tracker(Protocol):
    """A destination of metrics. `Run` calls it on rank 0 only; pass any object with these methods in `trackers=[...]`.

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
        """Called before the first step. Steps after `info.resumed_step` may have been logged by an earlier process."""

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Called for each row of metrics: numbers, strings and tensors by name, after `step` steps."""

    def finish(self, status: str) -> None:
        """Called at the end. `status` is "done", "stopped" (the run can be resumed) or "failed"."""


class TensorBoard:
    """Tracker that writes event files for `tensorboard --logdir`.

    Args:
        dir: directory of the event files; None: `tensorboard/` in the run directory.

    Raises:
        Error: raised at the start of the run if the package is missing or there is no directory.

    Example::

        >>> import samestep
        >>> run = samestep.Run("runs/x", batch_size=32, trackers=[samestep.TensorBoard()])
    """

    def __init__(self, dir: str | Path | None = None) -> None:
        self.dir = None if dir is None else Path(dir)
        self._writer: Any = None

    def start(self, info: TrackerInfo) -> None:
        if self.dir is None and info.dir is None:
            raise Error("TensorBoard has nowhere to write: the run has no directory; give TensorBoard(dir=...)")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise Error(f"TensorBoard is missing ({error}): pip install 'samestep[tensorboard]'") from error
        # The reader then drops the steps that a killed run has logged after its last snapshot.
        purge_step = info.resumed_step + 1 if info.resumed_step else 0
        directory = self.dir or Path(info.dir or "") / "tensorboard"
        self._writer = SummaryWriter(str(directory), purge_step=purge_step)
        if info.config:
            config = json.dumps(dict(info.config), indent=4, default=str)
            self._writer.add_text("config", "    " + config.replace("\n", "\n    "), info.resumed_step)
        self._writer.flush()

    def log(self, values: Mapping[str, Any], step: int) -> None:
        for name, value in values.items():
            number = _number(value)
            if number is not None:
                self._writer.add_scalar(name, number, step)
            elif hasattr(value, "numel") and value.numel() > 1:
                self._writer.add_histogram(name, value.detach().float().cpu(), step)
            else:
                self._writer.add_text(name, str(value), step)

    def finish(self, status: str) -> None:
        self._writer.close()


class WandB:
    """Tracker that logs to Weights & Biases, with `step` as the axis of every chart.

    A resumed run continues under its id, which is kept in the run directory. W&B cannot remove points, so a run that
    goes back (`--resume STEP`) continues under a new id, to which the rows up to that step are copied first.

    Args:
        project: as in `wandb.init`.
        init: further arguments of `wandb.init`, such as `mode="offline"` or `tags=[...]`. These take precedence.

    Raises:
        Error: raised at the start of the run if the package is missing.

    Example::

        >>> import samestep
        >>> run = samestep.Run("runs/x", batch_size=32, trackers=[samestep.WandB("my-project", mode="offline")])
    """

    def __init__(self, project: str | None = None, **init: Any) -> None:
        self.init = {"project": project, **init}
        self._run: Any = None

    def start(self, info: TrackerInfo) -> None:
        try:
            import wandb
        except ImportError as error:
            raise Error(f"Weights & Biases is missing ({error}): pip install 'samestep[wandb]'") from error
        run_id, is_rewound = _wandb_id(info.dir)
        name = f"{info.name} from step {info.resumed_step}" if is_rewound else info.name
        ours = {"name": name, "config": dict(info.config), "id": run_id, "resume": "allow"}
        if info.dir is not None:
            ours["dir"] = str(info.dir)
        self._run = wandb.init(**{**ours, **self.init})
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        for row in read_rows(info.dir / METRICS) if info.dir is not None and is_rewound else ():
            if row.get("step", 0) <= info.resumed_step:
                self._run.log(row)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        # Not log(step=...): W&B drops values with a lower step than before, as after a crash, or if the script itself
        # logs to W&B. A step that is repeated after a crash has the same values, and so the same points.
        logged: dict[str, Any] = {"step": step}
        for name, value in values.items():
            number = _number(value)
            if number is not None:
                logged[name] = number
            elif hasattr(value, "numel") and value.numel() > 1:
                import wandb

                logged[name] = wandb.Histogram(value.detach().float().cpu().numpy())
            else:
                logged[name] = value
        self._run.log(logged)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)


class Trackers:
    """All trackers of a run. A tracker that fails during training is dropped with a warning.

    Args:
        trackers: the trackers.
        warn: prints the warning.
    """

    def __init__(self, trackers: Iterable[Tracker], warn: Callable[[str], None]) -> None:
        self._waiting = list(trackers)
        self._running: list[Tracker] = []
        self._warn = warn

    def start(self, info: TrackerInfo) -> None:
        """Start all trackers. If one raises, finish the others and raise."""
        try:
            for tracker in self._waiting:
                tracker.start(info)
                self._running.append(tracker)
            self._waiting = []
        except BaseException:
            self.finish("failed")
            raise

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log the values of step `step` to all trackers."""
        self._each(lambda tracker: tracker.log(values, step))

    def finish(self, status: str) -> None:
        """Close all trackers. They can be started again. A second call does nothing."""
        self._each(lambda tracker: tracker.finish(status))
        self._waiting += self._running
        self._running = []

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._running):
            try:
                call(tracker)
            except Exception as error:  # no failure of a tracker ends the run
                self._running.remove(tracker)
                reason = " ".join(str(error).split())
                name = type(tracker).__name__
                self._warn(f"tracker {name} failed and is left out from here on: {type(error).__name__}: {reason}")


def _number(value: Any) -> float | int | None:
    """Convert a number, one-element tensor or numpy scalar to a Python number; None for other values."""
    if not isinstance(value, (int, float)):
        try:
            value = value.item()
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return None
    return value if isinstance(value, (int, float)) else None


def _wandb_id(directory: Path | None) -> tuple[str, bool]:
    """Return the W&B id of this run, and whether it is new because the run went back to an earlier step."""
    path = None if directory is None else directory / "wandb.id"
    num_rewinds = 0 if directory is None else len(read_or_empty(directory / RECORD).get("rewinds", []))
    known = read_bytes(path).decode(errors="replace").split() if path is not None and path.exists() else []
    if known and (known[1:] or ["0"])[0] == str(num_rewinds):
        return known[0], False
    new = uuid.uuid4().hex[:12]
    if path is not None:
        replace_file(path, f"{new} {num_rewinds}\n".encode())
    return new, bool(known)
