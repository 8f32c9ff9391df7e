"""The files in a run's directory that say how it stands, for people and tools beside it."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.files import (
    fits,
    is_count,
    is_flag,
    is_number,
    is_object,
    is_text,
    open_regular,
    parse_json,
    read_bytes,
    replace_file,
)

RECORD = "run.json"  # which run it is
RANKS = "ranks.json"  # what every rank is at, written by rank 0 while the run goes on
STATUS = "status.json"  # whether it runs, and how it ended
RESTARTS = "restarts.jsonl"  # a line for each start but the first: when, why, from which step

MOST_ROWS_BYTES = 64 << 20

_RANK = {
    "rank": is_count, "host": is_text, "step": is_count, "phase": is_text, "for_s": is_number, "age_s": is_number,
    "num_steps": is_number, "num_micro_batches": is_number, "is_silent": is_flag, "waits_in": is_text, "place": is_text,
    "spent_s": lambda value: is_object(value) and all(map(is_number, value.values())),
}  # fmt: skip
_SHAPES = {
    RECORD: {
        "format?": is_count, "numbers?": is_object, "machine?": is_object, "config?": is_object,
        "settings?": is_object, "asked?": is_object, "rewinds?": [is_count],
        "loops?": [{"first_step": is_count, "first_epoch": is_count}],
        "changes?": [{"after_step": is_count, "changed": is_text}],
    },
    STATUS: {
        "status?": is_text, "reason?": is_text, "host?": is_text, "process?": is_count, "steps?": is_count,
        "lost?": is_text, "measured?": is_object,
    },
    RESTARTS: {"reason": is_text, "from_step": is_count},  # each line
    RANKS: {"time_s": is_number, "micro_batch_size": is_count, "ranks": [_RANK]},
}  # fmt: skip


def parse_record(name: str, text: bytes) -> dict[str, Any]:
    """What the file of this name says. Raises ValueError where it is not what samestep writes."""
    record: dict[str, Any] = parse_json(text)
    if not fits(record, _SHAPES[name]):
        raise ValueError(f"{name} lacks something, or has a value of another kind")
    return record


def read_or_empty(path: Path) -> dict[str, Any]:
    """What one of them holds; empty where it is not there, as before the first step, or is damaged."""
    try:
        return parse_record(path.name, read_bytes(path))
    except (OSError, ValueError):
        return {}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of `restarts.jsonl` that can be read; none where there is no file. Raises OSError."""
    try:
        return [row for row in _parse_rows(read_bytes(path)) if fits(row, _SHAPES[RESTARTS])]
    except FileNotFoundError:
        return []


def read_last_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` that can be read, of its last 64 MB. Raises OSError."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_ROWS_BYTES))
            return _parse_rows(file.read(MOST_ROWS_BYTES))
    except FileNotFoundError:
        return []


def count_lines(path: Path) -> int:
    """How many lines a file has; 0 where there is none. Raises OSError."""
    try:
        return read_bytes(path).count(b"\n")
    except FileNotFoundError:
        return 0


def _parse_rows(text: bytes) -> list[dict[str, Any]]:
    rows = []
    for line in text.splitlines():
        with suppress(ValueError):  # of a writer that was killed as it wrote
            rows.append(parse_json(line))
    return [row for row in rows if isinstance(row, dict)]


def add_line(path: Path, line: str) -> None:
    """Adds a line to a file, after one that a full disk, or a kill, has cut short, too. Raises OSError."""
    with open(path, "ab+", opener=open_regular) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read() == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())


def overwrite(path: Path, text: str) -> None:
    """As `replace_file`, but on a full disk in the room that the file has: better torn than as if nothing had been."""
    try:
        replace_file(path, text.encode())
    except OSError:
        with open(path, "r+b", buffering=0, opener=open_regular) as file:
            file.write(text.encode())
            file.truncate()
