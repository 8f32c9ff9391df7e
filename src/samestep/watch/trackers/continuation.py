"""How a tracker continues what an earlier process of the run has logged."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from samestep.files import fits, is_count, is_text, replace_file
from samestep.watch.records import METRICS, RECORD, TRACKERS, read_or_empty, read_rows
from samestep.watch.trackers.protocol import TrackerInfo

Point = tuple[str, int, float]  # name, step, value


def find_id(directory: Path | None, service: str) -> tuple[str, bool]:
    """Return the run's id at a service.

    Args:
        directory: run directory.
        service: name of the service in `trackers.json`.

    Returns:
        The id, "" if there is none yet or the run went back to an earlier step since; and whether it went back.
        Points cannot be removed at a service, so a run that went back continues under another id.
    """
    if directory is None:
        return "", False
    known: Any = read_or_empty(directory / TRACKERS).get(service)
    if not fits(known, {"id": is_text, "num_rewinds": is_count}):
        return "", False
    is_rewound = known["num_rewinds"] != _count_rewinds(directory)
    return "" if is_rewound else known["id"], is_rewound


def keep_id(directory: Path | None, service: str, run_id: str) -> None:
    """Write the id that `find_id` returns at the next start."""
    if directory is not None:
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
