"""What processes exchange, in memory: the launcher's store, gloo's messages and collectives, and local sockets.

A rank that dies has reached only some of the others.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as real

from sim.scheduler import Process, Scheduler

# samestep takes a RuntimeError that is raised in torch.distributed for the loss of another rank.
__name__ = "torch.distributed.simulated"

CONNECT_S = 60.0
GET_S = 300.0


class Store:
    """The entries of a launcher's store."""

    def __init__(self, host: Process, port: int) -> None:
        self.entries: dict[str, bytes] = {}
        self.host = host
        self.port = port


class StoreHandle:
    """A connection to a store, as torch.distributed.TCPStore and PrefixStore."""

    def __init__(self, process: Process, store: Store, prefix: str = "") -> None:
        self.store = store
        self.prefix = prefix
        self.port = store.port
        self._process = process

    def _name(self, what: str, key: str) -> str:
        self._process.point(f"store.{what} {key}")
        self._check_open()
        return self.prefix + key

    def _check_open(self) -> None:
        if self.store.host.is_dead:
            raise real.DistNetworkError("the store has closed")

    def clone(self) -> "StoreHandle":
        return StoreHandle(self._process, self.store, self.prefix)

    def set(self, key: str, value: str | bytes) -> None:
        self.store.entries[self._name("set", key)] = value.encode() if isinstance(value, str) else bytes(value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        names = [self.prefix + key for key in keys]

        def is_over() -> bool:
            return self.store.host.is_dead or all(name in self.store.entries for name in names)

        if not self._process.wait(is_over, GET_S, f"store.wait {keys[0]}"):
            raise real.DistStoreError("wait timeout")
        self._check_open()
        return [self.store.entries[name] for name in names]

    def check(self, keys: Sequence[str]) -> bool:
        self._name("check", next(iter(keys), ""))
        return all(self.prefix + key in self.store.entries for key in keys)


class Endpoint:
    """One rank of a process group, or of the sockets of a host."""

    def __init__(self, process: Process, ring: "Ring", rank: int) -> None:
        self.process = process
        self.ring = ring
        self.rank = rank
        self.is_closed = False
        self.is_broken = False  # by samestep, to end the waits
        self.inbox: dict[tuple[int, int], deque[Send]] = defaultdict(deque)
        self.posted: dict[tuple[int, int], deque[Recv]] = defaultdict(deque)
        self.streams: dict[int, bytearray] = defaultdict(bytearray)
        self.num_broadcasts = 0
        ring.endpoints[rank] = self
        process.endpoints.append(self)

    @property
    def is_gone(self) -> bool:
        """Whether the others cannot reach it any more."""
        return self.is_closed or self.process.is_dead

    def deliver(self, source: int, tag: int) -> None:
        """Match messages with receives, as gloo's thread does."""
        scheduler = self.process.scheduler
        inbox = self.inbox[source, tag]
        posted = self.posted[source, tag]
        while inbox and posted and inbox[0].ready_s <= scheduler.now_s:
            if self.ring.endpoints[source].is_gone and scheduler.random.random() < 0.5:
                for each in inbox:  # what was under way is lost
                    each.is_lost = True
                inbox.clear()
                return
            send = inbox.popleft()
            receive = posted.popleft()
            receive.tensor.data.copy_(send.source)
            send.is_done = receive.is_done = True


class Ring:
    """The endpoints of a group of ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.endpoints: dict[int, Endpoint] = {}
        self.broadcasts: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)  # number -> rank -> what it gets


class Transfer:
    """A message on its way, for one of its ends: the handle that isend or irecv returns.

    Its `is_over` says whether it is done, or never will be.
    """

    def __init__(self, own: Endpoint, peer: int, tag: int) -> None:
        self.is_done = False
        self._own = own
        self._peer = peer
        self._tag = tag

    @property
    def other(self) -> Endpoint:
        return self._own.ring.endpoints[self._peer]

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._own.process.wait(self.is_over, None, f"{type(self).__name__.lower()}.wait {self._peer}")
        if not self.is_done:
            raise RuntimeError(f"[simulated gloo] Connection closed by peer {self._peer}")
        return True


class Send(Transfer):
    """Its bytes are read when it is sent or when it is received, as the seed decides: gloo promises neither."""

    def __init__(
        self, own: Endpoint, peer: int, tag: int, tensor: torch.Tensor, ready_s: float, *, is_eager: bool
    ) -> None:
        super().__init__(own, peer, tag)
        self.source = tensor.data.clone() if is_eager else tensor.data
        self.ready_s = ready_s
        self.is_lost = False

    def is_over(self) -> bool:
        if not (self.other.is_gone or self._own.is_broken):
            self.other.deliver(self._own.rank, self._tag)
        return self.is_done or self.is_lost or self.other.is_gone or self._own.is_broken


class Recv(Transfer):
    def __init__(self, own: Endpoint, peer: int, tag: int, tensor: torch.Tensor) -> None:
        super().__init__(own, peer, tag)
        self.tensor = tensor

    def is_over(self) -> bool:
        own = self._own
        if not own.is_broken:
            own.deliver(self._peer, self._tag)
        return self.is_done or own.is_broken or (self.other.is_gone and not own.inbox[self._peer, self._tag])


class Network:
    """All stores and groups of one simulation. `slow`: probability that a message is late."""

    def __init__(self, scheduler: Scheduler, slow: float) -> None:
        self.slow = slow
        self.scheduler = scheduler
        self._stores: list[Store] = []
        self._rings: dict[object, Ring] = {}

    def open_store(self, host: Process) -> Store:
        """Open the store of a launcher."""
        self._stores.append(Store(host, 20_000 + len(self._stores)))
        return self._stores[-1]

    def find_store(self, port: int) -> Store:
        """Return the store at a port."""
        return self._stores[port - 20_000]

    def find_ring(self, key: object, size: int) -> Ring:
        """Return the ring of this key, which the first endpoint creates."""
        return self._rings.setdefault(key, Ring(size))


class Distributed(ModuleType):
    """torch.distributed of one process, as far as samestep calls it on CPUs."""

    def __init__(self) -> None:
        super().__init__("torch.distributed")
        self.distributed_c10d = self
        self.group = SimpleNamespace(WORLD=None)
        self._world = SimpleNamespace()  # samestep resets its `group_count`
        for name in ("DistError", "DistNetworkError", "DistStoreError", "HashStore", "default_pg_timeout"):
            setattr(self, name, getattr(real, name))

    def begin(self, process: Process, network: Network) -> None:
        """Belong to a new process."""
        self._process = process
        self._network = network
        self._own: Endpoint | None = None
        self._store: StoreHandle | None = None
        self.group.WORLD = None

    @property
    def _endpoint(self) -> Endpoint:
        if self._own is None:
            raise ValueError("Default process group has not been initialized")
        return self._own

    # --- the group --------------------------------------------------------------------------------------------

    def PrefixStore(self, prefix: str, store: StoreHandle) -> StoreHandle:
        return StoreHandle(self._process, store.store, f"{store.prefix}{prefix}/")

    def TCPStore(
        self, host: str, port: int, world_size: Any = None, is_master: bool = False, *_: Any, **__: Any
    ) -> StoreHandle:
        store = self._network.open_store(self._process) if is_master else self._network.find_store(port)
        return StoreHandle(self._process, store)

    def is_initialized(self) -> bool:
        return self._own is not None

    def get_world_size(self) -> int:
        return self._endpoint.ring.size

    def _get_default_store(self) -> Any:
        return self._store

    def _set_pg_timeout(self, timeout: timedelta) -> None:
        pass

    def init_process_group(
        self, backend: str, *, timeout: timedelta, store: StoreHandle, rank: int, world_size: int
    ) -> None:
        ring = self._network.find_ring((id(store.store), store.prefix), world_size)
        own = Endpoint(self._process, ring, rank)

        def is_over() -> bool:
            return len(ring.endpoints) == world_size or any(each.is_gone for each in ring.endpoints.values())

        self._process.wait(is_over, timeout.total_seconds(), "join")
        if len(ring.endpoints) < world_size or any(each.is_gone for each in ring.endpoints.values()):
            own.is_closed = True
            raise real.DistNetworkError("not all ranks have come")
        self._own = self.group.WORLD = own
        self._store = store

    def destroy_process_group(self) -> None:
        self._process.check()
        if self._own is not None:
            self._own.is_closed = True
        self._own = self.group.WORLD = self._store = None

    # --- messages ---------------------------------------------------------------------------------------------

    def isend(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Send:
        network = self._network
        scheduler = network.scheduler
        choose = scheduler.random
        self._process.point(f"isend {peer} {tag}")
        own = self._endpoint
        late_s = choose.expovariate(100.0) if choose.random() < network.slow else 0.0
        send = Send(own, peer, tag, tensor, scheduler.now_s + late_s, is_eager=choose.random() < 0.5)
        if late_s:  # so that the clock reaches that time
            process = self._process
            process.start(lambda: process.wait(bool, late_s, "late"), "late", daemon=True)
        own.ring.endpoints[peer].inbox[own.rank, tag].append(send)
        return send

    def irecv(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Recv:
        self._process.point(f"irecv {peer} {tag}")
        own = self._endpoint
        receive = Recv(own, peer, tag, tensor)
        own.posted[peer, tag].append(receive)
        return receive

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Show the tensor of a rank to all, one after the other."""
        own = self._endpoint
        scheduler = self._network.scheduler
        label = f"broadcast {source}"
        shown = own.ring.broadcasts[own.num_broadcasts]
        own.num_broadcasts += 1
        self._process.point(label)
        is_stepwise = scheduler.random.random() < 0.3
        value = tensor.data.clone()
        for target in range(own.ring.size) if own.rank == source else ():
            if is_stepwise:
                self._process.point(f"{label} to {target}")
            shown[target] = value
        other = own.ring.endpoints[source]
        self._process.wait(lambda: own.is_broken or other.is_gone or own.rank in shown, None, label)
        if own.is_broken or own.rank not in shown:
            raise RuntimeError("[simulated gloo] Connection closed by peer")
        tensor.data.copy_(shown[own.rank])


class LocalSockets:
    """As `samestep.world.local_sockets.LocalSockets`. `failed`: its PeerFailed."""

    def __init__(self, own: Endpoint, failed: Callable[[str], Exception]) -> None:
        self._own = own
        self._failed = failed

    def exchange(self, rows: Sequence[memoryview]) -> None:
        """As its namesake."""
        own = self._own
        scheduler = own.process.scheduler
        peers = [other for peer, other in own.ring.endpoints.items() if peer != own.rank]
        own.process.point("exchange")
        is_stepwise = scheduler.random.random() < 0.3
        data = bytes(rows[own.rank])
        for other in peers:
            if is_stepwise:
                own.process.point(f"exchange to {other.rank}")
            if other.is_gone:
                raise self._failed(f"rank {other.rank} has closed its connection")
            other.streams[own.rank] += data

        def has_come(other: Endpoint) -> bool:
            return len(own.streams[other.rank]) >= len(rows[other.rank])

        def is_over() -> bool:
            return any(other.is_gone and not has_come(other) for other in peers) or all(map(has_come, peers))

        own.process.wait(is_over, None, "exchange")
        for other in peers:
            if not has_come(other):
                raise self._failed(f"rank {other.rank} has closed its connection")
            row = rows[other.rank]
            row[:] = own.streams[other.rank][: len(row)]
            del own.streams[other.rank][: len(row)]

    def close(self) -> None:
        """As its namesake."""
        self._own.is_closed = True


def connect(
    distributed: Distributed,
    failed: Callable[[str], Exception],
    group: Any,
    check: Callable[[], None] = lambda: None,
) -> LocalSockets | None:
    """As `samestep.world.local_sockets.connect`, with the same collectives."""
    process = distributed._process
    network = distributed._network
    names = group.gather(process.random.randbytes(8))
    ring = network.find_ring(names[0], len(names))
    own = Endpoint(process, ring, group.rank)
    deadline_s = network.scheduler.now_s + CONNECT_S
    while not process.wait(lambda: len(ring.endpoints) == ring.size, 0.05, "connect"):
        check()
        if network.scheduler.now_s > deadline_s:
            own.is_closed = True
            raise failed("a rank has not connected")
    return LocalSockets(own, failed)
