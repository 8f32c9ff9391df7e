"""The tracker for MLflow."""

import re
import time
from collections.abc import Mapping
from typing import Any

from samestep.errors import needing
from samestep.watch.trackers.continuation import ServiceLog
from samestep.watch.trackers.protocol import TrackerInfo, is_histogram, to_number

_FORBIDDEN = re.compile(r"[^\w/.\- ]")  # characters that names must not have on every platform
_MAX_LENGTH = 500  # of the value of a parameter, which all versions accept
_STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow:
    """Tracker that logs to MLflow: `config` as parameters, numbers as metrics, strings as tags, no histograms.

    A resumed run continues under its id, which is kept in the run directory, and logs only the points that MLflow does
    not have. A run that goes back (`--resume STEP`) continues as a new run.

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
            from mlflow.tracking import MlflowClient
        # A client, not mlflow.start_run: the active run belongs to the script, and to one thread.
        self._client = MlflowClient(tracking_uri=self.tracking_uri)
        log = self._log = ServiceLog(info, "mlflow")
        if not log.run_id or not self._reopen(log.run_id):
            self._create()
        params = self._client.get_run(log.run_id).data.params
        config = {_clean(name): str(value)[:_MAX_LENGTH] for name, value in info.config.items()}
        new = {name: value for name, value in config.items() if name not in params}  # MLflow refuses other values
        self._log_batch(params=new, tags={f"samestep.{name}": str(value) for name, value in info.describe().items()})

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
        numbers = {_clean(name): number for name, value in values.items() if (number := to_number(value)) is not None}
        texts = {name: str(v) for name, v in values.items() if to_number(v) is None and not is_histogram(v)}
        self._log_batch(self._log.drop_known(numbers, step), step, tags=texts)

    def _log_batch(
        self,
        numbers: Mapping[str, float] | None = None,
        step: int = 0,
        *,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag

        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self._log.run_id,
            metrics=[Metric(name, float(value), now_ms, step) for name, value in (numbers or {}).items()],
            params=[Param(name, value) for name, value in (params or {}).items()],
            tags=[RunTag(_clean(name), value) for name, value in (tags or {}).items()],
        )

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._log.run_id, _STATUS[status])


def _clean(name: str) -> str:
    return _FORBIDDEN.sub("_", name)
