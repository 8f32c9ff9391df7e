"""The run's numbers, one JSON line per row: `metrics.jsonl`."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from samestep.files import open_regular

FLUSH_EVERY_S = 1.0


class Metrics:
    """An append-only file of rows, cut back to a snapshot on resuming so that no line stands in it twice.

    Rows should hold nothing that differs between two equal runs (no times, no rates): the file is then the
    same, byte for byte, whatever happened to the run on its way.

    Attributes:
        problem: why the last attempt to write failed; "" where it did not.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        is_new = not path.exists()
        self._file = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._pending = bytearray()
        self.problem = ""
        self._flushed_at = monotonic()
        if is_new:
            _sync_directory(path.parent)

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds one line, keys in the row's order.

        Floats are written by repr, so that they are read back to the bit; nan and the infinities, which JSON
        lacks, as the strings "nan", "inf" and "-inf". One-element tensors and numpy scalars become Python
        numbers (for a GPU's tensor this waits for the GPU). Other types become their str.

        Never raises for a full disk: the line is kept and tried again, and `position` raises.
        """
        line = json.dumps({str(key): _plain(value) for key, value in row.items()}, allow_nan=False)
        self._pending += line.encode() + b"\n"
        if monotonic() - self._flushed_at >= FLUSH_EVERY_S:  # for whoever watches the file grow
            try:
                self._flush()
            except OSError as error:
                self._flushed_at, self.problem = monotonic(), str(error.strerror)

    @property
    def num_left(self) -> int:
        """The rows that are not in the file, or not whole."""
        return self._pending.count(b"\n")

    def extend(self, rows: bytes) -> None:
        """Adds lines as they stand in a file of another."""
        self._pending += rows

    def position(self) -> int:
        """Writes everything to the file and returns its length in bytes; `sync` brings it to the disk.

        Raises:
            OSError: it could not be written; the rows are kept and tried again.
        """
        self._flush()
        return os.fstat(self._file).st_size

    def sync(self) -> None:
        """Waits until what was written is on the disk. Any thread may, beside `append`. Raises OSError."""
        os.fsync(self._file)

    def cut(self, offset: int) -> bool:
        """Drops everything past `offset`, an earlier `position`; False if the file is shorter than that."""
        self._flush()
        if os.fstat(self._file).st_size < offset:
            return False
        os.ftruncate(self._file, offset)
        os.fsync(self._file)
        return True

    def close(self) -> None:
        """Writes what is left and closes the file. A second call does nothing."""
        if self._file < 0:
            return
        try:
            self._flush()
        finally:
            os.close(self._file)
            self._file = -1

    def _flush(self) -> None:
        while self._pending:
            # A full disk may cut a write short; what did not go stays pending, so no line is torn or doubled.
            num_written = os.write(self._file, self._pending)
            del self._pending[:num_written]
        self._flushed_at, self.problem = monotonic(), ""


def _plain(value: Any) -> str | int | float | bool | None:
    """The JSON scalar that stands for a value."""
    if not isinstance(value, (str, int, float, bool, type(None))):
        try:
            value = value.item()  # tensors, arrays and scalars of numpy
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    return value if isinstance(value, (str, int, type(None))) else str(value)


def _sync_directory(path: Path) -> None:
    """Makes a new file's name in the directory survive a power cut."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
