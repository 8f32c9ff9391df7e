"""Texts that ranks leave for one another in the store they meet in: for what must work where no group can be made."""

import json
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from samestep.world.environment import Environment, has_agent_store, read_master

POLL_S = 0.002


class Meeting:
    """All ranks, by what each of them says. With one rank nothing leaves the process.

    Args:
        environment: this rank's place.
        timeout_s: for how long to look for the store.

    Raises:
        OSError: nothing says where the store is.
        RuntimeError: it cannot be reached.
    """

    def __init__(self, environment: Environment, timeout_s: float) -> None:
        self.rank, self.world_size = environment.rank, environment.world_size
        self._said: dict[str, str] = {}
        self._store: Any = None
        if self.world_size > 1:
            host, port = read_master()
            is_host = self.rank == 0 and not has_agent_store()
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, self.world_size, is_host, timedelta(seconds=timeout_s), False, multi_tenant=True
            )

    def say(self, name: str, value: Any) -> None:
        """Leaves a value of plain JSON."""
        key, text = self._key(name, self.rank), json.dumps(value)
        if self._store is None:
            self._said[key] = text
        else:
            self._store.set(key, text)

    def hear(self, name: str, timeout_s: float, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """What `ranks` (None: all) have said under this name; those that say nothing within the time are left out."""
        keys = {rank: self._key(name, rank) for rank in (range(self.world_size) if ranks is None else ranks)}
        deadline_s = time.monotonic() + timeout_s
        while not self._has(*keys.values()) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return {rank: json.loads(self._read(key)) for rank, key in keys.items() if self._has(key)}

    def exchange(self, name: str, value: Any, timeout_s: float, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """`say`, and then `hear`."""
        self.say(name, value)
        return self.hear(name, timeout_s, ranks)

    def _key(self, name: str, rank: int) -> str:
        return f"samestep/meeting/{name}/{rank}"

    def _has(self, *keys: str) -> bool:
        if self._store is None:
            return all(key in self._said for key in keys)
        return not keys or bool(self._store.check(list(keys)))

    def _read(self, key: str) -> str:
        return self._said[key] if self._store is None else bytes(self._store.get(key)).decode()
