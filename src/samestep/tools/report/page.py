"""Fills the template of a report, one HTML file without links to others, and computes the points of its charts."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from samestep.console import describe_ranks, escape
from samestep.tools.inspect import list_facts, list_history
from samestep.tools.report.run_data import Floats, RunData
from samestep.units import format_ranks
from samestep.version import __version__

# After Okabe and Ito, who chose colours that colour-blind people can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f")
NUM_BUCKETS = 1000  # of a chart: two points each


def build_page(runs: Sequence[RunData]) -> str:
    """Return the page."""
    assets = files("samestep.tools.report") / "assets"
    # Text of a run is escaped twice: its control characters, and by autoescape, so that it cannot act in the page.
    environment = Environment(autoescape=True, finalize=_escape_text, undefined=StrictUndefined, trim_blocks=True)
    environment.globals["asset"] = lambda name: Markup((assets / name).read_text())
    charts = build_charts(runs)
    return environment.from_string((assets / "page.html").read_text()).render(
        title=", ".join(run.name for run in runs),
        names=[run.name for run in runs],
        about=f"samestep {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        summary=_build_summary(runs),
        charts=charts,
        times={run.name: _share_time(run) for run in runs},
        restarts={run.name: _build_restarts(run) for run in runs},
        configuration=_build_configuration(runs),
        data={"charts": charts, "marks": find_marks(runs)},
    )


def _escape_text(value: Any) -> Any:
    return escape(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _build_summary(runs: Sequence[RunData]) -> list[tuple[str, list[str], bool]]:
    """Return name, value in each run, and False, for each fact."""
    rows: dict[str, list[str]] = {}
    for number, run in enumerate(runs):
        measured = run.status.get("measured") or {}
        state = "live: the run is being written" if run.is_live else run.status.get("status", "not begun")
        reason = run.status.get("reason")
        num_heals = len(run.heals)
        facts = {
            "state": f"{state}: {reason}" if reason else state,
            "steps": f"{run.num_steps:,}",
            "snapshots after steps": ", ".join(str(each["step"]) for each in run.snapshots[-5:]) or "none",
            "digest": run.digest,
            "restarts": str(len(run.restarts)),
            "heals": str(num_heals) if num_heals else "",
            "samples/s": f"{measured['samples_per_s']:,.0f}" if "samples_per_s" in measured else "",
            "samples": run.audit,
        }
        for name, points in run.metrics.items():
            finite = points.values[np.isfinite(points.values)]
            if finite.size:
                facts[name] = f"{finite[-1]:.5g} (lowest {finite.min():.5g}, highest {finite.max():.5g})"
        for name, value in facts.items():
            rows.setdefault(name, [""] * len(runs))[number] = value
    return [(name, cells, False) for name, cells in rows.items() if any(cells)]


def _share_time(run: RunData) -> dict[str, float]:
    """Return the percentage of each phase in the time of all ranks, except the smallest."""
    shares = (run.status.get("measured") or {}).get("time_share") or {}
    return {name: 100 * share for name, share in shares.items() if share >= 0.0005}


def _build_restarts(run: RunData) -> list[tuple[Sequence[str], Sequence[Sequence[str]]]]:
    """Return header and rows of the tables of restarts, heals and changes that are not empty."""
    history = list_history(run.record, run.restarts, run.heals)
    return [(header, rows) for _, header, rows in history if rows]


def _build_configuration(runs: Sequence[RunData]) -> list[tuple[str, list[str], bool]]:
    """Return name, value in each run, and whether these differ. Those that differ come first."""
    found = [list_facts(run.record) for run in runs]
    rows = [(name, [each.get(name, "") for each in found]) for name in dict.fromkeys(n for each in found for n in each)]
    return sorted(((name, cells, len({*cells}) > 1) for name, cells in rows), key=lambda row: not row[2])


# --- charts, as data for the script of the page ----------------------------------------------------------------------


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
            series.append({"label": label, "colour": colour, "x": x.tolist(), "y": _round(y)})
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
    """Reduce a curve to the smallest and largest y of each of `num_buckets` equal ranges of the x axis.

    Args:
        x: not decreasing.
        y: as long as x. nan is kept only in ranges without any other value.

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


def _round(values: Floats) -> list[float | None]:
    """Return the values with six significant digits; None for those that are not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
