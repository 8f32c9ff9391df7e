"""Reads a run's directory, for tools."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from samestep.config import is_url
from samestep.console import say
from samestep.errors import Error, explain
from samestep.snapshot.run_record import read_record
from samestep.snapshot.store import SNAPSHOTS, Snapshot, Store
from samestep.watch.records import RECORD


@contextmanager
def open_run(run: str) -> Iterator[Path]:
    """Yield a run's directory for a tool to read. Raises Error if it cannot be read."""
    if is_url(run):
        raise Error(f"{run} is a URL: copy the run to a directory, and name that", code="SS416")
    try:
        yield Path(run)
    except BrokenPipeError:  # the reader of the output has closed it
        raise
    except OSError as error:
        known = explain(error)
        if known is not None and known.code == "SS113":  # from writing the output, or temporary files
            raise
        where = f"{error.filename or run} cannot be read ({error.strerror})"
        raise Error(f"{where}: fix that, or name another one", code="SS416") from None


def read_run(run: Path, called: str) -> dict[str, Any]:
    """Read a run's `run.json` for a tool. `called`: the run as the user gave it. Raises Error."""
    if not run.is_dir():
        raise Error(f"there is no directory {called}: name a run's directory", code="SS415")
    try:
        return read_record(run, called)
    except FileNotFoundError:
        raise Error(
            f"{called} is no run's directory, it has no {RECORD}: name the directory that holds {SNAPSHOTS}/",
            code="SS415",
        ) from None


def find_snapshot(store: Store, called: str, which: int | str) -> Snapshot:
    """Find the snapshot that a tool shows or reads, see `Store.find`. `called`: the run as the user gave it.

    Raises Error if there is none.
    """
    snapshot = store.find(which, warn=say)
    if snapshot is None:
        raise Error(f"{called} has no snapshot yet", code="SS411")
    return snapshot
