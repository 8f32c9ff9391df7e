"""The files of a run directory besides its snapshots: their names, and readers for those that describe its state."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.files import (
    fits,
    is_argument,
    is_count,
    is_flag,
    is_number,
    is_object,
    is_text,
    open_regular,
    parse_json,
    read_bytes,
)
from samestep.world.environment import FAILURE, read_host

LOCK = "lock"  # the process that writes the run
RECORD = "run.json"  # the run's identity, and how it changed
RANKS = "ranks.json"  # the live state of every rank, written by rank 0
STATUS = "status.json"  # whether the run is running, and how it ended
RESTARTS = "restarts.jsonl"  # one line for each start but the first: time, reason, first step
METRICS = "metrics.jsonl"  # one line for each logged row
TIMELINE = "timeline.jsonl"  # where the time of every rank went: `watch.timeline`
TRACKERS = "trackers.json"  # the run's id at each service of a tracker
LAST_ROW = "samestep-last-row.json"  # in a directory of a service: the last row that it got
LEDGER = "ledger.bin"  # one record for each finished step: the samples it used
LOGS = "logs"  # a directory: the output of each start's ranks
SHARED = (RECORD, RESTARTS, STATUS, TRACKERS, LEDGER, METRICS)  # what a copy holds besides orders and snapshots

STACKS_WANTED = "stacks-wanted"  # in the newest directory of LOGS: requests the stacks of all ranks

RESTART_S = 5.0  # for a launcher to restart a failed run
STALE_S = 30.0  # a run without news for this long counts as dead

MOST_ROWS_BYTES = 64 << 20
MOST_RANKS = 1 << 16  # in a row of the timeline

_RANK = {
    "rank": is_count,
    "host": is_text,
    "step": is_count,
    "phase": is_text,
    "for_s": is_number,
    "age_s": is_number,
    "num_steps": is_number,
    "num_micro_batches": is_number,
    "is_silent": is_flag,
    "waits_in": is_text,
    "place": is_text,
    "spent_s": lambda value: is_object(value) and all(map(is_number, value.values())),
}
_SHAPES = {
    RECORD: {
        "format?": is_count,
        "numbers?": is_object,
        "machine?": is_object,
        "config?": is_object,
        "git?": is_object,
        "script?": {"arguments": [is_argument], "file?": lambda value: is_text(value) and Path(value).name == value},
        "settings?": is_object,
        "asked?": is_object,
        "rewinds?": [is_count],
        "loops?": [{"first_step": is_count, "first_epoch": is_count}],
        "changes?": [{"after_step": is_count, "changed": is_text}],
    },
    STATUS: {
        "status?": is_text,
        "reason?": is_text,
        "host?": is_text,
        "process?": is_count,
        "steps?": is_count,
        "start?": is_count,
        "lost?": is_text,
        "measured?": {
            "samples_per_s?": is_number,
            "wall_s?": is_number,
            "time_share?": lambda value: is_object(value) and all(map(is_number, value.values())),
        },
    },
    TRACKERS: is_object,
    LAST_ROW: {"id": is_text, "step": is_count, "names": [is_text]},
    TIMELINE: {
        "time_s": is_number,
        "steps": lambda value: fits(value, [is_count]) and len(value) <= MOST_RANKS,
        "first_step?": is_count,
        "memory_mb?": [is_number],
        "device_mb?": [is_number],
        "spent_s": lambda value: is_object(value) and all(fits(row, [is_number]) for row in value.values()),
    },
    FAILURE: {"rank": is_count, "reason": is_text},
    RESTARTS: {"reason": is_text, "from_step": is_count},  # each line
    RANKS: {"time_s": is_number, "micro_batch_size": is_count, "ranks": [_RANK]},
}


def parse_record(name: str, text: bytes) -> dict[str, Any]:
    """Parses `RECORD`, `STATUS` or `RANKS`. Raises ValueError if it is damaged."""
    record: dict[str, Any] = parse_json(text)
    if not fits(record, _SHAPES[name]):
        raise ValueError(f"{name} lacks something, or has a value of another kind")
    return record


def read_or_empty(path: Path) -> dict[str, Any]:
    """Return the content of one of these files; {} if it does not exist or is damaged."""
    try:
        return parse_record(path.name, read_bytes(path))
    except (OSError, ValueError):
        return {}


def read_status(directory: Path) -> dict[str, Any]:
    """Return `status.json` of a run. "running" becomes "killed" if the process no longer exists on this host.

    If the launcher has recorded the failure that ended the start, its reason and rank are used, because rank 0 often
    records only the loss of another rank.
    """
    status = read_or_empty(directory / STATUS)
    is_here = status.get("status") == "running" and status.get("host") == read_host()
    if is_here and not Path(f"/proc/{status.get('process')}").exists():
        status["status"] = "killed"
    if status.get("status") in ("failed", "killed"):
        status |= read_or_empty(directory / LOGS / str(status.get("start")) / FAILURE)
    return status


def has_ended(run_dir: Path) -> bool:
    """Return whether the run has ended. False while a launcher can still restart it."""
    status = read_or_empty(run_dir / STATUS)
    if status.get("status") in ("done", "stopped"):
        return True
    newest_s = 0.0
    for name in (RANKS, STATUS):
        path = run_dir / name
        newest_s = max(newest_s, path.stat().st_mtime if path.exists() else 0.0)
    age_s = time.time() - newest_s
    if status.get("status") == "failed":
        return age_s > RESTART_S
    if status.get("host") == read_host() and os.path.isdir("/proc/self"):
        return age_s > RESTART_S and not os.path.isdir(f"/proc/{status.get('process')}")
    return age_s > STALE_S


def list_logs(run_dir: Path) -> list[Path]:
    """Return the directories with the logs of the starts, in order. The last part of each is the number of a start."""
    found = [path for path in (run_dir / LOGS).glob("*") if path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name))


def read_rows(path: Path, most_bytes: int = MOST_ROWS_BYTES) -> list[dict[str, Any]]:
    """Return the last readable lines of `RESTARTS`, `METRICS` or `TIMELINE`; [] without a file. Raises OSError."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
            lines = file.read(most_bytes).splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        with suppress(ValueError):  # the last line of a writer that was killed
            rows.append(parse_json(line))
    return [row for row in rows if fits(row, _SHAPES.get(path.name, {}))]


def count_lines(path: Path) -> int:
    """Return the number of lines of a file; 0 if it does not exist. Raises OSError."""
    try:
        return read_bytes(path).count(b"\n")
    except FileNotFoundError:
        return 0


def add_line(path: Path, line: str) -> None:
    """Appends a line to a file, on a new line even if the last one was cut short. Raises OSError."""
    with open(path, "ab+", opener=open_regular) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read() == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())
