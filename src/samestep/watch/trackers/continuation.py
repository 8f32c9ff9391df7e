"""Continuation of the logs of an earlier process of the run at a tracker's service."""

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.files import replace_file
from samestep.watch.records import LAST_ROW, METRICS, RECORD, TRACKERS, read_or_empty, read_rows
from samestep.watch.trackers.protocol import TrackerInfo

_writing = threading.Lock()  # a tracker that starts late does so on its own thread
Point = tuple[str, int, float]  # name, step, value


def find_id(directory: Path | None, service: str) -> tuple[str, bool]:
    """Return the run's id at a service ("" if there is none, or the run went back since), and whether it went back.

    Points cannot be removed from a service, so a run that went back to an earlier step continues under a new id.
    """
    if directory is None:
        return "", False
    known = read_or_empty(directory / TRACKERS).get(service)
    if known is None:
        return "", False
    is_rewound = known["num_rewinds"] != _count_rewinds(directory)
    return "" if is_rewound else known["id"], is_rewound


def keep_id(directory: Path | None, service: str, run_id: str) -> None:
    """Write the id that `find_id` returns at the next start."""
    if directory is not None:
        with _writing:
            ids = read_or_empty(directory / TRACKERS)
            ids[service] = {"id": run_id, "num_rewinds": _count_rewinds(directory)}
            replace_file(directory / TRACKERS, json.dumps(ids, indent=2).encode())


def _count_rewinds(directory: Path) -> int:
    return len(read_or_empty(directory / RECORD).get("rewinds", []))


def name_run(info: TrackerInfo, *, is_rewound: bool) -> str:
    """Return the name under which a service shows a run."""
    return f"{info.name} from step {info.resumed_step}" if is_rewound else info.name


def read_earlier_rows(info: TrackerInfo) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield values and step of the rows of `metrics.jsonl` up to the step from which the run resumes."""
    for row in read_rows(info.dir / METRICS) if info.dir is not None else ():
        step = row.pop("step", 0)
        if step <= info.resumed_step:
            yield row, step


class LoggedPoints:
    """The points that an earlier process logged after the snapshot from which the run resumes.

    A resumed run computes these points again with the same values. A service that appends would show them twice.

    Args:
        points: all points at the service.
        resumed_step: as in `TrackerInfo`.
    """

    def __init__(self, points: Iterable[Point] = (), resumed_step: int = 0) -> None:
        self._points = {(name, step, repr(float(value))) for name, step, value in points if step > resumed_step}

    def drop_from(self, values: Mapping[str, float], step: int) -> dict[str, float]:
        """Return the values that the service does not have at this step."""
        if not self._points:
            return dict(values)
        return {name: value for name, value in values.items() if (name, step, repr(float(value))) not in self._points}


class LastRow:
    """The last row that a service received, in a file, so that a later process does not log it and earlier rows again.

    For services whose points cannot be read; `LoggedPoints` is for the others. The file is written after the service
    has taken a row: a process that is killed between the two logs one row twice.

    Args:
        directory: directory of the file; None: no file is written.
        run_id: the run's id at the service. A row of another id is ignored.
        is_new: whether the run continues under a new id, which has no rows yet.
    """

    def __init__(self, directory: Path | None = None, run_id: str = "", *, is_new: bool = False) -> None:
        self._path = directory and directory / LAST_ROW
        self._row: dict[str, Any] = {"id": run_id, "step": -1, "names": []}
        known = read_or_empty(self._path) if self._path is not None and not is_new else {}
        self._earlier = self._row if known.get("id") != run_id else known  # of an earlier process

    def drop_from(self, values: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return the values that the service does not have."""
        last = self._earlier["step"]
        names = self._earlier["names"]
        return {name: value for name, value in values.items() if step > last or (step == last and name not in names)}

    def keep(self, values: Mapping[str, Any], step: int) -> None:
        """Record that the service has taken values of a step."""
        if self._path is None or step < self._row["step"]:  # a row may be tried again after the next one
            return
        before = next((row["names"] for row in (self._row, self._earlier) if row["step"] == step), ())
        self._row = {**self._row, "step": step, "names": [*before, *values]}
        with suppress(OSError):  # such as a full disk: values of repeated steps are then logged twice
            self._path.parent.mkdir(exist_ok=True)
            replace_file(self._path, json.dumps(self._row).encode())
