"""The fork server of a simulated launcher: starts simulated ranks, signals them, and reports their ends."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim.standard_library import EPOCH_S

if TYPE_CHECKING:
    from sim.instances import Instance
    from sim.scheduler import Process


def build_fork_server(own: "Instance") -> type:
    """Build the class that replaces `samestep.launch.forkserver.ForkServer` in an instance."""

    class ForkServer:
        def __init__(self, *, fork: bool = False) -> None:
            self._ranks: dict[int, Process] = {}
            self._signals: dict[int, list[int]] = {}  # those that each rank was sent
            self._events: deque[dict[str, Any]] = deque()

        def start(self, ranks: list[dict[str, Any]], **common: Any) -> None:
            for spec in ranks:
                rank = spec["rank"]
                self._ranks[rank] = own.machine.start_rank(rank, variables=spec["variables"], **common)
                self._signals[rank] = []
            self._events.append({"started": {rank: process.pid for rank, process in self._ranks.items()}})

        def signal(self, signum: int, spared: Sequence[int] = ()) -> None:
            own.process.check()
            for rank, process in self._ranks.items():
                if rank in spared:
                    continue
                self._signals[rank].append(signum)
                process.receive(signum)

        def receive(self, timeout_s: float) -> dict[str, Any] | None:
            scheduler = own.process.scheduler
            scheduler.wait(own.process, lambda: self._events or self._find_ended(), timeout_s, "launcher")
            for rank in self._find_ended():
                code = self._ranks.pop(rank).code
                ended = {"rank": rank, "code": code, "signals": self._signals.pop(rank)}
                self._events.append({**ended, "time_s": EPOCH_S + scheduler.now_s})
            return self._events.popleft() if self._events else None

        def _find_ended(self) -> list[int]:
            return [rank for rank, process in self._ranks.items() if process.has_ended]

        def close(self) -> None:
            for process in self._ranks.values():
                process.end(-9)

    return ForkServer
