"""The ledger's records: fingerprints of the samples that each step used.

`ledger.bin` holds one `RECORD` per finished step, step `s` of the run (counted from 0) at byte `s * RECORD.size`.
A fingerprint depends on the indices and their order, never on the ranks: each rank computes those of its own
micro-batches, and one rank combines them.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from samestep.files import open_regular

NUM_READ = 1 << 16  # records at a time
RECORD = struct.Struct("<QIIQ")  # step, epoch, number of samples, fingerprint


def fingerprint(indices: NDArray[np.int64]) -> int:
    """Return a 64-bit hash of the sample indices of one micro-batch in their order."""
    return _hash(np.ascontiguousarray(indices, dtype="<i8").tobytes())


def combine(fingerprints: Sequence[int]) -> int:
    """Return the fingerprint of a step from those of its micro-batches, in order."""
    return _hash(struct.pack(f"<{len(fingerprints)}Q", *fingerprints))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def count_records(ledger: Path) -> int:
    """Return the number of complete records in a file; 0 if it does not exist."""
    return ledger.stat().st_size // RECORD.size if ledger.exists() else 0


def read_records(ledger: Path) -> Iterator[tuple[int, int, int, int]]:
    """Yield the complete records of a file of any size; none if it does not exist. Raises OSError."""
    if not ledger.exists():
        return
    with open(ledger, "rb", opener=open_regular) as file:
        while len(data := file.read(NUM_READ * RECORD.size)) >= RECORD.size:
            yield from RECORD.iter_unpack(data[: len(data) // RECORD.size * RECORD.size])
