"""The charts of a report, as data for the script of its page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.console import describe_ranks
from samestep.tools.report.run_data import Floats, Intervals, Points, RunData
from samestep.units import format_ranks

# After Okabe and Ito, who chose colours that colour-blind people can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f")
NUM_BUCKETS = 1000  # of a chart: two points each
# of a heat map
MAX_COLUMNS = 400
MAX_CELLS = 100_000
LEAST_SPAN = 0.25  # of the colours of a heat map, relative to the smallest value


def build_charts(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return a chart for all metrics with the same name after the last slash, and one of throughput.

    A run has one colour in all charts; in the report of a single run, each curve of a chart has its own.
    """
    charts: dict[str, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs):
        curves = [(name.rpartition("/")[2], name, points) for name, points in run.metrics.items()]
        curves += [("samples per second", "samples/s", points) for points in _measure_throughput(run)]
        for title, name, points in curves:
            series = charts.setdefault(title, [])
            colour = COLOURS[(number if len(runs) > 1 else len(series)) % len(COLOURS)]
            x, y = decimate(points.steps, points.values, NUM_BUCKETS)
            label = f"{run.name}: {name}" if len(runs) > 1 else name
            series.append({"label": label, "colour": colour, "x": _shorten(x, 15), "y": _shorten(y)})
    return [{"title": title, "series": series} for title, series in charts.items()]


def _measure_throughput(run: RunData) -> list[Points]:
    """Return samples per second over the steps; [] without a timeline."""
    batch_size = run.record.get("numbers", {}).get("batch_size")
    if run.timeline is None or not isinstance(batch_size, int):
        return []
    with np.errstate(all="ignore"):
        rates = np.diff(run.timeline.edges) * batch_size / run.timeline.seconds
    return [Points(run.timeline.edges[1:], rates)]


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


@dataclass(frozen=True)
class HeatMap:
    """Milliseconds per step in which each rank does not wait for others.

    Attributes:
        edges: steps between the columns.
        cells: columns x ranks; nan where a rank has completed no step.
        means: mean over all columns, for each rank.
    """

    edges: Floats
    cells: Floats
    means: Floats

    @property
    def scale(self) -> tuple[float, float]:
        """The darkest and the brightest value. They differ by LEAST_SPAN at least, so that noise has one colour."""
        low = float(np.nanmin(self.cells))
        return low, max(float(np.nanmax(self.cells)), low * (1 + LEAST_SPAN))

    def describe(self) -> str:
        """Describe the map in words."""
        low, high = self.scale
        return (
            f"steps {self.edges[0]:g} to {self.edges[-1]:g} across, ranks 0 to {len(self.means) - 1} down, from "
            f"{low:.3g} ms (dark) to {high:.3g} ms (bright)"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the values for the script of the page."""
        cells = [_shorten(row, 4) for row in self.cells.T]
        return {"edges": _shorten(self.edges, 15), "ranks": cells, "scale": self.scale}


def build_heat_map(timeline: Intervals | None) -> HeatMap | None:
    """Build the heat map of a run, with as many columns as a page shows. None if no row covers a step."""
    if timeline is None or not timeline.num_steps.any():
        return None
    num_rows, num_ranks = timeline.busy_s.shape
    most = max(1, min(num_rows, MAX_COLUMNS, MAX_CELLS // num_ranks))
    starts: NDArray[np.int64] = np.linspace(0, num_rows, most, endpoint=False).astype(np.int64)
    busy_s = np.add.reduceat(timeline.busy_s, starts)
    num_steps = np.add.reduceat(timeline.num_steps, starts)
    with np.errstate(all="ignore"):
        cells = np.where(num_steps > 0, 1000 * busy_s / num_steps, np.nan)
        means = 1000 * busy_s.sum(axis=0) / num_steps.sum(axis=0)
    return HeatMap(timeline.edges[[*starts, num_rows]], cells, means)


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


def _shorten(values: Floats, digits: int = 6) -> list[float | None]:
    """Return the values with a number of significant digits; None for those that are not finite."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]
