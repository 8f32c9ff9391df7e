"""The process group of torch.distributed: its device, its rendezvous store, and waits for gloo's messages."""

import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from samestep.console import say
from samestep.errors import Error, InvalidValue, PeerFailed, is_out_of_memory
from samestep.processes import wait_until
from samestep.torch_internals import list_gloo_sockets, reset_group_names, set_timeout
from samestep.world.environment import Environment, has_agent_store, read_master, read_rank, read_restarts

T = TypeVar("T")

NCCL = "cpu:gloo,cuda:nccl"  # a backend
JOIN_S = 1800.0  # limit for all ranks to join: a shared file system can take long to import torch
NO_LIMIT = timedelta(days=365)  # for an exchange: the heartbeat ends a rank that is stuck, and a slow one is no mistake
POLL_S = 0.002
GATHER_S = 8.0


def open_process_group(backend: str, limit_s: float = JOIN_S, **more: Any) -> None:
    """Call torch.distributed.init_process_group, with a limit for all ranks to join."""
    dist.init_process_group(backend, timeout=timedelta(seconds=limit_s), **more)
    set_timeout(NO_LIMIT)


def choose_device(environment: Environment, wanted: str | None, backend: str | None = None) -> torch.device:
    """Return the device of this rank.

    `wanted` is "cpu", "cuda" (a GPU per local rank) or one GPU such as "cuda:1"; None: "cuda" if there is a GPU.
    With the backend gloo, ranks may share a GPU; NCCL does not permit it.
    Raises Error if there is no such GPU, or there are more local ranks than GPUs.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, index = (wanted or ("cuda" if num_gpus else "cpu")).partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if num_gpus == 0:
        raise InvalidValue(
            f"device {wanted} was asked for, but torch finds no GPU: leave the option out, or give cpu", code="SS111"
        )
    if index and environment.local_world_size > 1 and backend != "gloo":
        raise InvalidValue(
            f"device {wanted} is one GPU, and {environment.local_world_size} ranks run on this host: give cuda",
            code="SS111",
        )
    if index and int(index) >= num_gpus:
        raise InvalidValue(
            f"device {wanted} does not exist: torch finds {num_gpus} GPUs, cuda:0 to cuda:{num_gpus - 1}", code="SS111"
        )
    if index or (environment.launcher == "srun" and num_gpus == 1):  # Slurm may show each task only its own GPU.
        return torch.device("cuda", int(index or 0))
    if environment.local_rank >= num_gpus and backend != "gloo":
        raise InvalidValue(
            f"{environment.local_world_size} ranks on a machine with {num_gpus} GPUs: "
            f"start at most {num_gpus} ranks here, or give --device cpu, or --backend gloo to let ranks share GPUs",
            code="SS111",
        )
    return torch.device("cuda", environment.local_rank % num_gpus)


def join_process_group(backend: str, environment: Environment) -> None:
    """Join the other ranks. Raises Error if rank 0 cannot open its port.

    After a restart torchrun keeps its store, with the addresses of the earlier ranks, and gloo tries to connect to
    those. With one torchrun, the restart count makes the keys of each start distinct. Several torchruns count their
    restarts separately, so there this is not possible.
    """
    num_restarts, most = read_restarts()
    is_one_node = environment.local_world_size == environment.world_size
    if most and not is_one_node and has_agent_store() and environment.rank == 0:
        say(
            "torchrun restarts the ranks of several nodes with the store of the previous start, in which gloo finds "
            "ranks that have ended: run export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, or use samestep "
            "launch"
        )
    try:
        store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"samestep/start-{num_restarts if is_one_node else 0}", open_rendezvous(environment, JOIN_S)
        )
        open_process_group(backend, store=store, rank=environment.rank, world_size=environment.world_size)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise Error(
            f"port {read_master()[1]} is in use here: set MASTER_PORT to a free one, the same for all ranks",
            code="SS509",
        ) from None


def open_rendezvous(environment: Environment, limit_s: float) -> Any:  # TCPStore
    """Open the ranks' store, as torch's env:// does: that of their launcher, or one of rank 0.

    A process may open it twice: for a `StoreExchange`, and for its process group.
    """
    host, port = read_master()
    is_host = environment.rank == 0 and not has_agent_store()
    limit = timedelta(seconds=limit_s)
    return dist.TCPStore(host, port, environment.world_size, is_host, limit, False, multi_tenant=True)  # type: ignore[attr-defined]


def has_group() -> bool:
    """Return whether this process is in a process group."""
    return dist.is_initialized()


def find_rank() -> int:
    """Return this process's rank in the process group, else in the environment."""
    return dist.get_rank() if has_group() else read_rank()


def close_group() -> None:
    """Leave the process group, if there is one."""
    if has_group():
        dist.destroy_process_group()
    else:
        reset_group_names()


def connect_to_store() -> Any:  # TCPStore
    """Open a further connection to the launcher's store."""
    host, port = read_master()
    return dist.TCPStore(host, port, None, False, timedelta(seconds=JOIN_S))  # type: ignore[attr-defined]


def release_connections() -> None:
    """In a forked child: close its copies of the process group's connections."""
    if has_group():
        null = os.open(os.devnull, os.O_RDWR)
        for fd in list_gloo_sockets():
            os.dup2(null, fd, inheritable=False)  # gloo's objects in this process may still close this number
        os.close(null)


class Transfer(Protocol):
    """A message that is under way, or several."""

    def wait(self, timeout: timedelta = ..., /) -> object:
        """Wait until it is complete."""


def communicate(call: Callable[..., T], *args: Any, **settings: Any) -> T:
    """Call a function of torch that needs the other ranks.

    If one is gone, gloo raises a plain RuntimeError. Errors of other classes, such as those of a GPU, are of this rank.

    Raises:
        PeerFailed: another rank is gone.
    """
    try:
        return call(*args, **settings)
    except RuntimeError as error:
        if is_out_of_memory(error) or not (type(error) is RuntimeError or isinstance(error, dist.DistError)):
            raise
        raise PeerFailed(str(error)) from None


def wait_for_messages(messages: Sequence[Transfer]) -> None:
    """Wait for messages of gloo. Their own limit is the one with which the group was opened. Raises PeerFailed."""
    for message in messages:
        communicate(message.wait, NO_LIMIT)


class Waiter:
    """Waits for messages in another thread, so that this one can give up.

    If a rank dies after it has sent the beginning of a message, the wait for its rest ends only with gloo's timeout: a
    connection that closes fails the receives that have not begun, and that of the next message.
    """

    def __init__(self) -> None:
        self._requests = SimpleQueue[Sequence[Transfer] | None]()
        self._results = SimpleQueue[RuntimeError | None]()
        threading.Thread(target=_run, args=(self._requests, self._results), name="samestep waiter", daemon=True).start()

    def wait(self, messages: Sequence[Transfer]) -> None:
        """Wait for messages.

        Raises:
            PeerFailed: another rank is gone, or `give_up` was called, before or meanwhile.
        """
        self._requests.put(messages)
        error = self._results.get()
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame: the cycle would keep the messages

    def give_up(self) -> None:
        """End the present wait, or the next one. The waiter is not used again. In any thread."""
        self._results.put(PeerFailed("another rank has died"))

    def close(self) -> None:
        """End the thread when it no longer waits."""
        self._requests.put(None)


def _run(requests: SimpleQueue[Sequence[Transfer] | None], results: SimpleQueue[RuntimeError | None]) -> None:
    while (messages := requests.get()) is not None:
        error = _wait(messages)
        del messages  # they keep the connections open
        results.put(error)
        del error


def _wait(messages: Sequence[Transfer]) -> RuntimeError | None:
    try:
        wait_for_messages(messages)
    except RuntimeError as error:
        return error.with_traceback(None)  # it would refer to the messages
    return None


def is_first(name: str) -> bool:
    """Return whether this rank is the first to request `name`. On all ranks, if no store outlives each of them."""
    with suppress(RuntimeError):
        if has_group() and has_agent_store():
            store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
            return bool(store.add(f"samestep/{name}", 1) == 1)
    return True


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
            self._store = open_rendezvous(environment, timeout_s)

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
