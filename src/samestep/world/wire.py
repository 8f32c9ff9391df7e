"""The values that ranks exchange: pickled, and signed with a key that only the ranks have."""

import hmac
import pickle
from dataclasses import dataclass
from typing import Any

from samestep.errors import Error

MAC_BYTES = 32


@dataclass(frozen=True)
class Unsendable:
    """Stands for a value that cannot be pickled. `reason`: a sentence."""

    reason: str


def seal(value: Any, key: bytes) -> bytes:
    """Return the pickle of a value, with an HMAC under `key`."""
    data = pickle.dumps(value)
    return hmac.digest(key, data, "sha256") + data


def unseal(sealed: bytes | memoryview, key: bytes) -> Any:
    """Return the sealed value. Raises Error, and unpickles nothing, if it was sealed with another key."""
    data = sealed[MAC_BYTES:]
    if not hmac.compare_digest(sealed[:MAC_BYTES], hmac.digest(key, data, "sha256")):
        raise Error(
            "an object came from a rank that does not have the key of this launch: it is not unpickled", code="SS513"
        )
    return pickle.loads(data)
