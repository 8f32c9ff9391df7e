"""`samestep inspect`, `watch`, `diff` and `runs`: show one run directory or its live ranks, compare two, list many.

They do not import torch.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from msgspec.structs import asdict

from samestep.cli import PATH, Command, json_option, print_json
from samestep.console import (
    build_cells,
    escape,
    format_age,
    format_bytes,
    format_count,
    format_time,
    list_values,
    print_table,
    say,
    to_text,
)
from samestep.decoding import Json, parse_json
from samestep.errors import Error, explain
from samestep.files import read_bytes
from samestep.plan.ledger import Entry, to_float
from samestep.snapshot.logs import count_records, read_records
from samestep.snapshot.manifest import STATE, Snapshot, find_damage
from samestep.snapshot.run_record import find_snapshot, open_run, read_run
from samestep.snapshot.store import Store
from samestep.watch.beats import Beat
from samestep.watch.records import (
    HEAL_COLUMNS,
    HEALS,
    LEDGER,
    METRICS,
    RECORD,
    RESTART_COLUMNS,
    RESTARTS,
    STALE_S,
    STATUS,
    RankStates,
    has_ended,
    read_or_empty,
    read_ranks,
    read_rows,
    read_status,
)

SHORT = 12  # of a digest's 64 digits
RUN_COLUMNS = ("name", "status", "steps", "digest", "best", "age", "last metrics")
SECTIONS = ("numbers", "settings", "config", "script", "git", "machine")  # of run.json, the most important first
POSITION = ("step", "epoch")  # entries of a row that are not metrics

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, header and rows


def parse_which(text: str) -> int | str:
    """Return the step of a snapshot as a number, and its name, such as "latest", as it is."""
    return int(text) if text.isdecimal() else text


WHICH: dict[str, Any] = {"metavar": "STEP|NAME", "type": parse_which}  # settings of an option that names a snapshot


# --- one run ----------------------------------------------------------------------------------------------------------


@click.command("inspect", cls=Command)
@click.argument("run", type=click.Path())
@click.option("--snapshot", "which", **WHICH, default="latest", help="show only this snapshot")
@click.option("--check", is_flag=True, help="read every byte of every snapshot, not only their sizes")
@json_option
@click.option("--digest", is_flag=True, help="print the SHA-256 of the state in the newest undamaged snapshot")
@click.option("--samples", is_flag=True, help="show and check the samples of each step (exit code 1 if that fails)")
def run_inspect(run: str, which: int | str, check: bool, is_json: bool, digest: bool, samples: bool) -> int:
    """Shows the content of a run directory: settings, snapshots, restarts, heals, metrics."""
    if digest and samples:
        raise Error("--digest and --samples were both given: leave out one of them", code="SS104")
    if samples and which != "latest":
        raise Error("--samples shows steps, not snapshots: leave out --snapshot", code="SS104")
    with open_run(run) as (directory, record):
        if samples:
            from samestep.tools.audit import show_samples

            try:
                return show_samples(directory, record, is_json=is_json)
            except (MemoryError, OverflowError, ValueError) as error:
                raise Error(
                    f"{run}/run.json has impossible numbers ({type(error).__name__}: {error}): repair it", code="SS408"
                ) from None
        store = Store(directory)
        if not digest:
            return _show_run(directory, run, record, _choose(store, run, which), is_checked=check, is_json=is_json)
        snapshot = find_snapshot(store, run, which)
        found = {"step": snapshot.step, "name": snapshot.name, "digest": store.read_digest(snapshot)}
    if is_json:
        print_json(found)
    else:
        print(found["digest"])
    return 0


def _choose(store: Store, run: str, which: int | str) -> list[Snapshot]:
    """Return the snapshots to show. Raises Error if there is none of this name or step."""
    found = store.snapshots()
    wanted = [snapshot for snapshot in found if snapshot.matches(which)]
    if which != "latest" and not wanted:
        names = ", ".join(str(snapshot.step if snapshot.name is None else snapshot.name) for snapshot in found)
        raise Error(f"{run} has no snapshot {which}: name one that it has ({names or 'none yet'})", code="SS411")
    return wanted


def _show_run(
    directory: Path, run: str, record: Json, wanted: Sequence[Snapshot], *, is_checked: bool, is_json: bool
) -> int:
    snapshots = [_describe_snapshot(snapshot, run, check=is_checked) for snapshot in wanted]
    shown: dict[str, Any] = {
        "run": record,
        "snapshots": snapshots,
        "restarts": read_rows(directory / RESTARTS),
        "heals": read_rows(directory / HEALS),
        "metrics": read_last_values(directory),
        "state": _read_state(directory),
        "status": read_status(directory),
        "checked": is_checked,
    }
    damaged = [f"{each['path']}: {each['problem']}" for each in snapshots if each["problem"]]
    code = int(is_checked and bool(damaged))
    if is_json:
        print_json(shown)
        return code
    print(escape(f"run {run}, samestep {record.get('samestep')}"))
    for title, header, rows in _build_tables(shown):
        if rows:
            print_table(title, header, rows)
    if lost := shown["status"].get("lost"):
        print(escape(f"when the run ended, {lost}"))
    count = format_count(len(snapshots), "snapshot")
    if code:
        print(escape(f"the check failed: {len(damaged)} of {count} damaged ({damaged[0]})"))
    elif is_checked:
        print(f"the check passed: {count} read, and sound" if snapshots else "nothing was checked: no snapshot")
    return code


def _build_tables(shown: Json) -> Iterator[Table]:
    """Yield all tables. Some have no rows."""
    run = shown["run"]
    status = shown["status"]
    named = ("name", "value")
    ended = {name: status[name] for name in ("status", "reason", "time", "host") if status.get(name)}
    yield "status", named, list_values(ended)
    for section in ("continues", "numbers", "machine", "git", "config"):
        yield section, named, list_values(run.get(section) or {})
    for number, loop in enumerate(run.get("loops", []), start=2):
        yield f"loop {number}", named, list_values(loop)
    asked = run.get("asked", {})
    yield (
        "settings of optimizers and schedules, before any schedule changed them",
        ("name", "in force", "in the script"),
        [
            (name, to_text(value), to_text(asked.get(name, value)))
            for name, value in (run.get("settings") or {}).items()
        ],
    )
    rows = [
        (
            str(each["step"]) if each["step"] >= 0 else "?",
            each["name"] or "",
            format_bytes(each["size_bytes"]),
            format_age(each["time"]),
            each["problem"] or ("sound" if shown["checked"] else "whole"),
        )
        for each in shown["snapshots"]
    ]
    title = "snapshots" if shown["checked"] else "snapshots, by their sizes (--check reads them)"
    yield title, ("step", "name", "size", "age", "state"), rows or [("none", "", "", "", "")]
    yield from list_history(run, shown["restarts"], shown["heals"])
    yield "run.state, in the newest snapshot", named, list_values(shown["state"])
    last = [(name, to_text(each["value"]), str(each["step"])) for name, each in shown["metrics"].items()]
    yield "last metrics", ("name", "value", "step"), last
    yield "measured, from the last start on", named, list_values(status.get("measured") or {})


def list_history(record: Json, restarts: Sequence[Json], heals: Sequence[Json]) -> Iterator[Table]:
    """Yield the tables of what has happened to a run. Some have no rows."""
    changes = [(str(each["after_step"]), each["changed"]) for each in record.get("changes") or []]
    yield "changes of machine, config and settings", ("after step", "changed"), changes
    yield "restarts", RESTART_COLUMNS, build_cells(restarts, RESTART_COLUMNS)
    yield "heals", HEAL_COLUMNS, build_cells(heals, HEAL_COLUMNS)


def _describe_snapshot(snapshot: Snapshot, run: str, *, check: bool) -> dict[str, Any]:
    """Return a snapshot as JSON. `check`: whether to read every byte of it."""
    problem = snapshot.problem
    if problem is None and check:
        problem = find_damage(snapshot.path, snapshot.manifest)
    return {
        "step": snapshot.step,
        "name": snapshot.name,
        "path": f"{run.rstrip('/')}/snapshots/{snapshot.path.name}",
        "size_bytes": snapshot.size_bytes,
        **{name: snapshot.manifest.get(name) for name in ("time", "digest", "versions", "meta")},
        "problem": problem,
    }


def _read_state(run: Path) -> dict[str, Any]:
    """Return `run.state` of the newest undamaged snapshot; {} if there is none."""
    for snapshot in reversed(find_sound(run)):
        with suppress(OSError, ValueError, AttributeError):
            state = parse_json(read_bytes(snapshot.path / STATE)).get("state")
            return state if isinstance(state, dict) else {}
    return {}


def find_sound(run: Path) -> list[Snapshot]:
    """Return the snapshots of a run whose files have the right sizes, in the order of their steps."""
    return [each for each in Store(run).snapshots() if each.problem is None]


def read_last_values(run: Path) -> dict[str, dict[str, Any]]:
    """Return the last value of every metric, and its step: name -> {"value": ..., "step": ...}."""
    return {
        name: {"value": value, "step": row.get("step")}
        for row in read_rows(run / METRICS)
        for name, value in row.items()
        if name not in POSITION
    }


# --- the live ranks of a run ------------------------------------------------------------------------------------------


POLL_S = 1.0
CLEAR = "\x1b[H\x1b[J"  # of a terminal
OLD_S = 0.5  # age of a heartbeat that is shown
HEADER = ("rank", "host", "step", "phase", "in it for", "compute", "samples/s", "where")

DESCRIPTION = f"""\
Shows the live state of every rank of a running job, until the run ends; if the output is not a terminal, prints it
once. Ctrl-C ends it. RUN is the run's directory; for a run at a URL, its working copy on the machine of rank 0. The
table has one row per rank:

  rank, host    the rank and its machine
  step          completed steps, over all restarts
  phase         starting, loading (data), forward, backward, reducing (summing gradients over the ranks, including the
                wait for them), updating, saving, validating, script (code between two steps), left or ended
  in it for     time in this phase or micro-batch, in seconds; in minutes if 10 minutes or longer
  compute       milliseconds of forward and backward per micro-batch, without waits for data or other ranks
  samples/s     samples per second of this rank, over all phases
  where         after {POLL_S:g} s in one phase: the collective in which the rank waits, or the line of the script;
                1.4 s ago: the row is from a heartbeat of that age, so that the rank is further by now;
                silent: no heartbeat arrives

compute and samples/s are averages since the last start.
"""


@click.command("watch", cls=Command, help=DESCRIPTION)
@click.argument("run_dir", metavar="RUN", type=PATH)
@json_option
def run_watch(run_dir: Path, is_json: bool) -> None:
    """Show the state of a run's ranks until it ends; without a terminal, once."""
    read_run(run_dir, str(run_dir))
    if sys.stdout.isatty() and not is_json:
        _follow(run_dir)
        return
    record = read_ranks(run_dir)
    if is_json:
        ranks = [] if record is None else [asdict(rank) for rank in record.ranks]
        print_json({"status": read_status(run_dir), "time_s": record and record.time_s, "ranks": ranks})
        return
    is_running = read_or_empty(run_dir / STATUS).get("status", "running") == "running"
    if record is None or not is_running or time.time() - record.time_s > STALE_S:
        print(escape(describe_end(run_dir)))
    else:
        _print_ranks(run_dir, record)


def _follow(run_dir: Path) -> None:
    print("the run is starting")
    while True:
        if record := read_ranks(run_dir):
            print(CLEAR, end="")
            _print_ranks(run_dir, record)
        if has_ended(run_dir):
            break
        time.sleep(POLL_S)
    print(escape(describe_end(run_dir)))


def describe_end(run_dir: Path) -> str:
    """Describe the state of a run without live ranks."""
    status = read_status(run_dir)
    how = status.get("status", "starting")
    if how == "running" or (how == "killed" and not status.get("reason")):
        return f"{run_dir}: no heartbeat of the run: it was killed, its host is down, or it is restarting"
    return f"{run_dir}: {how}" + (f": {status['reason']}" if status.get("reason") else "")


def _format_speed(rank: Beat, micro_batch_size: int) -> tuple[str, str]:
    """Return the columns "compute" and "samples/s"; "" if they are not known yet."""
    num = rank.num_micro_batches
    compute_s = rank.spent_s.get("forward", 0.0) + rank.spent_s.get("backward", 0.0)
    total_s = sum(rank.spent_s.values()) - rank.spent_s.get("starting", 0.0)
    if not num or total_s <= 0:
        return "", ""
    return f"{1000 * compute_s / num:.1f} ms", f"{num * micro_batch_size / total_s:,.0f}"


def format_rows(ranks: Sequence[Beat], micro_batch_size: int) -> Iterator[Sequence[str]]:
    """Yield a row of `HEADER` per rank."""
    for rank in ranks:
        notes = ["silent"] if rank.is_silent else []
        if not rank.is_silent and rank.for_s > POLL_S:
            notes.append(f"waits in {rank.waits_in}" if rank.waits_in else rank.line)
        if not rank.is_silent and rank.age_s > OLD_S:
            notes.append(f"{rank.age_s:.1f} s ago")
        yield (
            str(rank.rank),
            rank.host,
            str(rank.step),
            rank.phase,
            format_time(round(rank.for_s + (rank.age_s if rank.is_silent else 0.0))),
            *_format_speed(rank, micro_batch_size),
            ", ".join(filter(None, notes)),
        )


def _print_ranks(run_dir: Path, states: RankStates) -> None:
    age_s = time.time() - states.time_s
    heals = read_rows(run_dir / HEALS)
    title = format_count(len(states.ranks), "rank")
    title += f", {format_count(len(heals), 'heal')}, the last in step {heals[-1]['step']}" if heals else ""
    title += f", {format_time(round(age_s))} ago" if age_s > 2 * POLL_S else ""
    numbers = read_or_empty(run_dir / RECORD).get("numbers", {})
    print_table(title, HEADER, [*format_rows(states.ranks, numbers.get("micro_batch_size", 1))])


# --- many runs --------------------------------------------------------------------------------------------------------


@click.command("runs", cls=Command)
@click.argument("directory", metavar="[DIR]", type=click.Path(), default="runs")
@json_option
def run_runs(directory: str, is_json: bool) -> None:
    """Lists the runs in DIR (default: runs).

    Shows status, steps, digest, step of the snapshot `best`, age, and the last value of every metric.
    """
    found = find_runs(Path(directory))
    if not found:
        raise Error(f"there are no runs in {directory}: name a directory of run directories", code="SS415")
    runs = []
    for run in found:
        try:
            runs.append(describe_run(run))
        except (Error, OSError) as error:  # is named, and does not hide the others
            say(f"{run}: {explain(error) or error}")
            nothing = dict.fromkeys(("snapshot", "digest", "best", "time", "measured"))
            runs.append(nothing | {"name": run.name, "status": "damaged", "steps": 0, "metrics": {}})
    if is_json:
        print_json({"runs": runs})
        return
    rows = [
        {
            **each,
            "digest": (each["digest"] or "")[:SHORT],
            "age": format_age(each["time"]),
            "last metrics": ", ".join(f"{name} {_shorten(last['value'])}" for name, last in each["metrics"].items()),
        }
        for each in runs
    ]
    print_table("runs", RUN_COLUMNS, build_cells(rows, RUN_COLUMNS))


def find_runs(directory: Path) -> list[Path]:
    """Return the runs in a directory; [] if it is a run itself."""
    if not directory.is_dir() or (directory / RECORD).exists():
        return []
    return sorted(path.parent for path in directory.glob(f"*/{RECORD}"))


def describe_run(run: Path) -> dict[str, Any]:
    """Return facts about a run for a list or a comparison."""
    status = read_status(run)
    sound = find_sound(run)
    return {
        "name": run.name,
        "status": status.get("status", "not begun"),
        "steps": count_records(run / LEDGER),
        "snapshot": sound[-1].step if sound else None,
        "digest": sound[-1].manifest.get("digest") if sound else None,
        "best": max((each.step for each in sound if each.name == "best"), default=None),  # its usual name
        "time": status.get("time"),
        "metrics": read_last_values(run),
        "measured": status.get("measured"),
    }


def _shorten(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else to_text(value)


# --- two runs ---------------------------------------------------------------------------------------------------------


@click.command("diff", cls=Command)
@click.argument("run", type=click.Path())
@click.argument("other", type=click.Path())
@json_option
def run_diff(run: str, other: str, is_json: bool) -> int:
    """Shows the first step in which two runs differ, and what differs there: samples, loss, gradient or state.

    Exit code: 0 if all common steps and snapshots are the same; 1 if not; 2 if nothing can be compared.
    """
    with open_run(run) as (one, record), open_run(other) as (two, other_record):
        facts = [list_facts(record), list_facts(other_record)]
        described = [describe_run(one), describe_run(two)]
        num_steps = min(each["steps"] for each in described)
        if not num_steps:
            empty = run if not described[0]["steps"] else other
            raise Error(f"{empty} has no step yet: there is nothing to compare", code="SS709")
        step, what = _find_first_difference(one, two, (f"in {run}", f"in {other}"))
        # A snapshot that ranks have written together has no digest until all of it is read.
        digests = [{each.step: Store(path).read_digest(each) for each in find_sound(path)} for path in (one, two)]
    for each, own, shown in zip(described, digests, facts, strict=True):
        each["digest"] = own.get(each["snapshot"])
        shown |= {name: each[name] for name in ("status", "steps", "snapshot", "digest")}
    pairs = {name: (facts[0].get(name), facts[1].get(name)) for name in {**facts[0], **facts[1]}}
    differences = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    common = digests[0].keys() & digests[1].keys()
    state_step = min((each for each in common if digests[0][each] != digests[1][each]), default=None)
    is_same = step is None and state_step is None
    if is_json:
        print_json(
            {
                "same": is_same,
                "differences": differences,
                "common_steps": num_steps,
                "common_snapshots": len(common),
                "first_differing_step": step,
                "differs_in": what,
                "first_differing_state": state_step,
                "runs": described,
            }
        )
        return int(not is_same)
    if differences:
        rows = [(name, *map(to_text, pair)) for name, pair in differences.items()]
        print_table("differences", ("name", run, other), rows)
    if state_step is not None:
        print(f"the state after {state_step} steps is the first in a common snapshot that differs")
    if step is not None:
        print(f"step {step} is the first that differs: {'; '.join(what)}")
    if is_same:
        also = f", and in {format_count(len(common), 'common snapshot')}" if common else "; there is no common snapshot"
        print(f"identical in all {num_steps} common steps{also}")
    return int(not is_same)


def list_facts(record: Json) -> dict[str, Any]:
    """Return what run.json says, the most important first: name -> text."""
    sections = {section: record.get(section) or {} for section in SECTIONS}
    return {**dict(list_values(sections)), "samestep": record.get("samestep")}


def _find_first_difference(one: Path, other: Path, where: tuple[str, str]) -> tuple[int | None, list[str]]:
    """Return the first step that differs between two runs, and what differs. `where`: as for `describe_difference`."""
    for step, (a, b) in enumerate(zip(read_records(one / LEDGER), read_records(other / LEDGER), strict=False)):
        if a != b and (found := describe_difference(a, b, where)):
            return step, found
    return None, []


def describe_difference(one: Entry, other: Entry, where: tuple[str, str]) -> list[str]:
    """Describe how the records of one step differ between two runs; [] if all that both recorded is equal.

    Args:
        where: the two runs, such as ("in runs/a", "in runs/b").
    """
    found = []
    if (one.num_samples, one.fingerprint) != (other.num_samples, other.fingerprint):
        found.append("other samples")
    if one.has_bits and other.has_bits:
        if one.loss != other.loss:
            found.append(f"the loss is {to_float(one.loss)!r} {where[0]} and {to_float(other.loss)!r} {where[1]}")
        if one.gradient != other.gradient:
            found.append("another gradient" if found else "a different gradient from the same samples and loss")
    return found
