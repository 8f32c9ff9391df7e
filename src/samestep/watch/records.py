"""The files in a run's directory that say how it stands, for people and tools beside it."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

RANKS = "ranks.json"  # what every rank is at, written by rank 0 while the run goes on
STATUS = "status.json"  # whether it runs, and how it ended
RESTARTS = "restarts.jsonl"  # a line for each start but the first: when, why, from which step


def read_or_empty(path: Path) -> dict[str, Any]:
    """What one of them holds; empty where it is not there, as before the first step."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON that can be read; none where there is no file. Raises OSError."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError):  # of a writer that was killed as it wrote
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def add_line(path: Path, line: str) -> None:
    """Adds a line to a file, after one that a full disk, or a kill, has cut short, too. Raises OSError."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read() == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())


def replace_text(path: Path, text: str, *, sync: bool) -> None:
    """Puts a text in a file's place.

    Args:
        sync: waits until it is on the disk.

    Raises:
        OSError: that cannot be done; what was there stands.
    """
    temporary = path.with_name(f".{path.name}")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):  # read-only by now
            temporary.unlink(missing_ok=True)
        raise


def replace_or_overwrite(path: Path, text: str) -> None:
    """As `replace_text`, but on a full disk in the room that the file has: better torn than as if nothing had been."""
    try:
        replace_text(path, text, sync=False)
    except OSError:
        with open(path, "r+b", buffering=0) as file:
            file.write(text.encode())
            file.truncate()
