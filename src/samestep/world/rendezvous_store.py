"""JSON values that ranks exchange through the rendezvous store, without a collective: signed entries, and others."""

import hmac
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch.distributed as dist
from msgspec import to_builtins

from samestep.decoding import decode
from samestep.processes import wait_until
from samestep.world.environment import Environment, has_agent_store, read_master

T = TypeVar("T")

MAC_BYTES = 32
POLL_S = 0.002
GATHER_S = 8.0


def is_first(name: str) -> bool:
    """Return whether this rank is the first to request `name`. On all ranks, if no store outlives each of them."""
    with suppress(RuntimeError):
        if dist.is_available() and dist.is_initialized() and has_agent_store():
            store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
            return bool(store.add(f"samestep/{name}", 1) == 1)
    return True


class SignedEntries:
    """Signed entries of a store, each with a value that is written as JSON.

    Everything that reaches the store's port can write to it, so entries are signed with a key that only the ranks, or
    they and their launcher, have.

    Args:
        store: None: a separate connection to that of the process group, for a background thread. Calls on one
            connection wait for each other.
    """

    def __init__(self, key: bytes, store: Any = None) -> None:
        if store is None:
            store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # noqa: SLF001
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


class StoreExchange:
    """Exchanges JSON values between all ranks. With one rank the values stay in this process.

    Raises OSError if MASTER_ADDR or MASTER_PORT is not set, RuntimeError if the store cannot be reached in time.
    """

    def __init__(self, environment: Environment, timeout_s: float) -> None:
        self.rank = environment.rank
        self.local_rank = environment.local_rank
        self.world_size = environment.world_size
        self._numbers = count()  # of calls of `gather`
        self._store: Any = dist.HashStore()  # type: ignore[attr-defined]
        if self.world_size > 1:
            host, port = read_master()
            is_host = self.rank == 0 and not has_agent_store()
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, self.world_size, is_host, timedelta(seconds=timeout_s), False, multi_tenant=True
            )

    def post(self, name: str, value: Any) -> None:
        """Publish this rank's value under `name`."""
        self._store.set(self._key(name, self.rank), json.dumps(value))

    def collect(self, name: str, timeout_s: float, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Return the values of `ranks` (None: all) under `name`. Ranks that post nothing in time are left out."""
        keys = {rank: self._key(name, rank) for rank in (range(self.world_size) if ranks is None else ranks)}
        wait_until(lambda: self._store.check([*keys.values()]), timeout_s, every_s=POLL_S)
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}  # noqa: TID251 messages of ranks

    def exchange(self, name: str, value: Any, timeout_s: float, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """`post`, then `collect`."""
        self.post(name, value)
        return self.collect(name, timeout_s, ranks)

    def gather(self, value: Any) -> list[Any]:
        """As `Group.gather`. Raises RuntimeError if a rank does not call it in time."""
        answers = self.exchange(f"gather/{next(self._numbers)}", value, GATHER_S)
        if missing := [rank for rank in range(self.world_size) if rank not in answers]:
            raise RuntimeError(f"rank {missing[0]} did not answer within {GATHER_S:g} s")
        return [*answers.values()]

    def _key(self, name: str, rank: int) -> str:
        return f"samestep/exchange/{name}/{rank}"
