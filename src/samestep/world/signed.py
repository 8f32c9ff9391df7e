"""Values that are signed with a key: pickles that ranks exchange, and JSON entries of the rendezvous store."""

import hmac
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import to_builtins

from samestep.decoding import decode
from samestep.errors import Error

T = TypeVar("T")

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


class SignedEntries:
    """Signed entries of a store, each with a value that is written as JSON.

    Everything that reaches the store's port can write to it, so entries are signed with a key that only the ranks, or
    they and their launcher, have.

    Calls on one connection to a store wait for each other, so that each thread needs one of its own.
    """

    def __init__(self, key: bytes, store: Any) -> None:
        self._store = store
        self._key = key

    def put(self, name: str, value: Any) -> None:
        """Write the entry `name`, replacing an earlier one. Raises RuntimeError if the store has closed."""
        text = json.dumps(to_builtins(value)).encode()
        self._store.set(f"samestep/{name}", self._sign(name, text) + text)

    def get(self, name: str, kind: type[T]) -> T | None:
        """Read the entry `name`; None if it does not exist, or its signature is wrong. Raises as `read`."""
        found = self.read([name], kind)
        return found[0] if found else None

    def read(self, names: Sequence[str], kind: type[T]) -> list[T] | None:
        """Read the entries `names`, without those whose signature is wrong; None if one does not exist yet.

        Raises:
            RuntimeError: the store has closed.
            ValueError: another version of samestep has written an entry.
        """
        keys = [f"samestep/{name}" for name in names]
        if not keys:
            return []
        if not self._store.check(keys):
            return None
        values = [bytes(value) for value in self._store.multi_get(keys)]
        return [
            decode(value[MAC_BYTES:], kind)
            for name, value in zip(names, values, strict=True)
            if hmac.compare_digest(value[:MAC_BYTES], self._sign(name, value[MAC_BYTES:]))
        ]

    def _sign(self, name: str, text: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + text, "sha256")
