"""The files of a run directory besides its snapshots: their names, and readers for those that describe its state."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from samestep.decoding import Argument, Count, Number, Object, Size, convert, decode, parse_json
from samestep.files import open_regular, read_bytes, read_last_bytes
from samestep.plan.tree import MAX_MICRO_BATCHES
from samestep.watch.beats import Beat
from samestep.world.environment import FAILURE, read_host

LOCK = "lock"  # the process that writes the run
RECORD = "run.json"  # the run's identity, and how it changed
RANKS = "ranks.json"  # the live state of every rank, written by rank 0
STATUS = "status.json"  # whether the run is running, and how it ended
RESTARTS = "restarts.jsonl"  # one line for each start but the first: time, reason, first step
HEALS = "heals.jsonl"  # one line each time that ranks died and the others continued
METRICS = "metrics.jsonl"  # one line for each logged row
TRACKERS = "trackers.json"  # the run's id and last row at each service of a tracker
LEDGER = "ledger.bin"  # one record for each finished step: the samples it used
LOGS = "logs"  # a directory: the output of each start's ranks that are not shown
# What a copy has besides orders and snapshots. A copy begins with `RECORD`.
SHARED = (RECORD, RESTARTS, HEALS, STATUS, TRACKERS, LEDGER, METRICS)

STALE_S = 30.0  # a run without news for this long counts as dead

# What a table of these files shows.
RESTART_COLUMNS = ("time", "reason", "rank", "from_step", "lost_steps", "world_size")
HEAL_COLUMNS = ("time", "step", "lost", "world_size", "seconds")

MAX_ROWS_BYTES = 64 << 20
MAX_RANKS = 1 << 16  # in a row of `HEALS`


class _Script(Struct, frozen=True):
    arguments: list[Argument] = []
    file: Annotated[str, Meta(pattern=r"\A(?!\.\Z)[^/]*\Z")] = ""


class _Numbers(Struct, kw_only=True):
    data_length: Count = 0
    batch_size: Size = 1
    micro_batch_size: Size = 1
    seed: Annotated[int, Meta(ge=0)] = 0
    num_threads: Count = 0
    precision: Argument = ""
    first_step: Count = 0
    first_epoch: Count = 0

    def __post_init__(self) -> None:
        if self.batch_size // self.micro_batch_size > MAX_MICRO_BATCHES:
            raise ValueError(f"a step has more than {MAX_MICRO_BATCHES} micro-batches")


class _Change(Struct):
    after_step: Count
    changed: str


class _Continued(Struct):
    run: str
    snapshot: int | str
    step: Count
    begins: list[tuple[Count, Count, Count, Count]] = []


class _Record(Struct):
    format: Count = 0
    numbers: _Numbers | UnsetType = UNSET
    machine: Object = {}
    config: Object = {}
    git: Object = {}
    script: _Script = _Script()
    settings: Object = {}
    asked: Object = {}
    rewinds: list[Count] = []
    loops: list[_Numbers] = []
    changes: list[_Change] = []
    continues: _Continued | None = None


class _Measured(Struct):
    samples_per_s: Number = 0.0
    wall_s: Number = 0.0
    time_share: dict[str, Number] = {}


class _Status(Struct):
    status: str = ""
    reason: str = ""
    host: str = ""
    process: Count = 0
    steps: Count = 0
    start: Count = 0
    lost: str = ""
    measured: _Measured | UnsetType = UNSET


class _Service(Struct):
    id: str
    num_rewinds: Count
    step: int = -1
    names: list[str] = []


class _Heal(Struct):
    step: Count
    lost: Annotated[list[Count], Meta(max_length=MAX_RANKS)]
    start: Count = 0


class RankStates(Struct, frozen=True):
    """The content of `RANKS`."""

    time_s: Number
    ranks: list[Beat]


_KINDS: dict[str, Any] = {
    RECORD: _Record,
    STATUS: _Status,
    TRACKERS: dict[str, _Service],
    FAILURE: defstruct("Failure", [("rank", Count), ("reason", str)]),
    RESTARTS: defstruct("Restart", [("reason", str), ("from_step", Count)]),
    HEALS: _Heal,
    METRICS: Object,
}


def parse_record(name: str, text: bytes) -> dict[str, Any]:
    """Parse one of these files, with entries of later versions. Raises ValueError if it is damaged."""
    record: dict[str, Any] = parse_json(text)
    convert(record, _KINDS[name])
    return record


def read_or_empty(path: Path) -> dict[str, Any]:
    """`parse_record`; {} if the file does not exist or is damaged."""
    try:
        return parse_record(path.name, read_bytes(path))
    except (OSError, ValueError):
        return {}


def read_ranks(directory: Path) -> RankStates | None:
    """Return the content of `ranks.json` of a run; None if it does not exist or is damaged."""
    try:
        return decode(read_bytes(directory / RANKS), RankStates)
    except (OSError, ValueError):
        return None


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
    """Return whether the run has ended. False while it has news, and while a launcher may restart it."""
    if read_or_empty(run_dir / STATUS).get("status") in ("done", "stopped"):
        return True
    paths = [path for name in (RANKS, STATUS) if (path := run_dir / name).exists()]
    return time.time() - max([path.stat().st_mtime for path in paths], default=0.0) > STALE_S


def list_logs(run_dir: Path) -> list[Path]:
    """Return the directories with the logs of the starts, in order. The name of each is the number of a start."""
    found = [path for path in (run_dir / LOGS).glob("*") if path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the last readable lines of `RESTARTS`, `HEALS` or `METRICS`; [] without a file. Raises OSError."""
    try:
        lines = read_last_bytes(path, MAX_ROWS_BYTES).splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        with suppress(ValueError):  # such as the last line of a writer that was killed
            rows.append(parse_record(path.name, line))
    return rows


def count_lines(path: Path) -> int:
    """Return the number of lines of a file; 0 if it does not exist. Raises OSError."""
    try:
        return read_bytes(path).count(b"\n")
    except FileNotFoundError:
        return 0


def add_line(path: Path, line: str) -> None:
    """Append a line to a file, on a new line even if the last one was cut short. Raises OSError."""
    with open(path, "ab+", opener=open_regular) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read() == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())
