"""The results of the collectives before the first step, for a rank that joins the others later.

Such a rank runs the script's lines before the loop alone. Each of its collectives has the result that it had for the
others, so that these lines do the same, and a function given to `run.once` is not called again.
"""

import hmac
import secrets
from collections.abc import Sequence
from typing import Any

from samestep.errors import NotHealed
from samestep.world import wire

TRANSCRIPT = "samestep/heal/transcript"
KEY_BYTES = 32


class Transcript:
    """The results of collectives, in their order.

    Args:
        results: for each collective so far, its name and its result, encoded.
    """

    def __init__(self, results: Sequence[tuple[str, bytes]] = ()) -> None:
        self._results = [*results]
        self._num_read = 0

    def add(self, name: str, result: Any) -> None:
        """Add the result of a collective."""
        self._results.append((name, wire.encode(result)))

    def read(self, name: str, alone: Any) -> Any:
        """Return the next result.

        Args:
            name: of the collective.
            alone: the result after the last one, as if all ranks had this rank's values.

        Raises:
            NotHealed: the others have called another collective.
        """
        if self._num_read == len(self._results):
            return alone
        recorded, result = self._results[self._num_read]
        if recorded != name:
            raise NotHealed("the script's lines before the loop make other calls of the run than at the start")
        self._num_read += 1
        return wire.decode(result)

    def pack(self, secret: bytes, key: bytes, *, is_on_one_host: bool) -> bytes:
        """Return the transcript for the store, which others than the ranks can read and write.

        Args:
            secret: of the ranks and their launcher. Signs the bytes, and encrypts the key.
            key: of the ranks, `KEY_BYTES` long.
            is_on_one_host: whether all ranks ran on one host at the start.
        """
        nonce = secrets.token_bytes(KEY_BYTES)
        data = wire.encode([nonce, _encrypt(secret, nonce, key), is_on_one_host, self._results])
        return hmac.digest(secret, data, "sha256") + data

    @classmethod
    def unpack(cls, data: bytes, secret: bytes) -> tuple["Transcript", bytes, bool]:
        """Return the transcript, and the `key` and `is_on_one_host` that `pack` got.

        Raises:
            NotHealed: the bytes are not signed with the secret.

        Example::

            >>> transcript = Transcript()
            >>> transcript.add("gather", [1, 2])
            >>> packed = transcript.pack(b"secret", b"k" * 32, is_on_one_host=True)
            >>> read, *others = Transcript.unpack(packed, b"secret")
            >>> read.read("gather", [7, 7]), read.read("gather", [7, 7]), others == [b"k" * 32, True]
            ([1, 2], [7, 7], True)
        """
        mac, text = data[:KEY_BYTES], data[KEY_BYTES:]
        if not hmac.compare_digest(mac, hmac.digest(secret, text, "sha256")):
            raise NotHealed("the ranks' transcript in the store is not signed by them")
        nonce, encrypted, is_on_one_host, results = wire.decode(text)
        return cls(results), _encrypt(secret, nonce, encrypted), is_on_one_host


def _encrypt(secret: bytes, nonce: bytes, key: bytes) -> bytes:
    """Encrypt or decrypt a key with a one-time pad that is derived from the secret."""
    pad = hmac.digest(secret, b"key" + nonce, "sha256")
    return bytes(a ^ b for a, b in zip(key, pad, strict=True))
