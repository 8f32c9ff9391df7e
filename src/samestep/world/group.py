"""The ranks as one group: its backend, and the few collectives on values and whole tensors that are not gradients."""

import hashlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from threading import Timer
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import _broadcast_coalesced  # type: ignore[attr-defined]  # what DDP itself calls

from samestep.console import say
from samestep.errors import Error, PeerFailed
from samestep.world import wire
from samestep.world.environment import Environment, check_interface, has_agent_store, read_master, read_restarts
from samestep.world.local_sockets import Neighbors, connect
from samestep.world.notes import MAC_BYTES, Mail, leave_note, read_note
from samestep.world.version_check import check_alike, describe_software, explain_hashing

T = TypeVar("T")

BROADCAST_CHUNK_BYTES = 64 << 20
# By the bytes of an element: what carries its bits, since gloo knows few dtypes, no int16 and no float8 among them.
CARRIERS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
STOPPED = b"samestep stopped"  # shorter than any step's exchange: who waits for one cannot take it for one
STOP_S = 300.0  # without sockets: for the other ranks to stop as well
POLL_S = 0.05
PATIENCE_S = 30.0  # after which it is said whom a rank waits for
MEET_S = 300.0  # for the tasks of a Slurm step to come together, as for launchers of ours

_numbers = count()


def choose_device(environment: Environment, wanted: str | None) -> torch.device:
    """This rank's device: `wanted` ("cpu" or "cuda"), else CUDA when there is one.

    Raises:
        Error: unknown device, no GPU where one is wanted, or more local ranks than GPUs.
    """
    if wanted not in (None, "cpu", "cuda"):
        raise Error(f"device must be cpu or cuda, not {wanted!r}")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted is None and num_gpus == 0):
        return torch.device("cpu")
    if num_gpus == 0:
        raise Error("device cuda was asked for, but torch sees no GPU: leave --device out, or say cpu")
    if environment.launcher == "srun" and num_gpus == 1:
        return torch.device("cuda", 0)  # Slurm may show each task a GPU of its own alone
    if environment.local_rank >= num_gpus:
        raise Error(
            f"{environment.local_world_size} ranks on a machine with {num_gpus} GPUs: "
            f"start at most {num_gpus} ranks here, or say --device cpu"
        )
    return torch.device("cuda", environment.local_rank)


class Group:
    """All ranks of the run. With one rank there is no process group and every call returns at once.

    Attributes:
        rank, world_size: as in torch.distributed.
        local_rank: among the ranks of this node.
        device: where this rank computes.
        neighbors: the other ranks, where all are on one host.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = rank
        self.device = device
        self.neighbors: Neighbors | None = None
        self._key = b""  # of the launcher's secret, and of what the ranks have told each other, and not the store
        self.forget_stops()

    def open_mail(self) -> "Mail | None":
        """What the ranks leave texts for each other in; None with one rank."""
        return Mail(self._key) if self.world_size > 1 else None

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (what `wire.encode` takes, or `seal` gives), in rank order, on every rank."""
        return [value] if self.world_size == 1 else self._gather(wire.encode(value))

    def _gather(self, data: bytes) -> list[Any]:
        sizes = [torch.empty((), dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor(len(data)))
        row_bytes = int(max(sizes))
        row = torch.frombuffer(bytearray(data.ljust(row_bytes, b"\0")), dtype=torch.uint8)
        rows = [torch.empty(row_bytes, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(rows, row)
        return [wire.decode(memoryview(each.numpy())[: int(n)]) for each, n in zip(rows, sizes, strict=True)]  # type: ignore[arg-type]

    def seal(self, value: Any) -> Any:
        """A value of the script's, for `gather`, `broadcast` and `once`; for `unseal` at the other side.

        Raises:
            Error: it cannot be sent.
        """
        if self.world_size == 1:
            return value
        try:
            return wire.seal(value, self._key)
        except Exception as error:
            what = type(value).__name__
            raise Error(f"rank {self.rank} cannot send a {what} to the other ranks: {error}") from None

    def unseal(self, sealed: Any) -> Any:
        """What a rank has sealed. Raises Error where that was not a rank of this launch."""
        return sealed if self.world_size == 1 else wire.unseal(sealed, self._key)

    def gather_number(self, number: int) -> list[int]:
        """Every rank's `number` (below 2**63), in rank order, on every rank: one exchange, nothing is pickled."""
        if self.world_size == 1:
            return [number]
        if self.neighbors is not None:  # quicker, and who waits there hears of signals
            rows = [bytearray(number.to_bytes(8)) for _ in range(self.world_size)]
            self.neighbors.exchange([memoryview(row) for row in rows])
            return [int.from_bytes(row) for row in rows]
        numbers = [torch.empty((), dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(numbers, torch.tensor(number))
        return [int(each) for each in numbers]

    def agree(self, values: Mapping[str, Any]) -> None:
        """Compares `values` over the ranks.

        Raises:
            Error: one of them is not the same on all.
        """
        first, *others = self.gather(dict(values))
        for rank, theirs in enumerate(others, start=1):
            for name, value in theirs.items():
                if value != first.get(name):
                    raise Error(
                        f"{name} is {first.get(name)!r} on rank 0 and {value!r} on rank {rank}: make it the same on "
                        "all ranks"
                    )

    def broadcast(self, value: T, source: int = 0) -> T:
        """The `value` of rank `source` (as for `gather`) on every rank."""
        if self.world_size == 1:
            return value
        return self._broadcast(wire.encode(value) if self.rank == source else b"", source)  # type: ignore[no-any-return]

    def _broadcast(self, data: bytes, source: int) -> Any:
        size = torch.tensor(len(data))
        dist.broadcast(size, source)
        buffer = torch.frombuffer(bytearray(data or int(size)), dtype=torch.uint8)
        dist.broadcast(buffer, source)
        return wire.decode(memoryview(buffer.numpy()))  # type: ignore[arg-type]

    def once(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Calls `fn` on rank 0 alone; every rank gets what it returned (as for `gather`).

        Raises:
            Error: what `fn` raised, on every rank.
            PeerFailed: on the other ranks, when `fn` raised anything else.
        """
        if self.world_size == 1:
            return fn(*args, **kwargs)
        failure, data = _try(lambda: fn(*args, **kwargs)) if self.rank == 0 else (None, b"")
        kind, value = self._broadcast(data, 0)
        if failure is not None:
            raise failure
        if kind == "error":
            raise Error(value)
        if kind == "failure":
            raise PeerFailed(f"rank 0 failed: {value}")
        return value  # type: ignore[no-any-return]

    def each(self, fn: Callable[[], T], on: Sequence[int]) -> list[T]:
        """Calls `fn` on the ranks `on`; every rank gets what it returned there (as for `gather`), in their order.

        Raises:
            Error: what `fn` raised on the first of them where it did, on every rank.
            PeerFailed: on the other ranks, when `fn` raised anything else.
        """
        if self.world_size == 1:
            return [fn()]
        failure, data = _try(fn) if self.rank in on else (None, wire.encode(("value", None)))
        told = self._gather(data)
        if failure is not None:
            raise failure
        for rank in on:
            kind, value = told[rank]
            if kind == "error":
                raise Error(value)
            if kind == "failure":
                raise PeerFailed(f"rank {rank} failed: {value}")
        return [told[rank][1] for rank in on]

    def relay(self, tensor: torch.Tensor, ranks: Sequence[int]) -> None:
        """Hands a tensor on the host from the first of `ranks` to the others, from each to the next. On these ranks.

        With one piece after the other, all of them send and receive at the same time.
        """
        place = ranks.index(self.rank)
        if place:
            dist.recv(tensor, ranks[place - 1])
        if place + 1 < len(ranks):
            dist.send(tensor, ranks[place + 1])

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Overwrites `tensors` on every rank with those of rank `source`, in a few large messages."""
        if self.world_size == 1:
            return
        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        process_group = dist.group.WORLD
        assert process_group is not None
        with torch.no_grad():
            for tensor in tensors:
                bits = tensor if tensor.is_complex() else tensor.view(CARRIERS[tensor.element_size()])
                by_kind.setdefault((bits.dtype, bits.device), []).append(bits)
            for same_kind in by_kind.values():
                _broadcast_coalesced(process_group, same_kind, BROADCAST_CHUNK_BYTES, source)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self.world_size > 1:
            dist.barrier()

    def find_going_on(self, step: int) -> int | None:
        """To be called in place of a further step, by each rank that ends its steps by itself, before anything that
        all ranks do together: another rank may be in that further step, and would never come.

        Args:
            step: the steps done.

        Returns:
            The first rank that goes on; None when all have called this.

        Raises:
            PeerFailed: another rank is gone.
        """
        if self.world_size == 1:
            return None
        leave_note(self._name_stop(self.rank), str(step))
        if self.neighbors is not None:
            rows = [bytearray(STOPPED if rank == self.rank else len(STOPPED)) for rank in range(self.world_size)]
            self.neighbors.exchange([memoryview(row) for row in rows])
            return next((rank for rank, row in enumerate(rows) if row != STOPPED), None)
        # Who is in a further step waits for this rank, and says nothing.
        deadline_s = time.monotonic() + STOP_S
        while has_agent_store() and None in (steps := self._read_stops()):
            if time.monotonic() > deadline_s:
                return steps.index(None)
            time.sleep(POLL_S)
        return None

    def forget_stops(self) -> None:
        """A loop begins: those that have called `find_going_on` did so in an earlier one. On all ranks."""
        self._number = next(_numbers)  # the same on all ranks, which begin their loops in the same order

    def find_stopped(self) -> tuple[int, str] | None:
        """The first rank that has called `find_going_on`, and its steps; None where none has, as far as is known."""
        return next(((rank, step) for rank, step in enumerate(self._read_stops()) if step is not None), None)

    def _read_stops(self) -> list[str | None]:
        return [read_note(self._name_stop(rank)) for rank in range(self.world_size)]

    def _name_stop(self, rank: int) -> str:
        return f"stopped/{self._number}/{rank}"

    def close(self) -> None:
        """Hangs up on the neighbors; the process group stays."""
        if self.neighbors is not None:
            self.neighbors.close()
            self.neighbors = None


def _try(fn: Callable[[], Any]) -> tuple[BaseException | None, bytes]:
    """Calls `fn`. What is to be sent of that, and what it raised that is no Error, or that its value cannot be sent."""
    try:
        return None, wire.encode(("value", fn()))
    except Error as error:
        return None, wire.encode(("error", str(error)))
    except BaseException as error:
        return error, wire.encode(("failure", f"{type(error).__name__}: {error}"))


def open_group(
    environment: Environment, device: torch.device, *, timeout_s: float = 1800.0, compares: bool = True
) -> Group:
    """Joins the ranks: gloo on CPU, NCCL (with gloo for what lives on the host) on CUDA.

    A process group that the script has already made is used as it is.

    Args:
        compares: whether all ranks must run the same script with the same versions.

    Raises:
        Error: they do not, or do not come together.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if environment.world_size > 1 and not dist.is_initialized():
        check_interface()
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=timeout_s)
        with _saying_who_is_missing(environment):
            if environment.launcher == "srun":
                rank, world_size = environment.rank, environment.world_size
                store = _open_store(environment)
                dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
            else:
                _meet(backend, timeout, environment)
    group = Group(environment.rank, environment.world_size, device)
    group.local_rank = environment.local_rank

    def take(told: Sequence[tuple[Mapping[str, Any], bytes]]) -> None:
        group._key = hashlib.sha256(environment.secret.encode() + b"".join(part for _, part in told)).digest()
        if compares:
            check([software for software, _ in told])

    def check(told: Sequence[Mapping[str, Any]]) -> None:
        check_alike(told)
        if group.rank == 0 and (sentence := explain_hashing(told)):
            print(f"samestep: {sentence}", file=sys.stderr, flush=True)

    if group.world_size > 1:
        group.neighbors = connect(group, timeout_s, (describe_software(), secrets.token_bytes(MAC_BYTES)), take)
    return group


@contextmanager
def _saying_who_is_missing(environment: Environment) -> Iterator[None]:
    """Says where this rank waits for the others, once, when that takes long."""
    host, port = read_master()
    rank, world_size = environment.rank, environment.world_size
    sentence = (
        f"samestep: rank {rank} has waited {PATIENCE_S:.0f} s for all {world_size} ranks to meet at {host}:{port}: see "
        "that each is started, and that this is where rank 0 listens"
    )
    timer = Timer(PATIENCE_S, print, (sentence,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _meet(backend: str, timeout: timedelta, environment: Environment) -> None:
    """The ranks of a launcher, or those started by hand. Raises Error where rank 0 cannot open its port.

    torchrun keeps its store when it starts the ranks again, with the addresses of the ranks before, and gloo tries to
    connect to those. Where all ranks are torchrun's of one machine, each start has keys of its own. (Several torchruns
    count their restarts separately.)
    """
    rank, world_size = environment.rank, environment.world_size
    shares_store = environment.launcher == "torchrun" and has_agent_store()
    num_restarts, most = read_restarts() if shares_store else (0, 0)
    store: Any = None
    if shares_store and environment.local_world_size == world_size:
        store = dist.TCPStore(*read_master(), world_size, False, timeout)  # type: ignore[attr-defined]
        store = dist.PrefixStore(f"samestep/restart-{num_restarts}", store)  # type: ignore[attr-defined]
    elif most and rank == 0:
        say(
            "torchrun restarts ranks of several nodes in the store of the start before, in which gloo finds ranks that "
            "are gone: run export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, or use samestep launch"
        )
    try:
        if store is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = read_master()[1]
        raise Error(f"port {port} is in use on this machine: set MASTER_PORT to a free one, for all ranks") from None


def _open_store(environment: Environment) -> Any:  # TCPStore
    """The store of rank 0, in which the tasks of a Slurm step meet.

    Raises:
        Error: they do not come together.
    """
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    (host, port), rank, world_size = read_master(), environment.rank, environment.world_size
    try:
        # One that this process holds already (a `Meeting`) serves this, too, as in torch's own env://.
        return TCPStore(host, port, world_size, rank == 0, timedelta(seconds=MEET_S), multi_tenant=True)
    except DistError as error:
        if "EADDRINUSE" in str(error):
            raise Error(f"port {port}, where the ranks of this Slurm step were to meet, is in use on its first node: "
                        "set MASTER_PORT to a free one, the same for all tasks") from None  # fmt: skip
        who = f"not all {world_size} tasks of this Slurm step" if rank == 0 else "not the first task of this Slurm step"
        raise Error(f"{who} came to {host}:{port} within {MEET_S:.0f} s: let srun start this script in every one of "
                    "its tasks, and look whether a firewall closes the port between the nodes") from None  # fmt: skip


def has_group() -> bool:
    """Whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def close_group() -> None:
    """Leaves the process group, if there is one."""
    if has_group():
        dist.destroy_process_group()
