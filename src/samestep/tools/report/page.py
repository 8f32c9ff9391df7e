"""Fills the template of a report: one HTML file without links to others."""

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from samestep.console import build_cells, escape, list_values, to_text
from samestep.tools.inspect import SECTIONS
from samestep.tools.report.charts import build_charts, find_marks
from samestep.tools.report.run_data import RunData
from samestep.version import __version__
from samestep.watch.records import HEAL_COLUMNS, RESTART_COLUMNS


def build_page(runs: Sequence[RunData], comparison: Sequence[str]) -> str:
    """Return the page.

    Args:
        comparison: what each further run has in common with the first one, in a sentence.
    """
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
        comparison=comparison,
        charts=charts,
        times={run.name: _share_time(run) for run in runs},
        restarts={run.name: _build_restarts(run) for run in runs},
        configuration=_build_configuration(runs),
        logs=[(f"{run.name}: {title}", text) for run in runs for title, text in run.logs],
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
    changes = [(str(each["after_step"]), each["changed"]) for each in run.record.get("changes") or []]
    tables: list[tuple[Sequence[str], Sequence[Sequence[str]]]] = [
        (RESTART_COLUMNS, build_cells(run.restarts, RESTART_COLUMNS)),
        (HEAL_COLUMNS, build_cells(run.heals, HEAL_COLUMNS)),
        (("after step", "changed"), changes),
    ]
    return [(header, rows) for header, rows in tables if rows]


def _build_configuration(runs: Sequence[RunData]) -> list[tuple[str, list[str], bool]]:
    """Return name, value in each run, and whether these differ. Those that differ come first."""
    found = [
        {"samestep": to_text(run.record.get("samestep", ""))}
        | {f"{part}.{name}": text for part in SECTIONS for name, text in list_values(run.record.get(part) or {})}
        for run in runs
    ]
    rows = [(name, [each.get(name, "") for each in found]) for name in dict.fromkeys(n for each in found for n in each)]
    return sorted(((name, cells, len({*cells}) > 1) for name, cells in rows), key=lambda row: not row[2])
