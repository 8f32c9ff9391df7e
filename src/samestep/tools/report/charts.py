"""The charts of a report: their data for the script of the page, and static SVG and PNG for pages without scripts."""

import base64
import math
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape as escape_html
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.console import describe_ranks, escape, format_ranks
from samestep.tools.report.decimation import Floats, colour, decimate, merge_rows, shorten
from samestep.tools.report.run_data import MAX_STEPS, Intervals, Points, RunData

# After Okabe and Ito, who chose colours that colour-blind people can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f")
DASHES = ((), (7, 5), (2, 5), (10, 5, 2, 5))  # of the curves of one run in a chart of several runs
NUM_BUCKETS = 1000  # of a chart: two points each
NUM_STATIC_BUCKETS = 200
# of an SVG, in its own units
WIDTH = 720
HEIGHT = 220
LEFT = 60
BOTTOM = 24
WIDER = 3.0  # per curve that covers another
MAX_BANDS = 100
# of a heat map
MAX_COLUMNS = 400
MAX_CELLS = 100_000
LEAST_SPAN = 0.25  # of the colours of a heat map, relative to the smallest value
# of the means of two ranks: relative, and in standard errors
LEAST_DIFFERENCE = 0.05
NUM_ERRORS = 3.0


def to_html(text: str) -> str:
    """Escape a text for HTML, including control characters and characters that change the writing direction."""
    return escape_html(escape(text))


@dataclass(frozen=True)
class Mark:
    """A vertical line in every chart. `kind`: "restart", "heal" or "snapshot"."""

    step: int
    kind: str
    label: str


@dataclass(frozen=True)
class Band:
    """Consecutive steps that the run trained on the same number of ranks, from `first` to `last`."""

    first: float
    last: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Curves over the steps. `runs`: the number of each curve's run; {} if there is a single run."""

    title: str
    series: Mapping[str, Points]
    runs: Mapping[str, int] = field(default_factory=dict)

    @property
    def widths(self) -> list[float]:
        """The width of each curve. A curve that later ones coincide with is wider, so that it is seen around them."""
        curves = [decimate(points.steps, points.values, NUM_STATIC_BUCKETS) for points in self.series.values()]
        low, high = _span(np.concatenate([y[np.isfinite(y)] for _, y in curves]))
        return [
            1.5 + WIDER * min(sum(_coincide(curve, later, (high - low) / HEIGHT) for later in curves[place + 1 :]), 3)
            for place, curve in enumerate(curves)
        ]

    @property
    def styles(self) -> list[tuple[int, int]]:
        """The places of each curve's colour in COLOURS and of its dashes in DASHES. A run has one colour everywhere."""
        if not self.runs:
            return [(number % len(COLOURS), 0) for number in range(len(self.series))]
        places = Counter[int]()
        styles = []
        for label in self.series:
            run = self.runs[label]
            styles.append((run % len(COLOURS), places[run] % len(DASHES)))
            places[run] += 1
        return styles


def group_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return a chart for all metrics with the same name after the last slash, and charts of throughput and memory."""
    charts: dict[str, dict[str, Points]] = {}
    owners: dict[str, int] = {}
    for number, run in enumerate(runs):
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        for name, points in run.metrics.items():
            charts.setdefault(name.rpartition("/")[2], {})[prefix + name] = points
        if (rate := measure_throughput(run)) is not None:
            charts.setdefault("samples per second", {})[f"{prefix}samples/s"] = rate
        for label, points in measure_memory(run).items():
            charts.setdefault("memory (MB)", {})[prefix + label] = points
        owners |= {label: number for series in charts.values() for label in series if label not in owners}
    return [Chart(title, series, owners if len(runs) > 1 else {}) for title, series in charts.items()]


def measure_throughput(run: RunData) -> Points | None:
    """Return samples per second over the steps; None without a timeline."""
    batch_size = run.record.get("numbers", {}).get("batch_size")
    if run.timeline is None or not isinstance(batch_size, int):
        return None
    with np.errstate(all="ignore"):
        rates = np.diff(run.timeline.edges) * batch_size / run.timeline.seconds
    return Points(run.timeline.edges[1:], np.where(np.isfinite(rates), rates, np.nan))


def measure_memory(run: RunData) -> dict[str, Points]:
    """Return the memory of each rank over the steps; with more than 8 ranks, only the largest and the smallest."""
    found: dict[str, Points] = {}
    for label, values in (run.timeline.memory if run.timeline is not None else {}).items():
        assert run.timeline is not None
        columns = {f"{label}, rank {rank}": column for rank, column in enumerate(values.T)}
        if len(columns) > len(COLOURS):
            columns = {
                f"{label}, largest": np.fmax.reduce(values, axis=1),
                f"{label}, smallest": np.fmin.reduce(values, axis=1),
            }
        found |= {name: Points(run.timeline.edges[1:], column) for name, column in columns.items()}
    return found


def find_marks(runs: Sequence[RunData]) -> list[Mark]:
    """Return the restarts, and the snapshots of a single run."""
    marks = []
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        for row in run.restarts:
            ranks = f" on {format_ranks(row['world_size'])}" if type(row.get("world_size")) is int else ""
            marks.append(Mark(row["from_step"], "restart", f"{prefix}restart at {row['from_step']}{ranks}"))
        for row in run.heals:
            marks.append(Mark(row["step"], "heal", f"{prefix}{describe_ranks(row['lost'])} lost at {row['step']}"))
    if len(runs) == 1:
        marks += [Mark(each["step"], "snapshot", f"snapshot {each['step']}") for each in runs[0].snapshots]
    return marks


def find_bands(runs: Sequence[RunData]) -> list[Band]:
    """Return the numbers of ranks of a single run, if there are several."""
    if len(runs) > 1 or (timeline := runs[0].timeline) is None or len({*timeline.world_sizes}) < 2:
        return []
    sizes = timeline.world_sizes
    rows = [0, *(row for row in range(1, len(sizes)) if sizes[row] != sizes[row - 1])][:MAX_BANDS]
    edges = [0.0, *timeline.edges[rows[1:]].tolist(), float(MAX_STEPS)]
    pairs = zip(pairwise(edges), rows, strict=True)
    return [Band(first, last, format_ranks(sizes[row])) for (first, last), row in pairs]


def to_json(chart: Chart) -> dict[str, Any]:
    """Return a chart for the script of the page: at most 2 * NUM_BUCKETS points per curve."""
    series = []
    for (label, points), (number, dash), width in zip(chart.series.items(), chart.styles, chart.widths, strict=True):
        x, y = decimate(points.steps, points.values, NUM_BUCKETS)
        style = {"colour": COLOURS[number], "dash": DASHES[dash], "width": width}
        series.append({"label": label, **style, "x": shorten(x, 15), "y": shorten(y)})
    return {"title": chart.title, "series": series}


def draw_svg(chart: Chart, marks: Sequence[Mark], bands: Sequence[Band] = ()) -> str:
    """Draw a chart as SVG, for pages without scripts and for print."""
    curves = [decimate(points.steps, points.values, NUM_STATIC_BUCKETS) for points in chart.series.values()]
    x_all = np.concatenate([x for x, _ in curves])
    y_all = np.concatenate([y for _, y in curves])
    y_all = y_all[np.isfinite(y_all)]
    low_x, high_x = _span(x_all)
    low_y, high_y = _span(y_all)

    def place(x: Any, y: Any) -> tuple[Any, Any]:
        across = LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - 8)
        return across, 8 + (high_y - y) / (high_y - low_y) * (HEIGHT - BOTTOM - 8)

    parts = []
    floor = HEIGHT - BOTTOM
    for number, band in enumerate(bands):
        (across, end), _ = place(np.clip([band.first, band.last], low_x, high_x), low_y)
        if end > across:
            where = f'class="band{number % 2}" x="{across:.1f}" width="{end - across:.1f}"'
            parts.append(f'<rect {where} y="8" height="{floor - 8}"/>')
            parts.append(f'<text x="{across + 4:.1f}" y="18">{to_html(band.label)}</text>')
    for mark in marks:
        if low_x <= mark.step <= high_x:
            across, _ = place(mark.step, low_y)
            top = floor - 6 if mark.kind == "snapshot" else 8
            parts.append(f'<line class="{mark.kind}" x1="{across:.1f}" x2="{across:.1f}" y1="{top}" y2="{floor}"/>')
    for (x, y), (number, dash), width in zip(curves, chart.styles, chart.widths, strict=True):
        is_number = np.isfinite(y)
        across, down = place(x[is_number], y[is_number])
        points = " ".join(f"{a:.1f},{d:.1f}" for a, d in zip(across, down, strict=True))
        points += f" {points}" if len(x) == 1 else ""  # drawn as a dot
        stroke = f'stroke="{COLOURS[number]}" stroke-dasharray="{" ".join(map(str, DASHES[dash])) or "none"}"'
        stroke += f' stroke-width="{width + 0.5:g}"'
        parts.append(f'<polyline fill="none" stroke-linecap="round" {stroke} points="{points}"/>')
    parts.append(f'<path class="axis" fill="none" d="M{LEFT},8V{floor}H{WIDTH - 8}"/>')
    for text, across, down, anchor in (
        (f"{high_y:.4g}", LEFT - 6, 16, "end"),
        (f"{low_y:.4g}", LEFT - 6, floor, "end"),
        (f"{low_x:g}", LEFT, HEIGHT - 6, "start"),
        (f"step {high_x:g}", WIDTH - 8, HEIGHT - 6, "end"),
    ):
        parts.append(f'<text x="{across}" y="{down}" text-anchor="{anchor}">{text}</text>')
    words = to_html(describe_chart(chart))
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words}">{"".join(parts)}</svg>'


def build_key(chart: Chart) -> Iterator[str]:
    """Yield an item of a list for each curve."""
    for label, (number, dash) in zip(chart.series, chart.styles, strict=True):
        yield f'<li class="part{number} dash{dash}">{to_html(label)}</li>'


def _coincide(one: tuple[Floats, Floats], other: tuple[Floats, Floats], near: float) -> bool:
    """Return whether at least half of one curve is as near to the other as a line is wide."""
    x, y = one
    other_x, other_y = (each[np.isfinite(other[1])] for each in other)
    inside = np.isfinite(y) & (x >= other_x.min(initial=np.inf)) & (x <= other_x.max(initial=-np.inf))
    distances = np.abs(y[inside] - np.interp(x[inside], other_x, other_y)) if inside.any() else np.array([np.inf])
    return float((distances <= near).mean()) >= 0.5


def _span(values: Floats) -> tuple[float, float]:
    """Return the smallest and largest value, or an interval around a single one."""
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    pad = abs(low) / 2 or 0.5
    return (low, high) if high > low else (low - pad, high + pad)


def describe_chart(chart: Chart) -> str:
    """Describe a chart in words."""
    parts = []
    for label, points in chart.series.items():
        values = points.values[np.isfinite(points.values)]
        number = len(points.values) - len(values)
        text = f"{label} from {values[0]:.4g} to {values[-1]:.4g}" if values.size else f"{label} has no finite value"
        parts.append(text + (f" ({number} values are not finite)" if number and values.size else ""))
    return f"{chart.title} over the steps: {'; '.join(parts)}"


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
        high = float(np.nanmax(self.cells))
        return low, max(high, low * (1 + LEAST_SPAN))

    @property
    def slowest(self) -> int | None:
        """The rank that takes longest; None if it does not differ from the fastest by more than the noise.

        They are compared in the columns that both have. The noise is the standard error of the mean difference.
        """
        slow = int(np.nanargmax(self.means))
        fast = int(np.nanargmin(self.means))
        differences = self.cells[:, slow] - self.cells[:, fast]
        differences = differences[np.isfinite(differences)]
        noise = NUM_ERRORS * differences.std(ddof=1) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
        is_slow = len(differences) > 0 and differences.mean() > max(noise, LEAST_DIFFERENCE * self.means[fast])
        return slow if is_slow else None

    @property
    def image(self) -> str:
        """The map as the URL of a PNG, one pixel per cell, rank 0 at the top."""
        return f"data:image/png;base64,{base64.b64encode(_write_png(colour(self.cells.T, *self.scale))).decode()}"

    def to_json(self) -> dict[str, Any]:
        """Return the values for the script of the page."""
        return {"edges": shorten(self.edges, 15), "ranks": [shorten(row, 4) for row in self.cells.T]}


def build_heat_map(timeline: Intervals | None) -> HeatMap | None:
    """Build the heat map of a run, with as many columns as a page shows. None if no row covers a step."""
    if timeline is None or not timeline.num_steps.any():
        return None
    num_rows, num_ranks = timeline.busy_s.shape
    starts = merge_rows(num_rows, max(1, min(MAX_COLUMNS, MAX_CELLS // num_ranks)))
    busy_s = np.add.reduceat(timeline.busy_s, starts)
    num_steps = np.add.reduceat(timeline.num_steps, starts)
    with np.errstate(all="ignore"):
        cells = np.where(num_steps > 0, 1000 * busy_s / num_steps, np.nan)
        means = 1000 * busy_s.sum(axis=0) / num_steps.sum(axis=0)
    return HeatMap(timeline.edges[[*starts, num_rows]], cells, means)


def _write_png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode RGBA pixels, height x width x 4, as described in the PNG specification (ISO/IEC 15948)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))  # noqa: TID251 as PNG has it

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
