"""Reads what a report shows of one run from the run's directory."""

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.errors import Error
from samestep.files import open_regular
from samestep.snapshot.logs import count_records
from samestep.tools.audit import audit_samples, summarize
from samestep.tools.inspect import POSITION, find_sound
from samestep.watch.records import (
    HEALS,
    LEDGER,
    METRICS,
    RESTARTS,
    has_ended,
    read_rows,
    read_status,
)

MAX_LINE_BYTES = 1 << 20  # a longer line ends the metrics: nothing writes such a line
MAX_STEPS = 1 << 53  # whole numbers that a float holds

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Points:
    """One metric: its values over the steps at which it was logged, in the order of the file."""

    steps: Floats
    values: Floats


@dataclass(frozen=True)
class RunData:
    """What a report shows of one run.

    Attributes:
        name: how the run is called in the report.
        is_live: the run is being written.
        metrics: name -> points.
        audit: the result of the audit of the samples, in words.
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
    audit: str

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
    try:
        problems, confirmed = audit_samples(run_dir, record)
        audit = summarize(problems, confirmed)
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
        audit=audit,
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
                if name not in POSITION and (type(value) is float or type(value) is int or value is None):
                    steps, values = found.get(name) or found.setdefault(name, (array("d"), array("d")))
                    with suppress(OverflowError):  # an integer that no float holds
                        values.append(math.nan if value is None else value)
                        steps.append(step)
    return {name: Points(np.array(steps), np.array(values)) for name, (steps, values) in found.items()}
