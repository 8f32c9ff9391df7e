"""Texts that ranks leave for each other in the store that they have met in."""

import hmac
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from samestep.world.environment import has_agent_store, read_master

MAC_BYTES = 32


def _find_store() -> Any:
    """The store that the ranks have met in, where a launcher holds it, so that it outlives each of them."""
    if not (dist.is_available() and dist.is_initialized() and has_agent_store()):
        return None
    return dist.distributed_c10d._get_default_store()


def is_left_by_rank_0(within_s: float) -> bool:
    """Whether rank 0, where it holds the store itself, is gone within that time. (Of a store that is gone, torch
    would say so in pages on stderr.)"""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection(read_master(), timeout=within_s).close()
        except OSError:
            return True
        time.sleep(0.05)
    return False


def is_first(name: str) -> bool | None:
    """Whether this rank is the first of all to ask for `name`; None where there is no way to know."""
    with suppress(RuntimeError):
        return None if (store := _find_store()) is None else bool(store.add(f"samestep/{name}", 1) == 1)
    return None


def leave_note(name: str, text: str) -> None:
    """Leaves a text that other ranks can read without this one's help. It is there when this returns."""
    with suppress(RuntimeError):
        if (store := _find_store()) is not None:
            store.set(f"samestep/{name}", text)
            store.check([f"samestep/{name}"])  # waits for an answer, which `set` does not


def read_note(name: str) -> str | None:
    """What a rank left as `name`; None where there is nothing."""
    with suppress(RuntimeError):
        if (store := _find_store()) is not None and store.check([f"samestep/{name}"]):
            return bytes(store.get(f"samestep/{name}")).decode()
    return None


class Mail:
    """Texts that ranks leave for each other in the store that they have met in, over a connection of its own: for a
    thread beside the main one, whose calls would else wait for each other's.

    Whoever reaches the store's port can write into it, so that each text is signed.

    Args:
        key: known to the ranks alone.
    """

    def __init__(self, key: bytes) -> None:
        store: Any = dist.distributed_c10d._get_default_store()
        self._store, self._key = store.clone(), key

    def put(self, name: str, text: str) -> None:
        """Leaves `text` as `name`, over what is there. Raises RuntimeError where the store is gone."""
        self._store.set(f"samestep/{name}", self._sign(name, text.encode()) + text.encode())

    def read(self, names: Sequence[str]) -> list[str] | None:
        """What ranks left as `names`, less what no rank has signed; None where one of them is not there yet.

        Raises:
            RuntimeError: the store is gone.
        """
        keys = [f"samestep/{name}" for name in names]
        if not keys:
            return []
        if not self._store.check(keys):
            return None
        values = [bytes(value) for value in self._store.multi_get(keys)]
        return [
            value[MAC_BYTES:].decode()
            for name, value in zip(names, values, strict=True)
            if hmac.compare_digest(value[:MAC_BYTES], self._sign(name, value[MAC_BYTES:]))
        ]

    def _sign(self, name: str, text: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + text, "sha256")
