"""The tracker for Weights & Biases."""

import uuid
from collections.abc import Mapping
from typing import Any

from samestep.errors import needing
from samestep.watch.trackers.continuation import ServiceLog
from samestep.watch.trackers.protocol import TrackerInfo, is_histogram, to_number


class WandB:
    """Tracker that logs to Weights & Biases, with `step` as the axis of every chart.

    A resumed run continues under its id, which is kept in the run directory, and logs only the values after the last
    row that W&B received. W&B cannot remove points, so a run that goes back (`--resume STEP`) continues under a new id.

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
        config = {"samestep": info.describe(), **info.config}
        ours: dict[str, Any] = {"name": log.run_name, "config": config, "id": log.run_id, "resume": "allow"}
        ours |= {"dir": info.dir and str(info.dir)}
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
