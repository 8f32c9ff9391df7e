"""The tracker for Trackio."""

import uuid
from collections.abc import Mapping
from typing import Any

from samestep.errors import needing
from samestep.watch.trackers.continuation import LoggedPoints, find_id, keep_id, name_run, read_earlier_rows
from samestep.watch.trackers.protocol import TrackerInfo, is_histogram, to_number


class Trackio:
    """Tracker that logs to Trackio, which keeps runs in a local database and can send them to a Space.

    Trackio identifies a run by its name: the run's name with a random suffix, kept in the run directory. A resumed run
    continues under that name, and logs only the points that the local database does not have. A run that goes back
    (`--resume STEP`) continues under a new name, to which the rows up to that step are copied first.

    Args:
        project: as in `trackio.init`.
        init: further arguments of `trackio.init`, such as `space_id="me/runs"`. These take precedence.

    Raises:
        Error: raised at the start of the run if the package is missing.

    Example::

        >>> import samestep
        >>> run = samestep.Run("runs/x", batch_size=32, trackers=[samestep.Trackio("my-project")])
    """

    def __init__(self, project: str = "samestep", **init: Any) -> None:
        self.init = {"project": project, **init}
        self._run: Any = None
        self._logged = LoggedPoints()

    def start(self, info: TrackerInfo) -> None:
        with needing("Trackio is missing", "'samestep[trackio]'"):
            import trackio
            from trackio.sqlite_storage import SQLiteStorage
        name, is_rewound = find_id(info.dir, "trackio")
        rows = SQLiteStorage.get_logs(self.init["project"], name) if name else []
        points = [
            (key, row["step"], value) for row in rows for key, value in row.items() if isinstance(value, int | float)
        ]
        self._logged = LoggedPoints(points, info.resumed_step)
        if not name:
            name = f"{name_run(info, is_rewound=is_rewound)} {uuid.uuid4().hex[:6]}".strip().replace(" ", "-")
            keep_id(info.dir, "trackio", name)
        config = {"samestep": info.describe(), **info.config}
        ours = {"name": name, "config": config, "resume": "allow", "group": info.group or None, "embed": False}
        self._run = trackio.init(**{**ours, **self.init})
        for values, step in read_earlier_rows(info) if is_rewound else ():
            self._run.log(values, step=step)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        import trackio

        numbers = {name: number for name, value in values.items() if (number := to_number(value)) is not None}
        others = {name: value for name, value in values.items() if name not in numbers}
        logged: dict[str, Any] = self._logged.drop_from(numbers, step)
        for name, value in others.items():
            logged[name] = trackio.Histogram(value.float().numpy()) if is_histogram(value) else str(value)
        if logged:
            self._run.log(logged, step=step)

    def finish(self, status: str) -> None:
        self._run.finish()
