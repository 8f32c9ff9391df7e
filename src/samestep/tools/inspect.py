"""`samestep inspect` and `diff`: show, check and compare run directories. Do not import torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from samestep.command_line import Command
from samestep.console import (
    build_cells,
    describe_age,
    describe_size,
    escape,
    format_count,
    list_values,
    print_table,
    to_text,
)
from samestep.errors import Error
from samestep.snapshot.manifest import find_damage
from samestep.snapshot.reading import find_snapshot, open_run, read_run
from samestep.snapshot.store import Snapshot, Store
from samestep.tools.compare import compare_runs, describe_runs, find_runs, list_runs, read_last_values, read_state
from samestep.watch.records import HEAL_COLUMNS, HEALS, RESTART_COLUMNS, RESTARTS, read_rows, read_status


def parse_which(ctx: click.Context, param: click.Parameter, text: str) -> int | str:
    """Return the step of a snapshot as a number, and its name, such as "latest", as it is. A callback of an option."""
    return int(text) if text.isdecimal() else text


WHICH: dict[str, Any] = {"metavar": "STEP|NAME", "callback": parse_which}  # settings of an option that names a snapshot


@click.command("inspect", cls=Command)
@click.argument("run", type=click.Path())
@click.argument("other", type=click.Path(), required=False)
@click.option("--snapshot", "--step", "which", **WHICH, default="latest", help="show only this snapshot")
@click.option("--check", is_flag=True, help="read every byte of every snapshot, not only their sizes")
@click.option("--json", "is_json", is_flag=True, help="print JSON")
@click.option("--digest", is_flag=True, help="print the SHA-256 of the state in the newest undamaged snapshot")
@click.option("--samples", is_flag=True, help="show and check the samples of each step (exit code 1 if that fails)")
def run_inspect(
    run: str, other: str | None, which: int | str, check: bool, is_json: bool, digest: bool, samples: bool
) -> int:
    """Shows the content of a run directory: options, settings, snapshots, restarts, heals, metrics.

    RUN is a run directory or its URL, or a directory of runs, to list them. OTHER is a second run to compare with (exit
    code 1 if they differ).
    """
    if digest and samples:
        raise Error("--digest and --samples were both given: leave out one of them", code="SS104")
    if other is not None:
        return compare_runs(run, other, is_json=is_json)
    if found := find_runs(Path(run)):
        return list_runs(describe_runs(found), is_json=is_json)
    with open_run(run, which=which if digest else None, is_whole=check) as directory:
        record = read_run(directory, run)
        if digest:
            store = Store(directory)
            return _show_digest(store, find_snapshot(store, run, which), is_json=is_json)
        if samples:
            from samestep.tools.audit import show_samples

            try:
                return show_samples(directory, record, which=which, is_json=is_json)
            except (MemoryError, OverflowError, ValueError) as error:
                why = f"{type(error).__name__}: {error}"
                raise Error(f"{run}/run.json has impossible numbers ({why}): repair it", code="SS408") from None
        return _show_run(directory, run, record, which, is_checked=check, is_json=is_json)


@click.command("diff", cls=Command)
@click.argument("run", type=click.Path())
@click.argument("other", type=click.Path())
@click.option("--json", "is_json", is_flag=True, help="print JSON")
def run_diff(run: str, other: str, is_json: bool) -> int:
    """Shows the first step in which two runs differ, and what differs there: samples, loss, gradient or state.

    Exit code: 0 if all common steps and snapshots are the same; 1 if not; 2 if nothing can be compared.
    """
    return compare_runs(run, other, is_json=is_json)


def _show_digest(store: Store, snapshot: Snapshot, *, is_json: bool) -> int:
    digest = store.read_digest(snapshot)
    if is_json:
        print(json.dumps({"step": snapshot.step, "name": snapshot.name, "digest": digest}))
    else:
        print(digest)
    return 0


def _show_run(
    directory: Path, run: str, record: Mapping[str, Any], which: int | str, *, is_checked: bool, is_json: bool
) -> int:
    found = Store(directory).snapshots()
    wanted = [snapshot for snapshot in found if snapshot.matches(which)]
    if which != "latest" and not wanted:
        names = ", ".join(str(snapshot.step if snapshot.name is None else snapshot.name) for snapshot in found)
        raise Error(f"{run} has no snapshot {which}: name one that it has ({names or 'none yet'})", code="SS411")
    snapshots = [_describe(snapshot, run, check=is_checked) for snapshot in wanted]
    status = read_status(directory)
    shown = {
        "run": record,
        "snapshots": snapshots,
        "restarts": read_rows(directory / RESTARTS),
        "heals": read_rows(directory / HEALS),
        "metrics": read_last_values(directory),
        "state": read_state(directory),
        "status": status,
        "lost": status.get("lost"),
        "checked": is_checked,
    }
    if is_json:
        print(json.dumps(shown, indent=1))
    else:
        print(escape(f"run {run}, samestep {record.get('samestep')}"))
        for title, header, rows in _build_tables(shown):
            if rows:
                print_table(title, header, rows)
        if status.get("lost"):
            print(escape(f"when the run ended, {status['lost']}"))
        if is_checked:
            print(escape(_conclude(snapshots)))
    return 1 if is_checked and any(snapshot["problem"] for snapshot in snapshots) else 0


def _conclude(snapshots: Sequence[Mapping[str, Any]]) -> str:
    """Return the result of a check of snapshots in one line."""
    damaged = [f"{each['path']}: {each['problem']}" for each in snapshots if each["problem"]]
    count = format_count(len(snapshots), "snapshot")
    if damaged:
        return (
            f"the check failed: {len(damaged)} of {count} {'is' if len(damaged) == 1 else 'are'} damaged ({damaged[0]})"
        )
    return f"the check passed: {count} read, and sound" if snapshots else "nothing was checked: there is no snapshot"


def _build_tables(shown: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    """Yield title, header and rows of each table. Some tables have no rows."""
    record = shown["run"]
    named = ("name", "value")
    ended = {name: shown["status"].get(name) for name in ("status", "reason", "time", "host")}
    yield "status", named, [(name, str(value)) for name, value in ended.items() if value]
    for section in ("numbers", "machine", "git", "config"):
        yield section, named, list_values(record.get(section) or {})
    for number, loop in enumerate(record.get("loops", []), start=2):
        yield f"loop {number}", named, list_values(loop)
    settings = record.get("settings") or {}
    asked = record.get("asked", {})
    yield (
        "settings of optimizers and schedules, before any schedule changed them",
        ("name", "in force", "in the script"),
        [(name, to_text(value), to_text(asked.get(name, value))) for name, value in settings.items()],
    )
    changes = [(str(change["after_step"]), change["changed"]) for change in record.get("changes") or []]
    yield "changes of machine, config and settings", ("after step", "changed"), changes
    rows = [
        (
            str(s["step"]) if s["step"] >= 0 else "?",
            s["name"] or "",
            describe_size(s["size_bytes"]),
            describe_age(s["time"]),
            s["problem"] or ("sound" if shown["checked"] else "whole"),
        )
        for s in shown["snapshots"]
    ]
    title = "snapshots" if shown["checked"] else "snapshots, by their sizes (--check reads them)"
    yield title, ("step", "name", "size", "age", "state"), rows or [("none", "", "", "", "")]
    for title, columns in (("restarts", RESTART_COLUMNS), ("heals", HEAL_COLUMNS)):
        yield title, columns, build_cells(shown[title], columns)
    yield "run.state, in the newest snapshot", named, list_values(shown["state"])
    last = [(name, to_text(last["value"]), str(last["step"])) for name, last in shown["metrics"].items()]
    yield "last metrics", ("name", "value", "step"), last
    yield "measured, from the last start on", named, list_values(shown["status"].get("measured") or {})


def _describe(snapshot: Snapshot, run: str, *, check: bool) -> dict[str, Any]:
    """Return a snapshot as JSON. `check`: whether to read every byte of it."""
    problem = snapshot.problem
    if problem is None and check:
        problem = find_damage(snapshot.path, snapshot.manifest)
    return {
        "step": snapshot.step,
        "name": snapshot.name,
        "path": f"{run.rstrip('/')}/snapshots/{snapshot.path.name}",
        "size_bytes": snapshot.size_bytes,
        "time": snapshot.manifest.get("time"),
        "digest": snapshot.manifest.get("digest"),
        "versions": snapshot.manifest.get("versions"),
        "meta": snapshot.manifest.get("meta"),
        "problem": problem,
    }
