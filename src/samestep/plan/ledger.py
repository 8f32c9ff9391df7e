"""The ledger's records: fingerprints of the samples that each step used.

`ledger.bin` holds one `RECORD` per finished step, step `s` of the run (counted from 0) at byte `s * RECORD.size`.
A fingerprint depends on the indices and their order, never on the ranks: each rank computes those of its own
micro-batches, and one rank combines them.
"""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RECORD = struct.Struct("<QIIQ")  # step, epoch, number of samples, fingerprint


def fingerprint(indices: NDArray[np.int64]) -> int:
    """Return a 64-bit hash of the sample indices of one micro-batch in their order."""
    return _hash(np.ascontiguousarray(indices, dtype="<i8").tobytes())


def combine(fingerprints: Sequence[int]) -> int:
    """Return the fingerprint of a step from those of its micro-batches, in order."""
    return _hash(struct.pack(f"<{len(fingerprints)}Q", *fingerprints))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
