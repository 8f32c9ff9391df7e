"""The ledger's records: a fingerprint of the samples that each step used, and the bits of its loss and gradient.

The fingerprint of a micro-batch is `hash_short` of its sample indices in their order, so it does not depend on the
ranks: each rank computes those of its own micro-batches, and one rank combines them.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from samestep.hashing import hash_short

RECORD = struct.Struct("<QIIQQQ")  # the fields of `Entry`
UNKNOWN = 2**64 - 1  # loss and gradient of a step that was not computed. As a loss, a nan that no computation gives.


class Entry(NamedTuple):
    """A record.

    Attributes:
        num_samples: 0 if the record is missing: a resumed run fills a truncated file with zeros.
        fingerprint: fingerprint of the samples, see `combine`.
        loss: the 64 bits of the loss, averaged over the batch; the bits of nan if no micro-batch counted.
        gradient: the checksum of the reduced gradient before the script changes it.
    """

    step: int
    epoch: int
    num_samples: int
    fingerprint: int
    loss: int = UNKNOWN
    gradient: int = UNKNOWN

    @property
    def has_bits(self) -> bool:
        """Return whether loss and gradient are known."""
        return (self.loss, self.gradient) != (UNKNOWN, UNKNOWN) and self.num_samples > 0


def to_bits(number: float) -> int:
    """Return the 64 bits of a float."""
    return int.from_bytes(struct.pack("<d", number), "little")


def to_float(bits: int) -> float:
    """Return the float of 64 bits."""
    return float(struct.unpack("<d", bits.to_bytes(8, "little"))[0])


def combine(fingerprints: Sequence[int]) -> int:
    """Return the fingerprint of a step from those of its micro-batches, in order."""
    return hash_short(struct.pack(f"<{len(fingerprints)}Q", *fingerprints))
