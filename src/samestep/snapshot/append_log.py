"""Append-only files of a run: `metrics.jsonl` and `ledger.bin`."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from samestep.files import open_regular, sync_directory
from samestep.plan.ledger import Entry


class AppendLog:
    """A file of records that only grows. When a run resumes, it is truncated to the end of the snapshot's records.

    Records are buffered, so a full disk never fails a step. Records that could not be written are kept and written
    later.

    Args:
        flush_s: the longest time for which records are buffered, as long as more are appended.
        record_bytes: size of a record; 0 for lines.

    Attributes:
        problem: why the last attempt to write failed; "" if it succeeded.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, flush_s: float, record_bytes: int = 0) -> None:
        is_new = not path.exists()
        self._file = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._flush_s = flush_s
        self._record_bytes = record_bytes
        self._pending = bytearray()
        self._flushed_at = monotonic()
        self.problem = ""
        self.path = path
        self._size = os.fstat(self._file).st_size
        if is_new:
            sync_directory(path.parent)

    @property
    def num_pending(self) -> int:
        """The number of records that are not completely in the file."""
        return -(-len(self._pending) // self._record_bytes) if self._record_bytes else self._pending.count(b"\n")

    def append(self, records: bytes) -> None:
        """Add records, and write all pending ones if the last write is `flush_s` ago. Does not raise OSError."""
        self._pending += records
        if monotonic() - self._flushed_at >= self._flush_s:
            try:
                self.flush()
            except OSError as error:
                self._flushed_at = monotonic()
                self.problem = str(error.strerror)

    def flush(self) -> int:
        """Write all pending records to the file, without waiting for the disk. Return its size in bytes.

        Raises:
            OSError: they could not all be written; the rest stays pending.
        """
        while self._pending:
            # A full disk can cut a write short. The rest stays pending, so that no record is torn or written twice.
            num_written = os.write(self._file, self._pending)
            self._size += num_written
            del self._pending[:num_written]
        self._flushed_at = monotonic()
        self.problem = ""
        return self._size

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
            self._size = size
            os.fsync(self._file)
        return is_whole

    def close(self) -> None:
        """Write pending records and close the file. A second call does nothing."""
        if self._file < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._file)
            self._file = -1


class StepRecords:
    """Records finished steps. The record of the last one can wait until its gradient is computed."""

    _get_entry: Callable[[], Entry | None] | None = None

    def enter(self, get_entry: Callable[[], Entry | None], *, is_late: bool = False) -> None:
        """Record a finished step.

        Args:
            get_entry: returns the record; None if the run has ended before it was known.
            is_late: call `get_entry` at the next call or `record_last`, so that it does not wait.
        """
        if self._get_entry is not None:
            self.record_last()
        if is_late:
            self._get_entry = get_entry
        elif (entry := get_entry()) is not None:
            self._record(entry)

    def record_last(self) -> None:
        """Record a step that waits."""
        get_entry = self._get_entry
        self._get_entry = None
        entry = None if get_entry is None else get_entry()
        if entry is not None:
            self._record(entry)

    def _record(self, entry: Entry) -> None:
        raise NotImplementedError


def format_row(row: Mapping[str, Any]) -> bytes:
    """Return a row of metrics as one line of JSON, with the keys in the row's order.

    Floats are written by repr and read back to the bit. nan and the infinities, which JSON lacks, become the strings
    "nan", "inf" and "-inf". One-element tensors and NumPy scalars become Python numbers (for a CUDA tensor this
    synchronizes with the device). Other types become their str.
    """
    values = {str(key): _to_scalar(value) for key, value in row.items()}
    return json.dumps(values, allow_nan=False).encode() + b"\n"


def _to_scalar(value: Any) -> str | int | float | bool | None:
    if not isinstance(value, (str, int, float, bool, type(None))):
        try:
            value = value.item()  # tensors, and arrays and scalars of NumPy
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    return value if isinstance(value, (str, int, type(None))) else str(value)
