"""`samestep runs`: lists the runs in a directory. Does not import torch."""

from pathlib import Path
from typing import Any

from samestep.errors import Error
from samestep.tools.compare import describe_runs, find_runs, list_runs
from samestep.tools.inspect import CommandParser

FIELDS = ("name", "status", "steps", "best", "time")


def run_runs(args: list[str]) -> int:
    """Run the command with the arguments after its name. Returns the exit code.

    Raises:
        Error: there are no runs, or no run has the value to sort by.
    """
    parser = CommandParser(
        prog="samestep runs",
        description="Lists the runs in a directory: status, steps, digest, step of the snapshot `best`, age, and the "
        "last value of every metric.",
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        default="runs",
        help="directory that holds run directories; default: runs",
    )
    parser.add_argument(
        "--sort", metavar="NAME", default="name", help=f"sort by {', '.join(FIELDS)} or a metric such as train/loss"
    )
    parser.add_argument("--reverse", action="store_true", help="sort in descending order")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(args)
    found = find_runs(Path(options.directory))
    if not found:
        raise Error(f"there are no runs in {options.directory}: name a directory that holds run directories")
    runs = describe_runs(found)
    keys = [_find_key(run, options.sort) for run in runs]
    if all(key is None for key in keys):
        metrics = sorted({name for run in runs for name in run["metrics"]})
        raise Error(f"no run has {options.sort}: sort by {', '.join([*FIELDS, *metrics])}")
    known = [(key, number) for number, key in enumerate(keys) if key is not None]
    order = [number for _, number in sorted(known, reverse=options.reverse)]
    order += [number for number, key in enumerate(keys) if key is None]
    return list_runs([runs[number] for number in order], is_json=options.json)


def _find_key(run: dict[str, Any], name: str) -> Any:
    """Return the value of a run to sort by; None if the run has no such value."""
    if name in FIELDS:
        return run[name]
    value = run["metrics"].get(name, {}).get("value")
    return value if isinstance(value, int | float) else None
