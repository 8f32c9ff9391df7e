"""`samestep runs`: lists the runs in a directory. Does not import torch."""

from pathlib import Path
from typing import Any

import click

from samestep.command_line import Command
from samestep.errors import Error
from samestep.tools.compare import describe_runs, find_runs, list_runs

FIELDS = ("name", "status", "steps", "best", "time")


@click.command("runs", cls=Command)
@click.argument("directory", metavar="[DIR]", type=click.Path(), default="runs")
@click.option("--sort", metavar="NAME", default="name", help=f"sort by {', '.join(FIELDS)} or a metric, as train/loss")
@click.option("--reverse", is_flag=True, help="sort in descending order")
@click.option("--json", "is_json", is_flag=True, help="print JSON")
def run_runs(directory: str, sort: str, reverse: bool, is_json: bool) -> int:
    """Lists the runs in DIR (default: runs).

    Shows status, steps, digest, step of the snapshot `best`, age, and the last value of every metric.
    """
    found = find_runs(Path(directory))
    if not found:
        raise Error(f"there are no runs in {directory}: name a directory that holds run directories", code="SS415")
    runs = describe_runs(found)
    keys = [_find_key(run, sort) for run in runs]
    if all(key is None for key in keys):
        metrics = sorted({name for run in runs for name in run["metrics"]})
        raise Error(f"no run has {sort}: sort by {', '.join([*FIELDS, *metrics])}", code="SS101")
    known = [(key, number) for number, key in enumerate(keys) if key is not None]
    order = [number for _, number in sorted(known, reverse=reverse)]
    order += [number for number, key in enumerate(keys) if key is None]
    return list_runs([runs[number] for number in order], is_json=is_json)


def _find_key(run: dict[str, Any], name: str) -> Any:
    """Return the value of a run to sort by; None if the run has no such value."""
    if name in FIELDS:
        return run[name]
    value = run["metrics"].get(name, {}).get("value")
    return value if isinstance(value, int | float) else None
