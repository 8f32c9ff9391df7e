"""The tracker for Weights & Biases."""

import uuid
from collections.abc import Mapping
from typing import Any

from samestep.errors import Error, needing
from samestep.watch.trackers.continuation import LastRow, find_id, keep_id, name_run, read_earlier_rows
from samestep.watch.trackers.protocol import TrackerInfo, is_histogram, to_number
from samestep.world.environment import read_job_type


class WandB:
    """Tracker that logs to Weights & Biases, with `step` as the axis of every chart.

    A resumed run continues under its id, which is kept in the run directory, and logs only the values after the last
    row that W&B received. W&B cannot remove points, so a run that goes back (`--resume STEP`) continues under a new id,
    to which the rows up to that step are copied first.

    Args:
        project: as in `wandb.init`.
        init: further arguments of `wandb.init`, such as `mode="offline"` or `tags=[...]`. These take precedence.

    Raises:
        Error: raised at the start of the run if the package is missing, or of a new run if W&B refuses the arguments
            or has no API key.

    Example::

        >>> import samestep
        >>> run = samestep.Run("runs/x", batch_size=32, trackers=[samestep.WandB("my-project", mode="offline")])
    """

    def __init__(self, project: str | None = None, **init: Any) -> None:
        self.init = {"project": project, **init}
        self._run: Any = None
        self._last = LastRow()

    def start(self, info: TrackerInfo) -> None:
        with needing("Weights & Biases is missing", "'samestep[wandb]'"):
            import wandb
            from wandb.errors import UsageError
        run_id, is_rewound = find_id(info.dir, "wandb")
        if not run_id:
            run_id = uuid.uuid4().hex[:12]
            keep_id(info.dir, "wandb", run_id)
        config = {"samestep": info.describe(), **info.config}
        ours = {"name": name_run(info, is_rewound=is_rewound), "config": config, "id": run_id, "resume": "allow"}
        ours["job_type"] = read_job_type()
        if info.dir is not None:
            ours["dir"] = str(info.dir)
        if info.group:
            ours["group"] = info.group
        try:
            self._run = wandb.init(**{**ours, **self.init})
        except UsageError as error:
            if info.resumed_step:
                raise
            raise Error(
                f"W&B cannot start ({error}): run wandb login, or set WANDB_MODE=offline", code="SS807"
            ) from error
        if self._run.id != run_id:  # an `id` among the arguments, or a sweep's
            keep_id(info.dir, "wandb", self._run.id)
        self._last = LastRow(info.dir and info.dir / "wandb", self._run.id, is_new=is_rewound)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        for values, step in read_earlier_rows(info) if is_rewound else ():
            self._run.log({"step": step, **values})

    def log(self, values: Mapping[str, Any], step: int) -> None:
        # Not log(step=...): W&B drops values with a lower step than the last one, such as if the script also logs to
        # W&B.
        logged: dict[str, Any] = {"step": step}
        new = self._last.drop_from(values, step)
        if not new:
            return
        for name, value in new.items():
            number = to_number(value)
            if number is not None:
                logged[name] = number
            elif is_histogram(value):
                import wandb

                logged[name] = wandb.Histogram(value.float().numpy())
            else:
                logged[name] = value
        self._run.log(logged)
        self._last.keep(new, step)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)
