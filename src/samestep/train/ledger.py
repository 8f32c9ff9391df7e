"""The ledger's file, as rank 0 writes it."""

import os
import time
from pathlib import Path

from samestep.files import open_regular
from samestep.plan.ledger import RECORD

FLUSH_S = 0.1


class Ledger:
    """`ledger.bin`: what each finished step used. Raises OSError where the file cannot be opened.

    Attributes:
        num_steps: the records that were found.
        problem: why the last attempt to write failed; "" where it did not.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._pending = bytearray()
        self.problem = ""
        self.num_steps = os.fstat(self._file).st_size // RECORD.size
        self._flushed_s = time.monotonic()

    def cut(self, num_steps: int) -> bool:
        """Keeps the first `num_steps` records. False where there are fewer."""
        size = num_steps * RECORD.size
        is_whole = os.fstat(self._file).st_size >= size
        os.ftruncate(self._file, size)
        return is_whole

    def append(self, step: int, epoch: int, num_samples: int, fingerprint: int) -> None:
        """Adds a record. Never raises for a full disk: it is kept and tried again, and `sync` raises.

        It is written within `FLUSH_S`: who starts the run again after a crash counts the steps that were lost.
        """
        self._pending += RECORD.pack(step, epoch, num_samples, fingerprint)
        if time.monotonic() - self._flushed_s >= FLUSH_S:  # a write costs more than everything else here
            self._flushed_s = time.monotonic()
            try:
                self.flush()
            except OSError as error:
                self.problem = str(error.strerror)

    def sync(self) -> None:
        """Waits until what was written is on the disk. Any thread may, beside `append`. Raises OSError."""
        os.fsync(self._file)

    @property
    def num_left(self) -> int:
        """The records that are not in the file, or not whole."""
        return -(-len(self._pending) // RECORD.size)

    def close(self) -> None:
        """Writes what is left and closes the file."""
        try:
            self.flush()
        finally:
            os.close(self._file)

    def flush(self) -> None:
        """Writes all records to the file. Raises OSError where that cannot be done."""
        while self._pending:
            # A full disk may cut a write short: what did not go stays.
            del self._pending[: os.write(self._file, self._pending)]
        self.problem = ""
