"""The collectives of all ranks on values and whole tensors other than gradients."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from samestep.errors import Error, InvalidType, InvalidValue, PeerFailed, UsageError
from samestep.hashing import hash_chunks, view_bytes
from samestep.world.environment import read_host
from samestep.world.host import read_host_id
from samestep.world.local_sockets import LocalSockets, connect
from samestep.world.process_group import Transfer, Waiter, communicate, has_group, wait_for_messages
from samestep.world.signed import Unsendable, seal, unseal

T = TypeVar("T")

BROADCAST_CHUNK_BYTES = 64 << 20
LARGE_BYTES = 1 << 16  # of a tensor that is broadcast; torch's own broadcast of a smaller one sends it at once
# Bytes of an element -> the dtype that carries its bits: gloo lacks many dtypes, such as int16 and float8.
CARRIERS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
TAG = 1 << 20  # of messages outside of a gradient's exchange


def check_equal(values: Sequence[Mapping[str, Any]]) -> None:
    """Compare values of all ranks. Raises Error if one of them differs."""
    first, *others = values
    for rank, theirs in enumerate(others, start=1):
        for name, value in theirs.items():
            if value != first.get(name):
                raise InvalidValue(
                    f"{name} is {first.get(name)!r} on rank 0 and {value!r} on rank {rank}: make it the same on all "
                    "ranks",
                    code="SS504",
                )


class Transport:
    """All ranks of a run, and what they exchange. With one rank, there is no process group, and calls return at once.

    `Group` extends it by the death of a rank: then `complete` runs each collective until it has come to its end.

    Attributes:
        rank, world_size: as in torch.distributed.
        ranks_per_replica: how many ranks hold the models together, see `divide`.
        replica, num_replicas: which of the replicas of the models this rank is in, and how many there are. They divide
            the micro-batches of a step.
        peers: per replica, the rank that holds the same parameters as this one.
        last_ranks: the last rank of each replica, as a slice of all ranks. It has the losses.
        local_rank: index among the ranks of this node.
        device: where this rank computes.
        local_sockets: sockets to the other ranks if all run on one host, else None.
        is_on_one_host: whether all ranks ran on one host at the start.
        waiter: waits for large messages; None if a rank cannot continue after a death of another one.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, *, local_rank: int = 0) -> None:
        self.ranks_per_replica = 1
        self.set_place(rank, world_size)
        self.local_rank = local_rank
        self.device = device
        self.local_sockets: LocalSockets | None = None
        self.is_on_one_host = True
        self.waiter: Waiter | None = None
        self._key = secrets.token_bytes()  # a common one follows from `derive_key`

    def set_place(self, rank: int, world_size: int) -> None:
        """Set the number of this rank, and how many there are."""
        self.rank = rank
        self.world_size = world_size
        self.replica = rank // self.ranks_per_replica
        self.num_replicas = world_size // self.ranks_per_replica
        self.last_ranks = slice(self.ranks_per_replica - 1, None, self.ranks_per_replica)
        self.peers = range(rank % self.ranks_per_replica, world_size, self.ranks_per_replica)

    def divide(self, ranks_per_replica: int) -> None:
        """Let so many ranks hold the models together, which divides the number of ranks. Call it at the start."""
        self.ranks_per_replica = ranks_per_replica
        self.set_place(self.rank, self.world_size)

    def complete(self, collective: Callable[[], T], *, on_device: bool = False) -> T:
        """Run a collective. `on_device`: as for `Group.try_once`."""
        raise NotImplementedError

    def wait_for(self, messages: Sequence[Transfer]) -> None:
        """Wait for messages. If a rank has died, the beginning of one does not end the wait.

        Raises:
            PeerFailed: another rank is gone.
        """
        if self.waiter is not None:  # also for small ones: see docs/dev/healing.md
            self.waiter.wait(messages)
        else:
            wait_for_messages(messages)

    def connect_locally(self) -> None:
        """Open sockets to the other ranks if all run on one host."""
        self.local_sockets = connect(self)
        self.is_on_one_host = self.local_sockets is not None

    def derive_key(self, secret: bytes, randoms: Sequence[bytes]) -> None:
        """Set the key that signs values, from the launcher's secret and random bytes of each rank."""
        self._key = bytes.fromhex(hash_chunks([secret, *randoms]))

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order, on every rank.

        Raises:
            InvalidType: the value of a rank cannot be pickled; on every rank.
        """
        if self.world_size == 1:
            return [value]
        return [self._unseal(each) for each in self.gather_bytes(self._seal(value))]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's `data`, in rank order, on every rank."""
        return self.complete(lambda: self._gather_bytes(data))

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        sizes = self._gather_number_now(len(data))
        row = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        return [each.tobytes()[:size] for each, size in zip(self._gather_rows(row), sizes, strict=True)]

    def _seal(self, value: Any) -> bytes:
        try:
            return seal(value, self._key)
        except Exception as error:
            sentence = f"rank {self.rank} cannot send a value to the other ranks: {error}"
            return seal(Unsendable(sentence), self._key)

    def _unseal(self, sealed: bytes) -> Any:
        value = unseal(sealed, self._key)
        if isinstance(value, Unsendable):
            raise InvalidType(value.reason, code="SS102")
        return value

    def _gather_rows(self, row: torch.Tensor) -> list[Any]:
        """Return every rank's row as an array of bytes. All have the same size."""
        world_size = self.world_size
        rows = row.new_empty(world_size, len(row))  # row k is that of rank `self.rank + k`
        rows[0] = row
        for distance, num_rows in plan_gather(world_size):
            self.wait_for(
                [
                    _begin(dist.irecv, rows[distance : distance + num_rows], (self.rank + distance) % world_size),
                    _begin(dist.isend, rows[:num_rows], (self.rank - distance) % world_size),
                ]
            )
        return [rows[(rank - self.rank) % world_size].numpy() for rank in range(world_size)]

    def gather_number(self, number: int) -> list[int]:
        """Return every rank's `number` (from 0 to 2**64 - 1), in rank order, on every rank. One exchange."""
        return self.complete(lambda: self._gather_number_now(number))

    def _gather_number_now(self, number: int) -> list[int]:
        if self.world_size == 1:
            return [number]
        data = bytearray(number.to_bytes(8))
        if self.local_sockets is not None:  # faster, and Python handles signals during the wait
            rows: list[Any] = [bytearray(data) for _ in range(self.world_size)]
            self.local_sockets.exchange([memoryview(row) for row in rows])
        else:
            rows = self._gather_rows(torch.frombuffer(data, dtype=torch.uint8))
        return [int.from_bytes(row) for row in rows]

    def gather_hosts(self) -> list[str]:
        """Return an identifier of each rank's host, on every rank."""
        return [host.decode() for host in self.gather_bytes((read_host_id("net") or read_host()).encode())]

    def agree(self, values: Mapping[str, Any]) -> None:
        """Compare `values` over the ranks. Raises Error if one of them differs."""
        check_equal(self.gather(dict(values)))

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the `value` of rank `source` on every rank. Raises as `gather`."""
        if self.world_size == 1:
            return value
        return self._broadcast(lambda: self._seal(value), source)  # type: ignore[no-any-return]

    def _broadcast(self, get_data: Callable[[], bytes], source: int) -> Any:
        """Return the sealed value of rank `source`, which calls `get_data`. If it dies, another one is the source."""

        def broadcast() -> bytes:
            return self._broadcast_bytes(get_data() if self.rank == source else b"", source)

        return self._unseal(self.complete(broadcast))

    def _broadcast_bytes(self, data: bytes, source: int) -> bytes:
        if self.world_size == 1:
            return data
        size = torch.tensor(len(data))
        communicate(dist.broadcast, size, source)
        buffer = torch.frombuffer(bytearray(data if self.rank == source else int(size)), dtype=torch.uint8)
        self._broadcast_tensor(buffer, source)
        return buffer.numpy().tobytes()

    def once(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `fn` on rank 0, and return its result on every rank. Raises as `each`."""
        return self.each(lambda: fn(*args, **kwargs), [0])[0]

    def each(self, fn: Callable[[], T], on: Sequence[int]) -> list[T]:
        """Call `fn` on the ranks `on`, and return their results, in this order, on every rank.

        With `begin_healing`, another rank calls it again if such a rank dies before all ranks have its result.

        Raises:
            Error: raised by `fn`, from the first such rank; on every rank.
            PeerFailed: on the other ranks, if `fn` raised another exception.
            InvalidType: a result cannot be pickled; on every rank.
        """
        if self.world_size == 1:
            return [fn()]
        tried: list[tuple[BaseException | None, bytes]] = []

        def call_once() -> bytes:
            if not tried:
                failure, outcome = attempt(fn)
                tried.append((failure, self._seal(outcome)))
            return tried[0][1]

        if self.rank in on:
            call_once()  # at the same time on all such ranks
        outcomes = [self._broadcast(call_once, rank) for rank in on]
        if tried and (failure := tried[0][0]) is not None and not isinstance(failure, Error):
            raise failure
        return read_outcomes(dict(zip(on, outcomes, strict=True)))

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Overwrite `tensors` on every rank with those of rank `source`, in a few large messages."""
        self.complete(lambda: self._broadcast_tensors_now(tensors, source), on_device=True)

    def _broadcast_tensors_now(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        if self.world_size == 1:  # perhaps because all other ranks have died
            return
        with torch.no_grad():
            for tensor in tensors:
                bits = tensor if tensor.is_complex() else tensor.view(CARRIERS[tensor.element_size()])
                by_kind.setdefault((bits.dtype, bits.device), []).append(bits)
            for (_, device), same_kind in by_kind.items():
                for chunk in split_chunks(same_kind, BROADCAST_CHUNK_BYTES):
                    joined = torch.cat([bits.reshape(-1) for bits in chunk])
                    sent = joined.cpu() if self.needs_staging(device) else joined
                    self._broadcast_tensor(sent, source)
                    if self.rank != source:
                        flats = torch.split(sent.to(device), [bits.numel() for bits in chunk])
                        for bits, flat in zip(chunk, flats, strict=True):
                            bits.copy_(flat.view(bits.shape))

    def _broadcast_tensor(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a contiguous tensor with that of rank `source`. With healing, a rank can give up waiting for it."""
        if self.waiter is None or tensor.nbytes < LARGE_BYTES:
            communicate(dist.broadcast, tensor, source)
            return
        position = (self.rank - source) % self.world_size  # in a binary tree, whose root is the source
        if position:
            self.waiter.wait([_begin(dist.irecv, tensor, (source + (position - 1) // 2) % self.world_size)])
        below = [each for each in (2 * position + 1, 2 * position + 2) if each < self.world_size]
        if below:
            self.waiter.wait([_begin(dist.isend, tensor, (source + each) % self.world_size) for each in below])

    def begin_send(self, tensor: torch.Tensor, target: int) -> Transfer:
        """Begin to send a tensor to one rank, which calls `receive`. Keep the result until the end."""
        return _begin(dist.isend, torch.frombuffer(view_bytes(tensor), dtype=torch.uint8), target)

    def send(self, tensors: Sequence[torch.Tensor], target: int) -> None:
        """Send tensors of any dtypes and devices to one rank, which calls `receive`."""
        for tensor in tensors:
            if tensor.numel():
                self.wait_for([self.begin_send(tensor, target)])

    def receive(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Overwrite contiguous tensors in host memory with those that a rank sends."""
        for tensor in tensors:
            if tensor.numel():
                self.wait_for([_begin(dist.irecv, torch.frombuffer(view_bytes(tensor), dtype=torch.uint8), source)])

    def needs_staging(self, device: torch.device) -> bool:
        """Return whether tensors on this device are exchanged through host memory, since the backend is not NCCL."""
        return device.type == "cuda" and dist.is_initialized() and "nccl" not in dist.get_backend_config()

    def check_process_group(self) -> None:
        """Raise Error if the script has created a process group of other ranks since this was opened."""
        if has_group() and dist.get_world_size() != self.world_size:
            raise UsageError(
                f"a process group of {dist.get_world_size()} ranks was created after samestep.Run, which has "
                f"{self.world_size}: create the process group first, or leave it out and start the ranks with samestep "
                "launch",
                code="SS506",
            )

    def close(self) -> None:
        """Close the local sockets, and end the thread that waits for messages. The process group stays."""
        if self.local_sockets is not None:
            self.local_sockets.close()
            self.local_sockets = None
        if self.waiter is not None:
            self.waiter.close()
            self.waiter = None


def plan_gather(world_size: int) -> list[tuple[int, int]]:
    """Return the rounds of an all-gather as (distance, number of rows).

    In a round, rank r sends its first rows to rank r - distance, and gets as many from rank r + distance.
    """
    distances = [1 << k for k in range((world_size - 1).bit_length())]
    return [(distance, min(distance, world_size - distance)) for distance in distances]


def _begin(transfer: Callable[..., Any], tensor: torch.Tensor, rank: int) -> Transfer:
    """Begin `dist.isend` or `dist.irecv` of a tensor in host memory to or from another rank."""
    return communicate(transfer, tensor, rank, tag=TAG)  # type: ignore[no-any-return]


def attempt(fn: Callable[[], Any]) -> tuple[BaseException | None, tuple[str, Any]]:
    """Call `fn`. Return its exception, if any, and the outcome for `read_outcomes`, which can be gathered."""
    try:
        return None, ("value", fn())
    except Error as error:
        return error, ("error", error)
    except BaseException as error:
        return error, ("failure", f"{type(error).__name__}: {error}")


def read_outcomes(outcomes: Mapping[int, tuple[str, Any]]) -> list[Any]:
    """Return the values of the ranks' outcomes, which are from `attempt`.

    Raises:
        Error: of the first rank that has raised one.
        PeerFailed: the first rank that failed has raised another exception.
    """
    for rank, (kind, value) in outcomes.items():
        if kind == "error":
            raise value
        if kind == "failure":
            raise PeerFailed(f"rank {rank} failed: {value}")
    return [value for _, value in outcomes.values()]


def split_chunks(tensors: Sequence[torch.Tensor], chunk_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors in lists of at most `chunk_bytes`, or of one tensor. Empty ones are left out.

    Example::

        >>> import torch
        >>> [len(chunk) for chunk in split_chunks([torch.zeros(2), torch.zeros(2), torch.zeros(9), torch.zeros(0)], 16)]
        [2, 1]
    """
    chunk: list[torch.Tensor] = []
    for tensor in tensors:
        if chunk and sum(each.nbytes for each in chunk) + tensor.nbytes > chunk_bytes:
            yield chunk
            chunk = []
        if tensor.numel():
            chunk.append(tensor)
    if chunk:
        yield chunk
