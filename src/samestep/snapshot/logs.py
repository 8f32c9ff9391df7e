"""The logs of a run: `metrics.jsonl`, a row per line, and `ledger.bin`, a record per step.

The rank that writes the run appends to them. Other ranks keep the last rows and records in memory, so that one of them
can take its place.
"""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from time import monotonic
from typing import Any

from samestep.decoding import parse_json
from samestep.errors import NotHealed
from samestep.files import open_regular, read_last_bytes, sync_directory
from samestep.plan.ledger import RECORD, Entry

MAX_KEPT = 10_000  # rows, and records: the writer's files are at most a second old
MAX_READ_BYTES = 64 << 20  # of the rows of a start, which may be many: the last ones
NUM_READ = 1 << 16  # records at a time
LEDGER_FLUSH_S = 0.1  # a restart counts the steps that a crash lost by the ledger


class AppendLog:
    """A file of records that only grows. When a run resumes, it is truncated to the end of the snapshot's records.

    Records are buffered, so a full disk never fails a step. Records that could not be written are kept and written
    later.

    Args:
        warn: prints a message, once.
        flush_s: the longest time for which records are buffered, as long as more are appended.
        record_bytes: size of a record; 0 for lines.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], *, flush_s: float, record_bytes: int = 0) -> None:
        is_new = not path.exists()
        self._file = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._warn = warn
        self._has_warned = False
        self._flush_s = flush_s
        self._record_bytes = record_bytes
        self._pending = bytearray()
        self._flushed_at = monotonic()
        self.path = path
        if is_new:
            sync_directory(path.parent)

    def append(self, records: bytes) -> None:
        """Add records, and write all pending ones if the last write is `flush_s` ago. Does not raise OSError."""
        self._pending += records
        if monotonic() - self._flushed_at >= self._flush_s:
            try:
                self.flush()
            except OSError as error:
                self._flushed_at = monotonic()
                if not self._has_warned:
                    self._has_warned = True
                    self._warn(
                        f"{self.path} cannot be written ({error.strerror}): its new entries are kept in memory until "
                        "it can be written, and the run continues"
                    )

    def flush(self) -> int:
        """Write all pending records to the file, without waiting for the disk. Return its size in bytes.

        Raises:
            OSError: they could not all be written; the rest stays pending.
        """
        while self._pending:
            # A full disk can cut a write short. The rest stays pending, so that no record is torn or written twice.
            num_written = os.write(self._file, self._pending)
            del self._pending[:num_written]
        self._flushed_at = monotonic()
        return os.fstat(self._file).st_size

    def sync(self) -> None:
        """Wait until the written records are on the disk. Another thread may append meanwhile. Raises OSError."""
        os.fsync(self._file)

    def cut(self, size: int) -> bool:
        """Truncate the file to `size` bytes. Return False if it was shorter.

        A ledger that was shorter is filled up with zeros, so that later records keep their places.
        """
        is_whole = self.flush() >= size
        if is_whole or self._record_bytes:
            os.ftruncate(self._file, size)
            os.fsync(self._file)
        return is_whole

    def close(self) -> None:
        """Write pending records and close the file."""
        try:
            self.flush()
        finally:
            os.close(self._file)
            self._file = -1  # another thread may sync it once more


class StepRecords:
    """Records finished steps, those of `LEDGER_FLUSH_S` together: in a loop, records take less time.

    Attributes:
        waiting: for each of these steps, returns its record; for the last one None, as long as it is not known.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Entry | None]] = []
        self._recorded_s = monotonic()

    def enter(self, get_entry: Callable[[], Entry | None]) -> None:
        """Record a finished step, at a later call or `record_known`.

        Args:
            get_entry: returns the record; None as long as it is not known, since the gradient may not be computed yet.
        """
        if monotonic() - self._recorded_s >= LEDGER_FLUSH_S:
            self.record_known()
        self.waiting.append(get_entry)

    def record_known(self) -> None:
        """Record the steps that wait, if their records are known."""
        self._recorded_s = monotonic()
        entries = [entry for get_entry in self.waiting if (entry := get_entry()) is not None]
        del self.waiting[: len(entries)]
        self._record(entries)

    def _record(self, entries: Sequence[Entry]) -> None:
        """Keep records."""


def format_row(row: Mapping[str, Any]) -> bytes:
    """Return a row of metrics as one line of JSON, with the keys in the row's order.

    Floats are written by repr and read back to the bit. nan and the infinities, which JSON lacks, become the strings
    "nan", "inf" and "-inf". One-element tensors and NumPy scalars become Python numbers (for a CUDA tensor this
    synchronizes with the device). Other types become their str.
    """
    return json.dumps({str(key): _to_scalar(value) for key, value in row.items()}, allow_nan=False).encode() + b"\n"


def _to_scalar(value: Any) -> str | int | float | bool | None:
    if not isinstance(value, (str, int, float, bool, type(None))):
        try:
            value = value.item()  # tensors, and arrays and scalars of NumPy
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    return value if isinstance(value, (str, int, type(None))) else str(value)


@dataclass(frozen=True)
class Heal:
    """A death of ranks after which the others have continued without a new start.

    Attributes:
        step: in which ranks were lost.
        lost: these ranks, as numbered at the start.
        world_size: number of ranks that continue.
        seconds: the time until they were a group.
    """

    step: int
    lost: Sequence[int]
    world_size: int
    seconds: float


class KeptLogs(StepRecords):
    """The last rows of metrics and records of the ledger, as the writer of the run appends them.

    Every rank computes the same rows and records, so whoever lives can complete the files of a writer that has died.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heals: list[Heal] = []  # of this start: the writer may not record the last ones before it dies
        self._rows: deque[tuple[int, bytes]] = deque(maxlen=MAX_KEPT)  # step, line
        self._records: deque[tuple[int, bytes]] = deque(maxlen=MAX_KEPT)
        self._num_earlier_bytes = 0

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Keep a row. It has a "step"."""
        self._rows.append((row["step"], format_row(row)))

    def _record(self, entries: Sequence[Entry]) -> None:
        self._records.extend((entry.step, RECORD.pack(*entry)) for entry in entries)

    def resume(self, num_bytes: int) -> None:
        """Forget the rows so far, because an earlier start has written them.

        Args:
            num_bytes: size of the rows that earlier starts have written.
        """
        self._rows.clear()
        self._num_earlier_bytes = num_bytes

    def get_rows(self, after_step: int) -> list[dict[str, Any]]:
        """Return the rows after a step."""
        return [parse_json(line) for step, line in self._rows if step > after_step]

    def complete(self, metrics: AppendLog, ledger: AppendLog, steps_done: int) -> None:
        """Make the writer's files what this rank would have written.

        They may lack what the writer had not written yet, end with a part of it, or be ahead by a step.

        Args:
            metrics, ledger: the files.
            steps_done: the number of steps that this rank has finished.

        Raises:
            NotHealed: a file ends before what is kept begins.
            OSError: they cannot be written.
        """
        self.record_known()
        # With divided gradients, the next exchange completes the last record.
        num_known = steps_done - len(self.waiting)
        num_recorded = min(ledger.flush() // RECORD.size, num_known)
        missing = [record for step, record in self._records if num_recorded <= step < num_known]
        if len(missing) != num_known - num_recorded:
            raise NotHealed("the ledger lacks steps that no other rank has kept")
        ledger.cut(num_recorded * RECORD.size)
        ledger.append(b"".join(missing))
        ledger.flush()
        size = metrics.flush()
        num_bytes = max(size - self._num_earlier_bytes, 0)
        data = read_last_bytes(metrics.path, min(num_bytes, MAX_READ_BYTES))
        rows = data[: data.rfind(b"\n") + 1]  # the last one may be torn
        lines = rows.splitlines(keepends=True)
        if len(data) < num_bytes:
            del lines[:1]  # its beginning may be missing
        lines = lines[-MAX_KEPT:]
        steps = [parse_json(line)["step"] for line in lines]
        # From the last step of which both have rows on, those of this rank replace those in the file.
        at = min(max([steps_done, *(step for step, _ in self._rows)]), max(steps, default=-1))
        if len(self._rows) == MAX_KEPT and at <= self._rows[0][0]:
            raise NotHealed("the metrics lack rows that no other rank has kept")
        is_kept = any(step == at for step, _ in self._rows)
        replaced = [line for step, line in zip(steps, lines, strict=True) if step > at or (step == at and is_kept)]
        metrics.cut(size - len(data) + len(rows) - sum(map(len, replaced)))
        metrics.append(b"".join(line for step, line in self._rows if step >= at))
        metrics.flush()


def count_records(ledger: Path) -> int:
    """Return the number of complete records in a file; 0 if it does not exist."""
    return ledger.stat().st_size // RECORD.size if ledger.exists() else 0


def read_records(ledger: Path, *, first: int = 0) -> Iterator[Entry]:
    """Yield the complete records of a file from one on; none if the file does not exist. Raises OSError."""
    if not ledger.exists():
        return
    with open(ledger, "rb", opener=open_regular) as file:
        file.seek(first * RECORD.size)
        while len(data := file.read(NUM_READ * RECORD.size)) >= RECORD.size:
            yield from starmap(Entry, RECORD.iter_unpack(data[: len(data) // RECORD.size * RECORD.size]))
