"""Reads `ledger.bin`: the record of step `s` of the run is at byte `s * RECORD.size`."""

from collections.abc import Iterator
from itertools import starmap
from pathlib import Path

from samestep.files import open_regular
from samestep.plan.ledger import RECORD, Entry

NUM_READ = 1 << 16  # records at a time


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
            whole = data[: len(data) // RECORD.size * RECORD.size]
            yield from starmap(Entry, RECORD.iter_unpack(whole))
