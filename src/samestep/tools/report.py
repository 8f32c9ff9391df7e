"""`samestep report`: writes an HTML file about one or several runs. Does not import torch."""

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from samestep.cli import PATH, Command, json_option, print_json
from samestep.console import describe_ranks, escape, format_bytes, format_count, show_activity
from samestep.decoding import Json
from samestep.errors import Error
from samestep.files import open_regular, replace_file
from samestep.snapshot.logs import count_records
from samestep.snapshot.run_record import open_run
from samestep.tools.audit import audit_samples, summarize
from samestep.tools.inspect import POSITION, find_runs, find_sound, list_facts, list_history
from samestep.version import __version__
from samestep.watch.records import HEALS, LEDGER, METRICS, RECORD, RESTARTS, has_ended, read_rows, read_status

MAX_LINE_BYTES = 1 << 20  # a longer line ends the metrics: nothing writes such a line
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, None: math.nan}  # as in metrics.jsonl
MAX_STEPS = 1 << 53  # whole numbers that a float holds
# After Okabe and Ito, who chose colours that colour-blind people can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f")
NUM_BUCKETS = 1000  # of a chart: two points each

Floats = NDArray[np.float64]
Points = tuple[Floats, Floats]  # of one metric: the steps at which it was logged, in the order of the file; its values
ByRun = list[tuple[str, list[str], bool]]  # name, value in each run, and whether to mark the row


@click.command("report", cls=Command)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path())
@click.option("-o", "--output", type=PATH, default=Path("report.html"), help="file to write; default: report.html")
@json_option
def run_report(runs: Sequence[str], output: Path, is_json: bool) -> None:
    """Writes one HTML file about one or several runs.

    It shows metrics, throughput, where the time of every rank went, restarts, snapshots, the audit of the samples, and
    the configuration. The file needs no network. A run in progress is shown in its current state. Several runs are
    drawn into the same charts. RUN is a directory of a run, or of several runs.
    """
    problem = ""
    if output.is_symlink() or (output.exists() and not output.is_file()):
        problem = "is a link" if output.is_symlink() else "is not a file"
    elif output.suffix != ".html" and any((parent / RECORD).exists() for parent in output.absolute().parents):
        problem = "is in a run's directory, where only .html is written"
    if problem:
        raise Error(f"{output} {problem}: name another file with -o", code="SS113")
    named = [*dict.fromkeys(run for name in runs for run in [*map(str, find_runs(Path(name)))] or [name])]
    short = [run.rstrip("/").rpartition("/")[2] or run for run in named]
    found: list[RunData] = []
    for run, name in zip(named, short, strict=True):
        show_activity(f"reading {run} ...")
        with open_run(run) as (directory, record):
            found.append(read_run_data(directory, name if short.count(name) == 1 else run, record))
    page = build_page(found).encode()
    try:
        replace_file(output, page)
    except OSError as error:
        raise Error(
            f"{output} could not be written ({error.strerror}): name another file with -o", code="SS113"
        ) from None
    show_activity("")
    if is_json:
        print_json({"file": str(output), "size_bytes": len(page), "runs": [run.name for run in found]})
    else:
        print(escape(f"{output}: {format_count(len(found), 'run')}, {format_bytes(len(page))}"))


# --- what a report shows of a run -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunData:
    """What a report shows of one run.

    Attributes:
        name: the run's name in the report.
        record: the content of run.json.
        digest: of the newest sound snapshot; "" if there is none.
        metrics: name -> points.
        audit: the result of the audit of the samples, in words.
    """

    name: str
    record: Json
    status: Json
    is_live: bool
    num_steps: int
    snapshot_steps: Sequence[int]
    digest: str
    restarts: Sequence[Json]
    heals: Sequence[Json]
    metrics: Mapping[str, Points]
    audit: str

    @property
    def measured(self) -> Json:
        """The measurements from the last start on; {} if there are none yet."""
        return self.status.get("measured") or {}


def read_run_data(run_dir: Path, name: str, record: Json) -> RunData:
    """Read the data of a run, which may be running. Files that are damaged or missing count as empty."""
    status = read_status(run_dir)
    try:
        audit = summarize(*audit_samples(run_dir, record))
    except (Error, MemoryError, OverflowError, ValueError) as error:
        audit = f"the samples cannot be audited: {error}"
    snapshots = find_sound(run_dir)
    return RunData(
        name=name,
        record=record,
        status=status,
        is_live=status.get("status") == "running" and not has_ended(run_dir),
        num_steps=count_records(run_dir / LEDGER),
        snapshot_steps=[each.step for each in snapshots],
        digest=str(snapshots[-1].manifest.get("digest", "")) if snapshots else "",
        restarts=read_rows(run_dir / RESTARTS),
        heals=read_rows(run_dir / HEALS),
        metrics=_read_metrics(run_dir / METRICS),
        audit=audit,
    )


def _read_metrics(path: Path) -> dict[str, Points]:
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
                if value is None or type(value) is str:
                    value = NOT_FINITE.get(value)
                if name not in POSITION and (type(value) is float or type(value) is int):
                    steps, values = found.get(name) or found.setdefault(name, (array("d"), array("d")))
                    with suppress(OverflowError):  # an integer that no float holds
                        values.append(value)
                        steps.append(step)
    return {name: (np.array(steps), np.array(values)) for name, (steps, values) in found.items()}


# --- the page ---------------------------------------------------------------------------------------------------------


def build_page(runs: Sequence[RunData]) -> str:
    """Return the page, which has no links to other files."""
    assets = files("samestep.tools") / "report_assets"
    # Text of a run is escaped twice: its control characters, and by autoescape, so that it cannot act in the page.
    environment = Environment(autoescape=True, finalize=_escape_text, undefined=StrictUndefined, trim_blocks=True)
    environment.globals["asset"] = lambda name: Markup((assets / name).read_text())
    charts = _build_charts(runs)
    return environment.from_string((assets / "page.html").read_text()).render(
        title=", ".join(run.name for run in runs),
        names=[run.name for run in runs],
        about=f"samestep {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        summary=_build_summary(runs),
        charts=charts,
        times={run.name: run.measured.get("time_share", {}) for run in runs},
        histories={run.name: [*list_history(run.record, run.restarts, run.heals)] for run in runs},
        configuration=_build_configuration(runs),
        data={"charts": charts, "marks": [*_find_marks(runs)]},
    )


def _escape_text(value: Any) -> Any:
    return escape(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _build_summary(runs: Sequence[RunData]) -> ByRun:
    rows: dict[str, list[str]] = {}
    for number, run in enumerate(runs):
        state = "live: the run is being written" if run.is_live else run.status.get("status", "not begun")
        reason = run.status.get("reason")
        facts = {
            "state": f"{state}: {reason}" if reason else state,
            "steps": f"{run.num_steps:,}",
            "snapshots after steps": ", ".join(map(str, run.snapshot_steps[-5:])) or "none",
            "digest": run.digest,
            "restarts": str(len(run.restarts)),
            "heals": str(len(run.heals) or ""),
            "samples/s": f"{run.measured['samples_per_s']:,.0f}" if "samples_per_s" in run.measured else "",
            "samples": run.audit,
        }
        for name, (_, values) in run.metrics.items():
            finite = values[np.isfinite(values)]
            if finite.size:
                facts[name] = f"{values[-1]:.5g} (lowest {finite.min():.5g}, highest {finite.max():.5g})"
        for name, value in facts.items():
            rows.setdefault(name, [""] * len(runs))[number] = value
    return [(name, cells, False) for name, cells in rows.items() if any(cells)]


def _build_configuration(runs: Sequence[RunData]) -> ByRun:
    """Return the options of all runs. Those that differ are marked, and come first."""
    found = [list_facts(run.record) for run in runs]
    names = dict.fromkeys(name for each in found for name in each)
    rows = [(name, [each.get(name, "") for each in found]) for name in names]
    return sorted(((name, cells, len({*cells}) > 1) for name, cells in rows), key=lambda row: not row[2])


# --- charts, as data for the script of the page -----------------------------------------------------------------------


def _build_charts(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return a chart for all metrics with the same name after the last slash.

    A run has one colour in all charts; in the report of a single run, each curve of a chart has its own.
    """
    charts: dict[str, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs):
        for name, points in run.metrics.items():
            series = charts.setdefault(name.rpartition("/")[2], [])
            colour = COLOURS[(number if len(runs) > 1 else len(series)) % len(COLOURS)]
            x, y = decimate(*points, NUM_BUCKETS)
            label = f"{run.name}: {name}" if len(runs) > 1 else name
            # Six significant digits. JSON has no numbers that are not finite.
            values = [float(f"{value:.6g}") if math.isfinite(value) else None for value in y.tolist()]
            series.append({"label": label, "colour": colour, "x": x.tolist(), "y": values})
    return [{"title": title, "series": series} for title, series in charts.items()]


def _find_marks(runs: Sequence[RunData]) -> Iterator[dict[str, Any]]:
    """Yield a vertical line per restart and heal, and per snapshot of a single run. `kind` names which it is."""
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        for row in run.restarts:
            ranks = f" on {format_count(row['world_size'], 'rank')}" if type(row.get("world_size")) is int else ""
            step = row["from_step"]
            yield {"step": step, "kind": "restart", "label": f"{prefix}restart at {step}{ranks}"}
        for row in run.heals:
            lost = describe_ranks(row["lost"])
            yield {"step": row["step"], "kind": "heal", "label": f"{prefix}{lost} lost at {row['step']}"}
    if len(runs) == 1:
        for step in runs[0].snapshot_steps:
            yield {"step": step, "kind": "snapshot", "label": f"snapshot {step}"}


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
