"""Reads what a report shows of one run from the run's directory."""

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.errors import Error
from samestep.files import open_regular, read_tail
from samestep.snapshot.ledger_file import count_records
from samestep.tools.audit import audit_samples, summarize
from samestep.tools.inspect import PLACE, find_sound
from samestep.watch.records import (
    HEALS,
    LEDGER,
    METRICS,
    RESTARTS,
    TIMELINE,
    has_ended,
    list_logs,
    read_or_empty,
    read_rows,
    read_status,
)
from samestep.watch.stall_diagnosis import BUSY
from samestep.world.environment import FAILURE

NOT_TRAINING = ("starting", "validating", "left", "ended")
MAX_LINE_BYTES = 1 << 20  # a longer line ends the metrics: nothing writes such a line
MAX_STEPS = 1 << 53  # whole numbers that a float holds
NUM_LINES = 30  # of a failed rank's log
TAIL_BYTES = 1 << 16
MAX_CELLS = 1 << 24  # rows of a timeline times ranks; a year on 1,000 ranks has 1 << 23

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Points:
    """One metric: its values over the steps at which it was logged, in the order of the file."""

    steps: Floats
    values: Floats


@dataclass(frozen=True)
class Intervals:
    """The timeline of the steps that remain in the run. Row i covers steps `edges[i]` to `edges[i + 1]` of rank 0.

    Attributes:
        edges: float64 of length n + 1, increasing.
        seconds: time of rank 0 in each row, without start and validation, float64 of length n; nan if not known.
        busy_s: seconds per row and rank, n x ranks, in which the rank waits for no other; 0 if a row lacks the rank.
        num_steps: steps per row and rank, n x ranks, that these seconds belong to.
    """

    edges: Floats
    seconds: Floats
    busy_s: Floats
    num_steps: Floats


@dataclass(frozen=True)
class RunData:
    """What a report shows of one run.

    Attributes:
        name: how the run is called in the report.
        is_live: the run is being written.
        metrics: name -> points.
        timeline: None if the run has no rows that cover a step.
        spent_s: phase -> seconds, summed over all ranks, over all starts that have a timeline.
        audit: the result of the audit of the samples, in words.
        logs: (title, last lines) of the ranks of each start that failed.
    """

    name: str
    record: Mapping[str, Any]
    status: Mapping[str, Any]
    is_live: bool
    num_steps: int
    snapshots: Sequence[Mapping[str, Any]]
    restarts: Sequence[Mapping[str, Any]]
    heals: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, Points]
    timeline: Intervals | None
    spent_s: Mapping[str, float]
    audit: str
    logs: Sequence[tuple[str, str]]

    @property
    def digest(self) -> str:
        """The digest of the newest sound snapshot; "" if there is none."""
        return str(self.snapshots[-1]["digest"]) if self.snapshots else ""


def read_run_data(run_dir: Path, name: str, record: Mapping[str, Any]) -> RunData:
    """Read the data of a run, which may be running. Files that are damaged or missing count as empty.

    Args:
        record: the content of run.json.
    """
    status = read_status(run_dir)
    restarts = read_rows(run_dir / RESTARTS)
    rows = read_rows(run_dir / TIMELINE)
    try:
        problems, parts = audit_samples(run_dir, record)
        audit = summarize(problems, parts)
    except (Error, MemoryError, OverflowError, ValueError) as error:
        audit = f"the samples cannot be audited: {error}"
    return RunData(
        name=name,
        record=record,
        status=status,
        is_live=status.get("status") == "running" and not has_ended(run_dir),
        num_steps=count_records(run_dir / LEDGER),
        snapshots=[{"step": each.step, "digest": each.manifest.get("digest", "")} for each in find_sound(run_dir)],
        restarts=restarts,
        heals=read_rows(run_dir / HEALS),
        metrics=read_metrics(run_dir / METRICS),
        timeline=build_intervals(rows),
        spent_s=sum_phases(rows),
        audit=audit,
        logs=list(_read_logs(run_dir)),
    )


def read_metrics(path: Path) -> dict[str, Points]:
    """Read all rows of a file of metrics of any size. Rows that are damaged and values of other kinds are skipped."""
    found: dict[str, tuple[array[float], array[float]]] = {}
    with suppress(OSError), open(path, "rb", opener=open_regular) as file:
        while len(line := file.readline(MAX_LINE_BYTES)) < MAX_LINE_BYTES and line:
            try:
                row = json.loads(line)  # noqa: TID251 parse_json takes three times as long
            except (ValueError, RecursionError):
                continue
            step = row.get("step") if type(row) is dict else None
            if type(step) is not int or not 0 <= step < MAX_STEPS:
                continue
            for name, value in row.items():
                if name not in PLACE and (type(value) is float or type(value) is int or value is None):
                    steps, values = found.get(name) or found.setdefault(name, (array("d"), array("d")))
                    with suppress(OverflowError):  # an integer that no float holds
                        values.append(math.nan if value is None else value)
                        steps.append(step)
    return {name: Points(np.array(steps), np.array(values)) for name, (steps, values) in found.items()}


def sum_phases(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sum the seconds of each phase over all rows and ranks of a timeline."""
    total: dict[str, float] = {}
    for row in rows:
        for phase, seconds in row["spent_s"].items():
            total[phase] = total.get(phase, 0.0) + sum(seconds)
    return total


def build_intervals(rows: Sequence[Mapping[str, Any]]) -> Intervals | None:
    """Return the rows of a timeline that cover the steps of the run. Of repeated steps, the last repetition counts.

    Example::

        >>> rows = [{"time_s": t, "steps": [10 * t, 9 * t], "spent_s": {"forward": [0.5, 0.25]}} for t in (1, 2, 3)]
        >>> intervals = build_intervals(rows)
        >>> intervals.edges, intervals.busy_s[0], intervals.num_steps[0]
        (array([10., 20., 30.]), array([0.5 , 0.25]), array([10.,  9.]))
    """
    rows = [each for row in rows for each in _split_first(row)]
    num_ranks = max((len(row["steps"]) for row in rows), default=0)
    if num_ranks * len(rows) > MAX_CELLS:  # nothing writes so many, and each takes 16 bytes
        return None
    closed: list[_TimelinePart] = []
    opened = _TimelinePart(num_ranks)
    before: Sequence[int] = []  # the steps in the row before
    for row in rows:
        steps = row["steps"]
        is_begin = "first_step" in row and not row["spent_s"]
        if is_begin or (before and steps and before[0] > steps[0]):  # the run went back to a snapshot
            while closed and closed[-1].edge > steps[0]:
                closed.pop()
            before = []
            opened = _TimelinePart(num_ranks)
        if is_begin and closed and closed[-1].edge < steps[0]:  # the time of these steps was lost with a start
            opened.seconds = math.nan
            closed.append(opened.close(steps[0]))
            opened = _TimelinePart(num_ranks)
        opened.add(row, before)
        before = steps
        if steps and (not closed or closed[-1].edge != steps[0]):
            closed.append(opened.close(steps[0]))
            opened = _TimelinePart(num_ranks)
    if len(closed) < 2:
        return None
    return Intervals(
        edges=np.array([each.edge for each in closed], dtype=np.float64),
        seconds=np.array([each.seconds for each in closed[1:]]),
        busy_s=np.stack([each.busy_s for each in closed[1:]]),
        num_steps=np.stack([each.num_steps for each in closed[1:]]),
    )


class _TimelinePart:
    """Rows of a timeline until rank 0 has ended a step: the seconds of rank 0, busy seconds and steps by rank."""

    def __init__(self, num_ranks: int) -> None:
        self.edge = 0  # the step at its end
        self.seconds = 0.0
        self.busy_s, self.num_steps = np.zeros((2, num_ranks))

    def add(self, row: Mapping[str, Any], before: Sequence[int]) -> None:
        """Add a row. `before`: the steps in the row before; [] if there is none."""
        for phase, spent_s in row["spent_s"].items():
            if spent_s and phase not in NOT_TRAINING:
                self.seconds += spent_s[0]
            if phase in BUSY:
                self.busy_s[: len(spent_s)] += spent_s[: len(self.busy_s)]
        if before:
            steps = row["steps"]
            self.num_steps[: len(steps)] += [
                now - was for now, was in zip_longest(steps, before[: len(steps)], fillvalue=0)
            ]

    def close(self, edge: int) -> "_TimelinePart":
        self.edge = edge
        return self


def _split_first(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the row; before the first row of a start, insert one of the position at which the start began."""
    if "first_step" not in row:
        return [row]
    return [{**row, "steps": [row["first_step"]] * len(row["steps"]), "spent_s": {}}, row]


def _read_logs(run_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield title and last lines of the log of the rank that ended each failed start."""
    for start in list_logs(run_dir):
        if failure := read_or_empty(start / FAILURE):
            text = _read_tail(start / f"{failure['rank']}.log")
            yield f"start {start.name}: {failure['reason']}", text or f"rank {failure['rank']} has printed nothing"


def _read_tail(path: Path) -> str:
    """Return the last lines of a text file; "" if it cannot be read."""
    try:
        lines = read_tail(path, TAIL_BYTES).splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-NUM_LINES:])
