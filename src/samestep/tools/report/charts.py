"""The charts of a report, as data for the script of its page."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from samestep.console import describe_ranks
from samestep.tools.report.run_data import Floats, RunData
from samestep.units import format_ranks

# After Okabe and Ito, who chose colours that colour-blind people can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f")
NUM_BUCKETS = 1000  # of a chart: two points each


def build_charts(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return a chart for all metrics with the same name after the last slash.

    A run has one colour in all charts; in the report of a single run, each curve of a chart has its own.
    """
    charts: dict[str, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs):
        for name, points in run.metrics.items():
            series = charts.setdefault(name.rpartition("/")[2], [])
            colour = COLOURS[(number if len(runs) > 1 else len(series)) % len(COLOURS)]
            x, y = decimate(points.steps, points.values, NUM_BUCKETS)
            label = f"{run.name}: {name}" if len(runs) > 1 else name
            series.append({"label": label, "colour": colour, "x": x.tolist(), "y": _shorten(y)})
    return [{"title": title, "series": series} for title, series in charts.items()]


def find_marks(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return a vertical line per restart and heal, and per snapshot of a single run. `kind` names which it is."""
    marks = []
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        for row in run.restarts:
            ranks = f" on {format_ranks(row['world_size'])}" if type(row.get("world_size")) is int else ""
            label = f"{prefix}restart at {row['from_step']}{ranks}"
            marks.append({"step": row["from_step"], "kind": "restart", "label": label})
        for row in run.heals:
            label = f"{prefix}{describe_ranks(row['lost'])} lost at {row['step']}"
            marks.append({"step": row["step"], "kind": "heal", "label": label})
    if len(runs) == 1:
        steps = [each["step"] for each in runs[0].snapshots]
        marks += [{"step": step, "kind": "snapshot", "label": f"snapshot {step}"} for step in steps]
    return marks


def decimate(x: Floats, y: Floats, num_buckets: int) -> tuple[Floats, Floats]:
    """Reduce a curve to the smallest and largest y of each of `num_buckets` equal parts of the x axis.

    Args:
        x: not decreasing.
        y: as long as x. nan is kept only in parts without any other value.

    Returns:
        x and y of at most 2 * num_buckets points, in the order of the curve.

    Example::

        >>> import numpy as np
        >>> x = np.arange(1000.0)
        >>> y = np.where(x == 321, 9.0, 0.0)
        >>> [int(points.max()) for points in decimate(x, y, 10)]
        [999, 9]
    """
    if len(x) <= 2 * num_buckets:
        return x, y
    bucket = np.minimum((x - x[0]) / max(x[-1] - x[0], 1e-300) * num_buckets, num_buckets - 1).astype(np.int64)
    starts = np.flatnonzero(np.r_[True, bucket[1:] != bucket[:-1]])
    is_number = ~np.isnan(y)
    by_low = np.lexsort((np.where(is_number, y, np.inf), bucket))
    by_high = np.lexsort((np.where(is_number, -y, np.inf), bucket))
    kept = np.unique(np.concatenate([by_low[starts], by_high[starts]]))
    return x[kept], y[kept]


def _shorten(values: Floats) -> list[float | None]:
    """Return the values with six significant digits; None for those that are not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
