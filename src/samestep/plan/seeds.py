"""Seeds from `(seed, purpose, step, pass, micro-batch)`, never from the rank.

The micro-batch is the unit of randomness: whichever rank computes it seeds its generators alike.
"""

from hashlib import blake2b
from struct import Struct

PURPOSES = ("init", "order", "epoch", "step", "data", "compute", "after", "evaluate")

_PERSONS = {purpose: purpose.encode() for purpose in PURPOSES}
_pack = Struct("<QQQQ").pack
_MASK_64 = 2**64 - 1


def derive(seed: int, purpose: str, *, step: int = 0, pass_: int = 0, micro_batch: int = 0) -> int:
    """A seed in 0..2**63-1 for one purpose at one place of a run; about 1 us.

    BLAKE2b over the packed fields (Aumasson et al. 2013, "BLAKE2: simpler, smaller, fast as MD5"), with the
    purpose as its personalisation: neighbouring steps and purposes share no structure, and the value is the
    same on every machine. A run's seed counts modulo 2**64.

    torch's CPU generator looks at the low 32 bits of a seed alone, so that among 65,536 micro-batches a pair
    shares its stream there with a chance of 0.4.

    Raises:
        ValueError: `purpose` is not one of `PURPOSES`.
    """
    person = _PERSONS.get(purpose)
    if person is None:
        raise ValueError(f"purpose {purpose!r} is none of {', '.join(PURPOSES)}")
    fields = _pack(seed & _MASK_64, step, pass_, micro_batch)
    return int.from_bytes(blake2b(fields, digest_size=8, person=person).digest(), "little") >> 1
