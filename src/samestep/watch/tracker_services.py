"""The trackers for TensorBoard, Weights & Biases and MLflow. Each imports its package when a run starts."""

import json
import re
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.errors import InvalidValue, needing
from samestep.files import replace_file
from samestep.watch.records import RECORD, TRACKERS, read_or_empty
from samestep.watch.trackers import TrackerInfo, to_number

_writing = threading.Lock()  # each tracker logs on a thread of its own
_FORBIDDEN = re.compile(r"[^\w/.\- ]")  # characters that names must not have on every platform
_MAX_LENGTH = 500  # of the value of a parameter, which all versions accept
_STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


def is_histogram(value: Any) -> bool:
    """Return whether a value is a tensor of several numbers."""
    return hasattr(value, "numel") and value.numel() > 1


class TensorBoard:
    """Tracker that writes event files for `tensorboard --logdir`.

    Args:
        dir: directory of the event files; None: `tensorboard/` in the run directory.

    Raises:
        Error: raised at the start of the run if the package is missing.
        InvalidValue: raised at the start of the run if there is no directory.

    Example::

        >>> import samestep
        >>> run = samestep.Run("runs/x", batch_size=32, trackers=[samestep.TensorBoard()])
    """

    def __init__(self, dir: str | Path | None = None) -> None:
        self.dir = None if dir is None else Path(dir)
        self._writer: Any = None

    def start(self, info: TrackerInfo) -> None:
        if self.dir is None and info.dir is None:
            raise InvalidValue(
                "TensorBoard has nowhere to write: the run has no directory; give TensorBoard(dir=...)", code="SS807"
            )
        with needing("TensorBoard is missing", "'samestep[tensorboard]'"):
            from torch.utils.tensorboard import SummaryWriter
        # The reader then drops the steps that a killed run has logged after its last snapshot.
        purge_step = info.resumed_step + 1 if info.resumed_step else 0
        directory = self.dir or Path(info.dir or "") / "tensorboard"
        self._writer = SummaryWriter(str(directory), purge_step=purge_step)
        for name, values in (("config", info.config), ("run", info.describe())):
            if values:
                text = json.dumps(dict(values), indent=4, default=str)
                self._writer.add_text(name, "    " + text.replace("\n", "\n    "), info.resumed_step)
        self._writer.flush()

    def log(self, values: Mapping[str, Any], step: int) -> None:
        for name, value in values.items():
            number = to_number(value)
            if number is not None:
                self._writer.add_scalar(name, number, step)
            elif is_histogram(value):
                self._writer.add_histogram(name, value.float(), step)
            else:
                self._writer.add_text(name, str(value), step)

    def finish(self, status: str) -> None:
        self._writer.close()


class ServiceLog:
    """A run's id at a service and the last row that the service got, in `trackers.json` of the run directory.

    A resumed run continues under its id, and computes rows that the service has again, with the same values. Points
    cannot be removed from a service, so a run that went back to an earlier step continues under a new id.

    Attributes:
        run_id: "" if there is none, or the run went back.
        run_name: the name under which the service shows the run.
    """

    def __init__(self, info: TrackerInfo, service: str) -> None:
        self._info = info
        self._service = service
        known = read_or_empty(info.dir / TRACKERS).get(service, {}) if info.dir is not None else {}
        num_rewinds = len(read_or_empty(info.dir / RECORD).get("rewinds", [])) if info.dir is not None else 0
        self._is_rewound = known.get("num_rewinds", num_rewinds) != num_rewinds
        self._entry: dict[str, Any] = {"id": "", "num_rewinds": num_rewinds, "step": -1, "names": []}
        if not self._is_rewound:
            self._entry |= known
        self._earlier = (self._entry["step"], self._entry["names"])  # the last row of earlier processes
        self.run_id = str(self._entry["id"])
        self.run_name = f"{info.name} from step {info.resumed_step}" if self._is_rewound else info.name

    def begin(self, run_id: str, last_step: int | None = None, names: Sequence[str] = ()) -> None:
        """Set the id.

        Args:
            last_step, names: the last row that the service has; None: as in the file, of the run with this id.
        """
        if last_step is not None or run_id != self.run_id:
            self._earlier = (-1 if last_step is None else last_step, [*names])
        self.run_id = run_id
        self._entry |= {"id": run_id, "step": self._earlier[0], "names": self._earlier[1]}
        self._write()

    def drop_known(self, values: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return the values that the service does not have from an earlier process."""
        last, names = self._earlier
        return {name: value for name, value in values.items() if step > last or (step == last and name not in names)}

    def keep(self, values: Mapping[str, Any], step: int) -> None:
        """Record that the service has taken values of a step. A process that is killed before logs one row twice."""
        before = self._entry["names"] if step == self._entry["step"] else []
        self._entry |= {"step": step, "names": [*before, *values]}
        with suppress(OSError):  # such as a full disk: values of repeated steps are then logged twice
            self._write()

    def _write(self) -> None:
        if self._info.dir is None:
            return
        with _writing:
            path = self._info.dir / TRACKERS
            replace_file(path, json.dumps({**read_or_empty(path), self._service: self._entry}, indent=2).encode())


class WandB:
    """Tracker that logs to Weights & Biases, with `step` as the axis of every chart.

    A resumed run continues under its id; see docs/trackers.md.

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
        self._log: Any = None

    def start(self, info: TrackerInfo) -> None:
        with needing("Weights & Biases is missing", "'samestep[wandb]'"):
            import wandb
        log = self._log = ServiceLog(info, "wandb")
        log.begin(log.run_id or uuid.uuid4().hex[:12])
        ours = {
            "name": log.run_name,
            "config": {"samestep": info.describe(), **info.config},
            "id": log.run_id,
            "resume": "allow",
            "dir": info.dir and str(info.dir),
        }
        self._run = wandb.init(**{**ours, **self.init})
        log.begin(self._run.id)  # of an `id` among the arguments, or of a sweep
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, Any], step: int) -> None:
        # Not log(step=...): W&B drops values with a lower step than the last one, such as if the script also logs to
        # W&B.
        logged: dict[str, Any] = {"step": step}
        new = self._log.drop_known(values, step)
        if not new:
            return
        for name, value in new.items():
            number = to_number(value)
            logged[name] = value if number is None else number
            if is_histogram(value):
                import wandb

                logged[name] = wandb.Histogram(value.float().numpy())
        self._run.log(logged)
        self._log.keep(new, step)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)


class MLflow:
    """Tracker that logs to MLflow: `config` as parameters, numbers as metrics, strings as tags, no histograms.

    A resumed run continues under its id; see docs/trackers.md.

    Args:
        experiment: name of the experiment, which is created if it does not exist.
        tracking_uri: as in `mlflow.set_tracking_uri`; None: `MLFLOW_TRACKING_URI`, else MLflow's own default.

    Raises:
        Error: raised at the start of the run if the package is missing.

    Example::

        >>> import samestep
        >>> run = samestep.Run("runs/x", batch_size=32, trackers=[samestep.MLflow("digits", "sqlite:///mlflow.db")])
    """

    def __init__(self, experiment: str = "samestep", tracking_uri: str | None = None) -> None:
        self.experiment = experiment
        self.tracking_uri = tracking_uri
        self._client: Any = None
        self._log: Any = None

    def start(self, info: TrackerInfo) -> None:
        with needing("MLflow is missing", "'samestep[mlflow]'"):
            from mlflow.entities import Param, RunTag
            from mlflow.tracking import MlflowClient
        # A client, not mlflow.start_run: the active run belongs to the script, and to one thread.
        self._client = MlflowClient(tracking_uri=self.tracking_uri)
        log = self._log = ServiceLog(info, "mlflow")
        if not log.run_id or not self._reopen(log.run_id):
            self._create()
        known = self._client.get_run(log.run_id).data.params  # MLflow refuses other values of these
        config = {_clean(name): str(value)[:_MAX_LENGTH] for name, value in info.config.items()}
        params = [Param(name, value) for name, value in config.items() if name not in known]
        tags = [RunTag(f"samestep.{name}", str(value)) for name, value in info.describe().items()]
        self._client.log_batch(log.run_id, params=params, tags=tags)

    def _reopen(self, run_id: str) -> bool:
        """Continue a run after its last row. Return False if the server does not have this run."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        self._client.update_run(run_id, status="RUNNING")
        points = [each for name in run.data.metrics for each in self._client.get_metric_history(run_id, name)]
        last = max([each.step for each in points], default=-1)
        self._log.begin(run_id, last, [each.key for each in points if each.step == last])
        return True

    def _create(self) -> None:
        experiment = self._client.get_experiment_by_name(self.experiment)
        number = self._client.create_experiment(self.experiment) if experiment is None else experiment.experiment_id
        run = self._client.create_run(number, run_name=self._log.run_name)
        self._log.begin(run.info.run_id)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        from mlflow.entities import Metric, RunTag

        now_ms = int(time.time() * 1000)
        numbers = {_clean(name): number for name, value in values.items() if (number := to_number(value)) is not None}
        new = self._log.drop_known(numbers, step)
        metrics = [Metric(name, float(value), now_ms, step) for name, value in new.items()]
        texts = {name: v for name, v in values.items() if to_number(v) is None and not is_histogram(v)}
        tags = [RunTag(_clean(name), str(value)) for name, value in texts.items()]
        self._client.log_batch(self._log.run_id, metrics=metrics, tags=tags)

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._log.run_id, _STATUS[status])


def _clean(name: str) -> str:
    return _FORBIDDEN.sub("_", name)
