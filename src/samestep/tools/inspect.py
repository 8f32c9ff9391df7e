"""`samestep inspect` and `diff`: show, check and compare run directories. Do not import torch."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from samestep.console import describe_age, describe_size, escape, format_count, list_values, print_table, to_text
from samestep.errors import Error
from samestep.snapshot.manifest import find_damage
from samestep.snapshot.reading import find_snapshot, open_run, read_run
from samestep.snapshot.store import Snapshot, Store
from samestep.tools.audit import show_samples
from samestep.tools.compare import compare_runs, describe_runs, find_runs, list_runs, read_last_values, read_state
from samestep.watch.records import RESTARTS, read_rows, read_status

_RESTART = ("time", "reason", "rank", "from_step", "lost_steps", "world_size")


def run_inspect(args: list[str]) -> int:
    """Run the command with the arguments after its name. Returns the exit code: 1 if an audit or a check failed.

    Raises:
        Error: there is no run, or it has no such snapshot.
    """
    options = _build_parser().parse_args(args)
    if options.other is not None:
        return compare_runs(options.run, options.other, is_json=options.json)
    if found := find_runs(Path(options.run)):
        return list_runs(describe_runs(found), is_json=options.json)
    which = options.step if options.digest else None
    with open_run(options.run, which=which, is_whole=options.check) as directory:
        record = read_run(directory, options.run)
        if options.digest:
            return _show_digest(directory, options)
        if options.samples:
            try:
                return show_samples(directory, record, which=options.step, is_json=options.json)
            except (MemoryError, OverflowError, ValueError) as error:
                why = f"{type(error).__name__}: {error}"
                raise Error(f"{options.run}/run.json has impossible numbers ({why}): repair it") from None
        return _show_run(directory, options, record)


def run_diff(arguments: Sequence[str]) -> int:
    """Run `samestep diff` with the arguments after its name. Returns the exit code, see `compare_runs`."""
    parser = CommandParser(
        prog="samestep diff",
        description="Shows the first step in which two runs differ, and what differs there: samples, loss, gradient or "
        "state.",
        epilog="Exit code: 0 if all common steps and snapshots are the same; 1 if not; 2 if nothing can be compared.",
    )
    parser.add_argument("one", metavar="RUN", help="a run's directory, or its URL")
    parser.add_argument("other", metavar="OTHER", help="another run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    return compare_runs(options.one, options.other, is_json=options.json)


class CommandParser(argparse.ArgumentParser):
    """A parser that raises Error, in one sentence, for invalid arguments."""

    def error(self, message: str) -> NoReturn:
        """Raise Error."""
        raise Error(f"{self.prog}: {message}; see {self.prog} --help")


def _build_parser() -> CommandParser:
    parser = CommandParser(
        prog="samestep inspect",
        description="Shows the content of a run directory: options, settings, snapshots, restarts, metrics.",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory or its URL; or a directory of runs, to list them")
    parser.add_argument(
        "other", metavar="OTHER", nargs="?", help="a second run to compare with (exit code 1 if they differ)"
    )
    parser.add_argument(
        "--snapshot", "--step", dest="step", metavar="STEP|NAME", default="latest", type=parse_which,
        help="show only this snapshot",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="read every byte of every snapshot, not only their sizes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--digest", action="store_true", help="print the SHA-256 of the state in the newest undamaged snapshot"
    )
    what.add_argument(
        "--samples",
        action="store_true",
        help="show the samples that each step used, and check them (exit code 1 if that fails)",
    )
    return parser


def parse_which(text: str) -> int | str:
    """Parse a snapshot's step, name, or "latest"."""
    return int(text) if text.isdecimal() else text


def _show_digest(directory: Path, options: argparse.Namespace) -> int:
    snapshot = find_snapshot(Store(directory), options.run, options.step)
    digest = snapshot.manifest["digest"]
    if options.json:
        print(json.dumps({"step": snapshot.step, "name": snapshot.name, "digest": digest}))
    else:
        print(digest)
    return 0


def _show_run(directory: Path, options: argparse.Namespace, record: Mapping[str, Any]) -> int:
    wanted = [
        snapshot for snapshot in Store(directory).snapshots()
        if options.step == "latest" or options.step in (snapshot.name, snapshot.step)
    ]  # fmt: skip
    if options.step != "latest" and not wanted:
        raise Error(f"{options.run} has no snapshot {options.step}: leave out --snapshot to see what it has")
    snapshots = [_describe(snapshot, options.run, check=options.check) for snapshot in wanted]
    status = read_status(directory)
    shown = {
        "run": record,
        "snapshots": snapshots,
        "restarts": read_rows(directory / RESTARTS),
        "metrics": read_last_values(directory),
        "state": read_state(directory),
        "status": status,
        "lost": status.get("lost"),
        "checked": options.check,
    }
    if options.json:
        print(json.dumps(shown, indent=1))
    else:
        print(escape(f"run {options.run}, samestep {record.get('samestep')}"))
        for title, header, rows in _build_tables(shown):
            if rows:
                print_table(title, header, rows)
        if status.get("lost"):
            print(escape(f"when the run ended, {status['lost']}"))
        if options.check:
            print(escape(_conclude(snapshots)))
    return 1 if options.check and any(snapshot["problem"] for snapshot in snapshots) else 0


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
    settings, asked = record.get("settings") or {}, record.get("asked", {})
    yield (
        "settings of optimizers and schedules, before any schedule changed them",
        ("name", "in force", "in the script"),
        [(name, to_text(value), to_text(asked.get(name, value))) for name, value in settings.items()],
    )
    changes = [(str(change["after_step"]), change["changed"]) for change in record.get("changes") or []]
    yield "changes of machine, config and settings", ("after step", "changed"), changes
    rows = [
        (str(s["step"]) if s["step"] >= 0 else "?", s["name"] or "", describe_size(s["size_bytes"]),
         describe_age(s["time"]), s["problem"] or ("sound" if shown["checked"] else "whole"))
        for s in shown["snapshots"]
    ]  # fmt: skip
    title = "snapshots" if shown["checked"] else "snapshots, by their sizes (--check reads them)"
    yield title, ("step", "name", "size", "age", "state"), rows or [("none", "", "", "", "")]
    cells = [["" if row.get(key) is None else str(row[key]) for key in _RESTART] for row in shown["restarts"]]
    yield "restarts", _RESTART, cells
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
