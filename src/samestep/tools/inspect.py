"""`samestep inspect`: shows and checks a run's directory. Does not import torch."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.console import describe_age, describe_size, escape, list_values, print_table, say, to_text
from samestep.errors import Error
from samestep.snapshot.manifest import find_damage
from samestep.snapshot.object_store import open_run, read_run
from samestep.snapshot.store import Snapshot, Store
from samestep.tools.audit import show_samples
from samestep.tools.compare import compare_runs, find_runs, list_runs, read_last_values, read_state
from samestep.watch.records import RESTARTS, STATUS, read_or_empty, read_rows

_RESTART = ("time", "reason", "rank", "from_step", "lost_steps", "world_size")


def run_inspect(args: list[str]) -> int:
    """Runs the command with the arguments after its name. Returns the exit code: 1 if an audit or a check failed.

    Raises:
        Error: there is no run, or it lacks what was asked for.
    """
    options = _build_parser().parse_args(args)
    if options.other is not None:
        return compare_runs(options.run, options.other, is_json=options.json)
    if found := find_runs(Path(options.run)):
        return list_runs(found, is_json=options.json)
    options.called = options.run
    with open_run(options.run, which=options.step if options.digest else None, is_whole=options.check) as options.run:
        record = read_run(options.run, options.called)
        if options.digest:
            return _show_digest(options)
        if options.samples:
            try:
                return show_samples(options, record)
            except (MemoryError, OverflowError, ValueError) as error:
                why = f"{type(error).__name__}: {error}"
                raise Error(f"{options.called}/run.json has numbers that no run has ({why}): repair it") from None
        return _show_run(options, record)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="samestep inspect", description="Shows what a run's directory holds: numbers, snapshots, samples."
    )
    parser.add_argument("run", metavar="RUN", help="the run's directory, or its URL; a directory of runs: lists them")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="a second run, to compare with (exit 1: they differ)")
    parser.add_argument(
        "--snapshot", "--step", dest="step", metavar="STEP|NAME", default="latest", type=parse_which,
        help="of this snapshot only",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="read every byte of every snapshot, not only their sizes")
    parser.add_argument("--json", action="store_true", help="JSON for programs")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--digest", action="store_true", help="the sha256 of the state in the newest sound snapshot")
    what.add_argument(
        "--samples",
        action="store_true",
        help="the samples that each step used, and an audit of them (exit 1: it failed)",
    )
    return parser


def parse_which(text: str) -> int | str:
    """A snapshot as the user names it: a step, a name, or "latest"."""
    return int(text) if text.isdecimal() else text


# --- the digest ---------------------------------------------------------------------------------------------------


def _show_digest(options: argparse.Namespace) -> int:
    snapshot = Store(options.run).find(options.step, warn=say)
    if snapshot is None:
        raise Error(f"{options.called} has no snapshot yet")
    digest = snapshot.manifest["digest"]
    if options.json:
        print(json.dumps({"step": snapshot.step, "name": snapshot.name, "digest": digest}))
    else:
        print(digest)
    return 0


# --- the run ------------------------------------------------------------------------------------------------------


def _show_run(options: argparse.Namespace, record: Mapping[str, Any]) -> int:
    wanted = [
        snapshot for snapshot in Store(options.run).snapshots()
        if options.step == "latest" or options.step in (snapshot.name, snapshot.step)
    ]  # fmt: skip
    if options.step != "latest" and not wanted:
        raise Error(f"{options.called} has no snapshot {options.step}: leave out --snapshot to see what it has")
    snapshots = [_describe(snapshot, options.called, check=options.check) for snapshot in wanted]
    code = 1 if options.check and any(snapshot["problem"] for snapshot in snapshots) else 0
    metrics, restarts = read_last_values(options.run), read_rows(options.run / RESTARTS)
    status, state = read_or_empty(options.run / STATUS), read_state(options.run)
    if options.json:
        shown: dict[str, Any] = {"run": record, "snapshots": snapshots, "restarts": restarts, "metrics": metrics}
        shown |= {"state": state, "status": status, "lost": status.get("lost"), "checked": options.check}
        print(json.dumps(shown, indent=1))
        return code
    print(escape(f"run {options.called}, samestep {record.get('samestep')}"))
    for section in ("numbers", "machine", "config"):
        if record.get(section):
            print_table(section, ("name", "value"), list_values(record[section]))
    for number, loop in enumerate(record.get("loops", []), start=2):
        print_table(f"loop {number}", ("name", "value"), list_values(loop))
    if settings := record.get("settings"):
        asked = record.get("asked", {})
        values = [(name, to_text(value), to_text(asked.get(name, value))) for name, value in settings.items()]
        title = "settings of optimizers and schedules, before any schedule changed them"
        print_table(title, ("name", "in force", "in the script"), values)
    if changes := record.get("changes"):
        changed = [(str(change["after_step"]), change["changed"]) for change in changes]
        print_table("changes of machine, config and settings", ("after step", "changed"), changed)
    rows = [
        (str(s["step"]) if s["step"] >= 0 else "?", s["name"] or "", describe_size(s["size_bytes"]),
         describe_age(s["time"]), s["problem"] or ("sound" if options.check else "whole"))
        for s in snapshots
    ]  # fmt: skip
    title = "snapshots" if options.check else "snapshots, by their sizes (--check reads them)"
    print_table(title, ("step", "name", "size", "age", "state"), rows or [("none", "", "", "", "")])
    if restarts:
        print_table("restarts", _RESTART, [[_format_cell(row.get(key)) for key in _RESTART] for row in restarts])
    if state:
        print_table("run.state, in the newest snapshot", ("name", "value"), list_values(state))
    if metrics:
        values = [(name, to_text(last["value"]), str(last["step"])) for name, last in metrics.items()]
        print_table("last metrics", ("name", "value", "step"), values)
    if measured := status.get("measured"):
        print_table("measured, from the last start on", ("name", "value"), list_values(measured))
    if status.get("lost"):
        print(escape(f"when the run ended, {status['lost']}"))
    return code


def _describe(snapshot: Snapshot, run: str, *, check: bool) -> dict[str, Any]:
    """A snapshot as JSON. `check`: read every byte of it."""
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


def _format_cell(value: Any) -> str:
    return "" if value is None else str(value)
