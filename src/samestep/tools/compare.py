"""A list of the runs in a directory, and the differences between two runs. Does not import torch."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.console import describe_age, draw_bars, format_count, list_values, print_table, say, to_text
from samestep.decoding import parse_json
from samestep.errors import Error, explain
from samestep.files import read_bytes
from samestep.plan.ledger import Entry, to_float
from samestep.snapshot.ledger_file import count_records, read_records
from samestep.snapshot.manifest import STATE
from samestep.snapshot.reading import open_run, read_run
from samestep.snapshot.store import Snapshot, Store
from samestep.watch.records import LEDGER, METRICS, RECORD, read_rows, read_status

BEST = "best"  # the usual name of the snapshot of the best weights
SHORT = 12  # of a digest's 64 digits
COUNTED = ("data_length", "batch_size", "micro_batch_size", "seed")  # numbers by which steps use other samples
SECTIONS = ("numbers", "settings", "config", "script", "git", "machine")  # of run.json, the most important first
PLACE = ("step", "epoch")  # entries of a row that are not metrics
NUM_BARS = 20  # of a metric

Curve = Sequence[tuple[int, float]]  # steps and values


def read_last_values(run: Path) -> dict[str, dict[str, Any]]:
    """Return the last value of every metric, and its step: name -> {"value": ..., "step": ...}."""
    return find_last_values(read_rows(run / METRICS))


def find_last_values(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the result of `read_last_values` for rows of `metrics.jsonl`."""
    return {
        name: {"value": value, "step": row.get("step")}
        for row in rows
        for name, value in row.items()
        if name not in PLACE
    }


def find_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return the numbers of every metric in rows of `metrics.jsonl`, by name."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in PLACE and type(value) in (int, float) and type(row.get("step")) is int:
                curves.setdefault(name, []).append((row["step"], value))
    return curves


def overlay(curves: Sequence[Curve]) -> list[str]:
    """Draw curves as bars on one scale and one range of steps. A bar is the last value in its part of the steps.

    Example::

        >>> overlay([[(1, 0.0), (2, 0.5)], [(2, 1.0), (3, 1.0)]])
        ['▁▅ ', ' ██']
    """
    places = {step: place for place, step in enumerate(sorted({step for curve in curves for step, _ in curve}))}
    num = min(NUM_BARS, len(places))
    values = [{places[step] * num // len(places): value for step, value in curve} for curve in curves]
    return draw_bars([[each.get(place) for place in range(num)] for each in values])


def read_state(run: Path) -> dict[str, Any]:
    """Return `run.state` of the newest undamaged snapshot; {} if there is none, or its files were not downloaded."""
    for snapshot in reversed(find_sound(run)):
        with suppress(OSError, ValueError, AttributeError):
            state = parse_json(read_bytes(snapshot.path / STATE)).get("state")
            return state if isinstance(state, dict) else {}
    return {}


def find_sound(run: Path) -> list[Snapshot]:
    """Return the snapshots of a run whose files have the right sizes, in the order of their steps."""
    return sorted((each for each in Store(run).snapshots() if each.problem is None), key=lambda each: each.step)


def find_runs(directory: Path) -> list[Path]:
    """Return the runs in a directory; [] if it is a run itself."""
    if not directory.is_dir() or (directory / RECORD).exists():
        return []
    return sorted(path.parent for path in directory.glob(f"*/{RECORD}"))


def describe_run(run: Path, rows: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Return facts about a run for a list or a comparison. `rows`: rows of its `metrics.jsonl`, if already read."""
    status = read_status(run)
    sound = find_sound(run)
    return {
        "name": run.name,
        "status": status.get("status", "not begun"),
        "steps": count_records(run / LEDGER),
        "done_steps": status.get("steps", 0),
        "snapshot": sound[-1].step if sound else None,
        "digest": sound[-1].manifest.get("digest") if sound else None,
        "best": next((each.step for each in sound if each.name == BEST), None),
        "time": status.get("time"),
        "metrics": read_last_values(run) if rows is None else find_last_values(rows),
        "measured": status.get("measured"),
    }


def describe_runs(runs: Iterable[Path]) -> list[dict[str, Any]]:
    """Return `describe_run` of each run. One that cannot be read is named, and does not hide the others."""
    described = []
    for run in runs:
        try:
            described.append(describe_run(run))
        except (Error, OSError) as error:
            say(f"{run}: {explain(error) or error}")
            nothing = dict.fromkeys(("snapshot", "digest", "best", "time", "measured"))
            described.append(nothing | {"name": run.name, "status": "damaged", "steps": 0, "metrics": {}})
    return described


def list_runs(found: Sequence[Mapping[str, Any]], *, is_json: bool) -> int:
    """Print one line per run that `describe_run` has described. Returns the exit code."""
    if is_json:
        print(json.dumps(found, indent=1))
        return 0
    rows = [
        (
            each["name"],
            each["status"],
            str(each["steps"]),
            (each["digest"] or "")[:SHORT],
            "" if each["best"] is None else str(each["best"]),
            describe_age(each["time"]),
            ", ".join(f"{name} {_shorten(last['value'])}" for name, last in each["metrics"].items()),
        )
        for each in found
    ]
    print_table("runs", ("name", "status", "steps", "digest", "best", "age", "last metrics"), rows)
    return 0


def _shorten(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else to_text(value)


@dataclass(frozen=True)
class Comparison:
    """Two runs, and where they differ. Pairs are of the first run and the second.

    Attributes:
        names: as the user has given them.
        records: the contents of run.json.
        logged: the rows of metrics.jsonl.
        described: results of `describe_run`.
        differences: a setting or a result -> its values, if they differ.
        num_steps: number of common steps.
        num_snapshots: number of common snapshots.
        step: the first common step that differs; None if all are the same.
        what: what differs in it.
        state_step: the step of the first common snapshot that differs; None if all are the same.
    """

    names: tuple[str, str]
    records: Sequence[Mapping[str, Any]]
    logged: Sequence[Sequence[Mapping[str, Any]]]
    described: Sequence[Mapping[str, Any]]
    differences: Mapping[str, Sequence[Any]]
    num_steps: int
    num_snapshots: int
    step: int | None
    what: Sequence[str]
    state_step: int | None

    @property
    def is_same(self) -> bool:
        return self.step is None and self.state_step is None

    def to_json(self) -> dict[str, Any]:
        return {
            "same": self.is_same,
            "differences": self.differences,
            "common_steps": self.num_steps,
            "common_snapshots": self.num_snapshots,
            "first_differing_step": self.step,
            "differs_in": self.what,
            "first_differing_state": self.state_step,
            "runs": self.described,
        }


def compare_runs(one: str, other: str, *, is_json: bool) -> int:
    """Print the first difference between two runs, what differs between them, and their metrics.

    Returns:
        The exit code: 0 if all steps and snapshots that both have are the same.

    Raises:
        Error: one of the two is not a run, or they have no step in common.
    """
    comparison = _read_comparison(one, other)
    if is_json:
        print(json.dumps(comparison.to_json(), indent=1))
    else:
        _print_comparison(comparison)
    return 0 if comparison.is_same else 1


def _read_comparison(one: str, other: str) -> Comparison:
    with open_run(one, has_digests=True) as first, open_run(other, has_digests=True) as second:
        records = [read_run(first, one), read_run(second, other)]
        logged = [read_rows(first / METRICS), read_rows(second / METRICS)]
        described = [describe_run(first, logged[0]), describe_run(second, logged[1])]
        num_steps = min(each["steps"] for each in described)
        if not num_steps:
            raise Error(
                f"{one if not described[0]['steps'] else other} has no step yet: there is nothing to compare",
                code="SS709",
            )
        step, what = find_first_difference(first, second, (f"in {one}", f"in {other}"))
        # A snapshot that ranks have written together has no digest until all of it is read.
        found = [{each.step: each for each in find_sound(run)} for run in (first, second)]
        common = found[0].keys() & found[1].keys()
        digests = [
            {step: Store(run).read_digest(each) for step, each in snapshots.items() if step in common}
            for run, snapshots in zip((first, second), found, strict=True)
        ]
        for each, snapshots in zip(described, digests, strict=True):
            if each["digest"] is None:
                each["digest"] = snapshots.get(each["snapshot"])
    saved = digests[0].keys() & digests[1].keys()
    return Comparison(
        names=(one, other),
        records=records,
        logged=logged,
        described=described,
        differences=_find_differences(records, described),
        num_steps=num_steps,
        num_snapshots=len(saved),
        step=step,
        what=what,
        state_step=min((step for step in saved if digests[0][step] != digests[1][step]), default=None),
    )


def _print_comparison(comparison: Comparison) -> None:
    names = comparison.names
    if comparison.differences:
        rows = [(name, *map(to_text, pair)) for name, pair in comparison.differences.items()]
        print_table("differences", ("name", *names), rows)
    if rows := _build_metric_rows(comparison):
        print_table("metrics over the steps, on one scale", ("name", "run", "values", "last (step)"), rows)
    if why := explain_numbers(*comparison.records):
        print(why)
    if comparison.state_step is not None:
        print(f"the state after {comparison.state_step} steps is the first in a common snapshot that differs")
    if comparison.step is not None:
        print(f"step {comparison.step} is the first that differs: {'; '.join(comparison.what)}")
    if comparison.is_same:
        state = "; there is no common snapshot"
        if comparison.num_snapshots:
            state = f", and in {format_count(comparison.num_snapshots, 'common snapshot')}"
        counts = [(each["steps"], each["done_steps"]) for each in comparison.described]
        same = f"identical in all {comparison.num_steps} common steps{state}"
        print("; ".join([same, *list_missing(names, counts)]))


def _build_metric_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return two rows per metric, one of each run."""
    metrics = [each["metrics"] for each in comparison.described]
    curves = [find_curves(rows) for rows in comparison.logged]
    rows: list[tuple[str, ...]] = []
    for name in metrics[0] | metrics[1]:
        bars = overlay([each.get(name, ()) for each in curves])
        lasts = [_format(values.get(name)) for values in metrics]
        rows += zip((name, ""), comparison.names, bars, lasts, strict=True)
    return rows


def list_missing(names: Sequence[str], counts: Sequence[tuple[int, int]]) -> list[str]:
    """Describe the steps that are compared with nothing, because one of several runs has no record of them.

    Args:
        counts: for each run, its steps in the ledger, and those after which its loop has ended; 0 if it has not.

    Example::

        >>> list_missing(["a", "b", "c"], [(20, 20), (12, 20), (19, 0)])
        ['the ledger of b was truncated: it lacks steps 12 to 19', 'c has no step 19']
    """
    most = max(max(pair) for pair in counts)
    found = []
    for name, (num_steps, num_done) in zip(names, counts, strict=True):
        which = f"step{'s' if most - num_steps > 1 else ''} {num_steps}"
        which += f" to {most - 1}" if most - num_steps > 1 else ""
        if num_steps < num_done:
            found.append(f"the ledger of {name} was truncated: it lacks {which}")
        elif num_steps < most:
            found.append(f"{name} has no {which}")
    return found


def explain_numbers(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Explain different samples of two runs by the different numbers in their records; "" if these are equal."""
    numbers = [record.get("numbers") or {} for record in (one, other)]
    different = [name for name in COUNTED if numbers[0].get(name) != numbers[1].get(name)]
    verb = "differs" if len(different) == 1 else "differ"
    return f"the steps are not comparable one by one: {', '.join(different)} {verb}" if different else ""


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


def _format(last: Mapping[str, Any] | None) -> str:
    return "" if last is None else f"{to_text(last['value'])} ({last['step']})"


def _find_differences(
    records: Sequence[Mapping[str, Any]], described: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ between two runs, by name, the most important first."""
    found: dict[str, tuple[Any, Any]] = {}
    for section in SECTIONS:
        one, other = (dict(list_values(record.get(section) or {})) for record in records)
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        found |= {f"{section}.{name}": (one.get(name), other.get(name)) for name in names}
    if (versions := (records[0].get("samestep"), records[1].get("samestep")))[0] != versions[1]:
        found["samestep"] = versions
    for name in ("status", "steps", "snapshot", "digest"):
        if described[0][name] != described[1][name]:
            found[name] = described[0][name], described[1][name]
    return found


def find_first_difference(one: Path, other: Path, where: tuple[str, str]) -> tuple[int | None, list[str]]:
    """Return the first step that differs between two runs, and what differs. `where`: as for `describe_difference`."""
    for step, (a, b) in enumerate(zip(read_records(one / LEDGER), read_records(other / LEDGER), strict=False)):
        if a != b and (found := describe_difference(a, b, where)):
            return step, found
    return None, []
