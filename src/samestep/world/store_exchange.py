"""Values that ranks exchange through the rendezvous store, for code that must work where no process group can."""

import json
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from samestep.world.environment import Environment, has_agent_store, read_master

POLL_S = 0.002


class StoreExchange:
    """Exchanges JSON values between all ranks. With one rank the values stay in this process.

    Raises OSError if MASTER_ADDR or MASTER_PORT is not set, RuntimeError if the store cannot be reached in time.
    """

    def __init__(self, environment: Environment, timeout_s: float) -> None:
        self.rank, self.world_size = environment.rank, environment.world_size
        self._own: dict[str, str] = {}
        self._store: Any = None
        if self.world_size > 1:
            host, port = read_master()
            is_host = self.rank == 0 and not has_agent_store()
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, self.world_size, is_host, timedelta(seconds=timeout_s), False, multi_tenant=True
            )

    def post(self, name: str, value: Any) -> None:
        """Publish this rank's value under `name`."""
        key, text = self._key(name, self.rank), json.dumps(value)
        if self._store is None:
            self._own[key] = text
        else:
            self._store.set(key, text)

    def collect(self, name: str, timeout_s: float, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Return the values of `ranks` (None: all) under `name`. Ranks that post nothing in time are left out."""
        keys = {rank: self._key(name, rank) for rank in (range(self.world_size) if ranks is None else ranks)}
        deadline_s = time.monotonic() + timeout_s
        while not self._has(*keys.values()) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return {rank: json.loads(self._read(key)) for rank, key in keys.items() if self._has(key)}

    def exchange(self, name: str, value: Any, timeout_s: float, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """`post`, then `collect`."""
        self.post(name, value)
        return self.collect(name, timeout_s, ranks)

    def _key(self, name: str, rank: int) -> str:
        return f"samestep/exchange/{name}/{rank}"

    def _has(self, *keys: str) -> bool:
        if self._store is None:
            return all(key in self._own for key in keys)
        return not keys or bool(self._store.check(list(keys)))

    def _read(self, key: str) -> str:
        return self._own[key] if self._store is None else bytes(self._store.get(key)).decode()
