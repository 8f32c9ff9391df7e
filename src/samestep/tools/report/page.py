"""Writes the HTML of a report: one file without links to others."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import numpy as np

from samestep.console import build_cells, list_values, to_text
from samestep.decoding import parse_json
from samestep.tools.compare import SECTIONS
from samestep.tools.report.charts import (
    HeatMap,
    build_heat_map,
    build_key,
    draw_svg,
    find_bands,
    find_marks,
    group_charts,
    to_html,
    to_json,
)
from samestep.tools.report.run_data import RunData
from samestep.version import __version__
from samestep.watch.records import HEAL_COLUMNS, RESTART_COLUMNS
from samestep.watch.stall_diagnosis import share_spent

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
FINDING = ("check", "status", "found", "advice")
FEW_ROWS = 16  # a longer table is folded


def build_page(
    runs: Sequence[RunData],
    comparison: Sequence[str],
    attachments: Mapping[str, str],
    scalings: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the page.

    Args:
        comparison: what each further run has in common with the first one, in a sentence.
        attachments: title -> text, such as the output of `samestep verify`.
        scalings: results of `samestep scale`.
    """
    charts = group_charts(runs)
    marks = find_marks(runs)
    bands = find_bands(runs)
    maps = {run.name: heat for run in runs if (heat := build_heat_map(run.timeline)) is not None}
    data = {
        "charts": [to_json(chart) for chart in charts],
        "marks": [mark.__dict__ for mark in marks],
        "bands": [band.__dict__ for band in bands],
        "maps": [each.to_json() for each in maps.values()],
    }
    figures = "".join(
        f'<figure class="chart"><figcaption>{to_html(chart.title)}</figcaption>{draw_svg(chart, marks, bands)}'
        f'<ul class="key">{"".join(build_key(chart))}</ul></figure>'
        for chart in charts
    )
    body = [
        f"<header><h1>{to_html(', '.join(run.name for run in runs))}</h1>",
        f"<p>samestep {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC</p></header><main>",
        _section("Summary", _build_summary(runs) + "".join(f"<p>{to_html(each)}</p>" for each in comparison)),
        _section("Metrics", figures or "<p>No metrics were logged.</p>"),
        _section("Where the time goes", "".join(_build_times(runs, maps))),
        _section("Scaling", "".join(_build_scaling(scalings))),
        _section("Restarts and heals", "".join(_build_restarts(runs))),
        _section("Configuration", _build_configuration(runs)),
        *(_section(title, _build_attachment(text)) for title, text in attachments.items()),
        _section("Last lines of failed ranks", "".join(_build_logs(runs))),
        "</main>",
    ]
    assets = files("samestep.tools.report") / "assets"
    names = ("uPlot.min.css", "page.css", "uPlot-LICENSE", "uPlot.iife.min.js", "page.js")
    text = {name: (assets / name).read_text() for name in names}
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{to_html(", ".join(run.name for run in runs))}</title>'
        f"<style>{text['uPlot.min.css']}{text['page.css']}</style></head><body>{''.join(body)}"
        f'<script type="application/json" id="data">{_to_script(data)}</script>'
        f"<script>/*! uPlot\n{text['uPlot-LICENSE']}*/{text['uPlot.iife.min.js']}</script>"
        f"<script>{text['page.js']}</script></body></html>\n"
    )


def _to_script(value: Any) -> str:
    """Return JSON that cannot end a script element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _section(title: str, content: str) -> str:
    return f"<section><h2>{to_html(title)}</h2>{content}</section>" if content else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, marked: Sequence[bool] = ()) -> str:
    """Return a table. The first cell of a row is its header; `marked` rows are highlighted."""
    head = "".join(f'<th scope="col">{to_html(cell)}</th>' for cell in header)
    lines = []
    for number, (first, *cells) in enumerate(rows):
        kind = ' class="differs"' if number < len(marked) and marked[number] else ""
        content = "".join(f"<td>{to_html(cell)}</td>" for cell in cells)
        lines.append(f'<tr{kind}><th scope="row">{to_html(first)}</th>{content}</tr>')
    return (
        f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
        if rows
        else ""
    )


def _fold(title: str, content: str, *, is_open: bool) -> str:
    return f"<details{' open' if is_open else ''}><summary>{to_html(title)}</summary>{content}</details>"


def _build_summary(runs: Sequence[RunData]) -> str:
    rows: dict[str, list[str]] = {}
    for number, run in enumerate(runs):
        measured = run.status.get("measured") or {}
        state = "live: the run is being written" if run.is_live else run.status.get("status", "not begun")
        reason = run.status.get("reason")
        facts = {
            "state": f"{state}: {reason}" if reason else state,
            "steps": f"{run.num_steps:,}",
            "newest snapshots": _name_steps([each["step"] for each in run.snapshots[-5:]]),
            "digest": run.digest,
            "restarts": str(len(run.restarts)),
            "heals": str(num_heals) if (num_heals := sum(bool(row["lost"]) for row in run.heals)) else "",
            "samples/s": f"{measured['samples_per_s']:,.0f}" if "samples_per_s" in measured else "",
            "samples": run.audit,
        }
        for name, points in run.metrics.items():
            finite = points.values[np.isfinite(points.values)]
            if finite.size:
                facts[name] = f"{finite[-1]:.5g} (lowest {finite.min():.5g}, highest {finite.max():.5g})"
        for name, value in facts.items():
            rows.setdefault(name, [""] * len(runs))[number] = value
    return _table(["", *(run.name for run in runs)], [[name, *cells] for name, cells in rows.items() if any(cells)])


def _name_steps(steps: Sequence[int]) -> str:
    """Name steps, such as "of steps 20 and 40"."""
    if not steps:
        return "none"
    if len(steps) == 1:
        return f"of step {steps[0]}"
    *first, last = map(str, steps)
    return f"of steps {', '.join(first)} and {last}"


def _build_scaling(scalings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not scalings:
        return
    from samestep.tools.scale.tables import build_predictions, build_rows

    for result in scalings:
        yield f"<p>{to_html(str(result['script']))}: {to_html(str(result['recommendation']))}</p>"
        for kind in ("strong", "weak"):
            if kind in result:
                yield f"<h3>{kind} scaling</h3>{_table(*build_rows(result[kind]['sizes']))}"
                yield _table(*build_predictions(result[kind].get("predictions", [])))


def _build_times(runs: Sequence[RunData], maps: Mapping[str, HeatMap]) -> Iterator[str]:
    for run in runs:
        shares = share_spent(run.spent_s) or (run.status.get("measured") or {}).get("time_share") or {}
        parts = [
            (number, f"{to_html(name)} {100 * share:.1f} %", share)
            for number, (name, share) in enumerate(shares.items())
            if share >= 0.0005
        ]
        if parts:
            words = ", ".join(text for _, text, _ in parts)
            bars = "".join(f'<span class="part part{n}" style="flex-grow:{share:.4f}"></span>' for n, _, share in parts)
            keys = "".join(f'<li class="part{n}">{text}</li>' for n, text, _ in parts)
            yield (
                f'<figure><figcaption>{to_html(run.name)}: time of all ranks</figcaption><div class="bar" role="img" '
                f'aria-label="{words}">{bars}</div><ul class="key">{keys}</ul></figure>'
            )
        if run.name in maps:
            yield _build_map(run.name, maps[run.name], list(maps).index(run.name))


def _build_map(name: str, heat: HeatMap, number: int) -> str:
    """Return a heat map with a table of the ranks' means."""
    means = np.nan_to_num(heat.means)
    low, high = heat.scale
    words = (
        f"steps {heat.edges[0]:g} to {heat.edges[-1]:g} across, ranks 0 to {len(means) - 1} down, from {low:.3g} ms "
        f"(dark) to {high:.3g} ms (bright)"
    )
    if (slowest := heat.slowest) is not None:
        words += f"; rank {slowest} takes longest, {means[slowest]:.3g} ms on average"
    elif len(means) > 1:
        words += "; no rank takes longer than the others by more than the noise"
    table = _table(("rank", "ms per step"), [(str(rank), f"{mean:.3g}") for rank, mean in enumerate(means)])
    height = min(max(len(means) * 14, 28), 480)
    return (
        f'<figure class="map" data-number="{number}"><figcaption>{to_html(name)}: milliseconds per step in which a '
        f'rank waits for no other</figcaption><img src="{heat.image}" alt="{to_html(words)}" style="height:{height}px">'
        f'<p class="note">{to_html(words)}</p></figure>' + _fold("mean of every rank", table, is_open=False)
    )


def _build_restarts(runs: Sequence[RunData]) -> Iterator[str]:
    for run in runs:
        restarts = build_cells(run.restarts, RESTART_COLUMNS)
        heals = build_cells(run.heals, HEAL_COLUMNS)
        changes = [(str(each["after_step"]), each["changed"]) for each in run.record.get("changes") or []]
        content = _table(RESTART_COLUMNS, restarts) + _table(HEAL_COLUMNS, heals)
        content += _table(("after step", "changed"), changes)
        if content:
            yield _fold(run.name, content, is_open=len(restarts) + len(heals) <= FEW_ROWS)


def _build_configuration(runs: Sequence[RunData]) -> str:
    values = [
        {f"{section}.{name}": text for section in SECTIONS for name, text in list_values(run.record.get(section) or {})}
        for run in runs
    ]
    versions = [{"samestep": to_text(run.record.get("samestep", ""))} for run in runs]
    found = [first | second for first, second in zip(versions, values, strict=True)]
    names = dict.fromkeys(name for each in found for name in each)
    rows = [[name, *(each.get(name, "") for each in found)] for name in names]
    differs = [len(set(cells)) > 1 for _, *cells in rows]
    order = sorted(range(len(rows)), key=lambda number: not differs[number])
    table = _table(
        ["", *(run.name for run in runs)],
        [rows[number] for number in order],
        marked=[differs[number] for number in order],
    )
    title = f"{sum(differs)} of {len(rows)} values differ" if len(runs) > 1 else f"{len(rows)} values"
    note = (
        "<p class=note>The bits of a run depend on <code>numbers</code>, <code>machine</code> and the script. They do "
        "not depend on the number of ranks.</p>"
    )
    return _fold(title, table, is_open=len(runs) > 1) + note


def _build_attachment(text: str) -> str:
    """Return the findings of `samestep doctor --json` as a table, any other text as it is."""
    with suppress(ValueError, KeyError, TypeError):
        findings = parse_json(text)["findings"]
        rows = [[to_text(each[name]) for name in FINDING] for each in findings]
        return _table(("check", "result", "found", "advice"), rows, marked=[row[1] != "pass" for row in rows])
    return f"<pre>{to_html(text)}</pre>"


def _build_logs(runs: Sequence[RunData]) -> Iterator[str]:
    for run in runs:
        for title, text in run.logs:
            yield _fold(f"{run.name}: {title}", f"<pre>{to_html(text)}</pre>", is_open=True)
