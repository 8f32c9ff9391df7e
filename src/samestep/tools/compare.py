"""A list of the runs in a directory, and the differences between two runs. Does not import torch."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.console import describe_age, list_values, print_table, to_text
from samestep.files import parse_json, read_bytes
from samestep.plan.ledger import count_records, read_records
from samestep.snapshot.manifest import STATE
from samestep.snapshot.object_store import open_run, read_run
from samestep.snapshot.store import Store
from samestep.watch.records import LEDGER, METRICS, RECORD, STATUS, read_or_empty, read_rows

SHORT = 12  # of a digest's 64 digits
PLACE = ("step", "epoch")  # entries of a row that are not metrics


def read_last_values(run: Path) -> dict[str, dict[str, Any]]:
    """Return the last value of every metric, and its step: name -> {"value": ..., "step": ...}."""
    return {
        name: {"value": value, "step": row.get("step")}
        for row in read_rows(run / METRICS)
        for name, value in row.items()
        if name not in PLACE
    }


def read_state(run: Path) -> dict[str, Any]:
    """Return `run.state` of the newest sound snapshot; {} if there is none, or its files were not downloaded."""
    for snapshot in reversed(_find_sound(run)):
        with suppress(OSError, ValueError, AttributeError):
            state = parse_json(read_bytes(snapshot.path / STATE)).get("state")
            return state if isinstance(state, dict) else {}
    return {}


def _find_sound(run: Path) -> list[Any]:
    return sorted((each for each in Store(run).snapshots() if each.problem is None), key=lambda each: each.step)


def find_runs(directory: Path) -> list[Path]:
    """Return the runs in a directory; [] if it is a run itself."""
    if not directory.is_dir() or (directory / RECORD).exists():
        return []
    return sorted(path.parent for path in directory.glob(f"*/{RECORD}"))


def describe_run(run: Path) -> dict[str, Any]:
    """Return facts about a run for a list or a comparison."""
    status, sound = read_or_empty(run / STATUS), _find_sound(run)
    return {
        "name": run.name,
        "status": status.get("status", "not begun"),
        "steps": count_records(run / LEDGER),
        "snapshot": sound[-1].step if sound else None,
        "digest": sound[-1].manifest.get("digest") if sound else None,
        "time": status.get("time"),
        "metrics": read_last_values(run),
        "measured": status.get("measured"),
    }


def list_runs(runs: Sequence[Path], *, is_json: bool) -> int:
    """Print one line per run. Returns the exit code."""
    found = [describe_run(run) for run in runs]
    if is_json:
        print(json.dumps(found, indent=1))
        return 0
    rows = [
        (each["name"], each["status"], str(each["steps"]), (each["digest"] or "")[:SHORT], describe_age(each["time"]),
         ", ".join(f"{name} {_shorten(last['value'])}" for name, last in each["metrics"].items()))
        for each in found
    ]  # fmt: skip
    print_table("runs", ("name", "status", "steps", "digest", "age", "last metrics"), rows)
    return 0


def _shorten(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else to_text(value)


def compare_runs(one: str, other: str, *, is_json: bool) -> int:
    """Print the differences between two runs (numbers, config, settings, steps, digests) and their metrics.

    Returns:
        The exit code: 0 if their newest snapshots have the same step and digest.

    Raises:
        Error: one of them is not a run.
    """
    with open_run(one) as first, open_run(other) as second:
        records = [read_run(first, one), read_run(second, other)]
        described = [describe_run(first), describe_run(second)]
        step = _find_first_difference(first, second)
    differences = _find_differences(records, described)
    a, b = ((each["snapshot"], each["digest"]) for each in described)
    is_same = a == b and a[1] is not None
    if is_json:
        shown = {"same": is_same, "differences": differences, "first_step_with_other_samples": step, "runs": described}
        print(json.dumps(shown, indent=1))
        return 0 if is_same else 1
    if differences:
        rows = [(name, *map(to_text, pair)) for name, pair in differences.items()]
        print_table("differences", ("name", one, other), rows)
    metrics = [each["metrics"] for each in described]
    names = {**metrics[0], **metrics[1]}
    if names:
        rows = [(name, *(_format(values.get(name)) for values in metrics)) for name in names]
        print_table("last metrics, and their steps", ("name", one, other), rows)
    if step is not None:
        print(f"step {step} is the first that used other samples")
    elif described[0]["steps"] != described[1]["steps"]:
        print("all steps that both runs have used the same samples")
    print("identical: the newest snapshots have one digest" if is_same else "NOT identical")
    return 0 if is_same else 1


def _format(last: Mapping[str, Any] | None) -> str:
    return "" if last is None else f"{to_text(last['value'])} ({last['step']})"


def _find_differences(
    records: Sequence[Mapping[str, Any]], described: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ between two runs, by name, the most important first."""
    found: dict[str, tuple[Any, Any]] = {}
    for section in ("numbers", "settings", "machine", "config"):
        one, other = (dict(list_values(record.get(section) or {})) for record in records)
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        found |= {f"{section}.{name}": (one.get(name), other.get(name)) for name in names}
    for name in ("status", "steps", "snapshot", "digest"):
        if described[0][name] != described[1][name]:
            found[name] = described[0][name], described[1][name]
    return found


def _find_first_difference(one: Path, other: Path) -> int | None:
    """Return the first step in which two runs used different samples."""
    pairs = zip(read_records(one / LEDGER), read_records(other / LEDGER), strict=False)
    return next((step for step, (a, b) in enumerate(pairs) if a[1:] != b[1:]), None)
