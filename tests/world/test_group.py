"""The group of ranks exchanges objects, whole tensors and errors: by messages, where a thread waits for large ones, and
by sockets between the ranks of one host.
"""

import errno
import os
import pickle
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

import samestep
from samestep.errors import Error, NotHealed, PeerFailed
from samestep.launch.launcher import open_store
from samestep.snapshot.mirror import Unreachable
from samestep.torch_internals import list_gloo_sockets
from samestep.world import host, process_group, transport
from samestep.world.environment import Environment, read_environment
from samestep.world.group import Group, find_ranks, open_group
from samestep.world.host import read_host_id
from samestep.world.local_sockets import LocalSockets, connect
from samestep.world.process_group import Waiter, choose_device, communicate, wait_for_messages
from samestep.world.signed import seal, unseal

CPU = torch.device("cpu")


def join() -> Group:
    return open_group(read_environment(), CPU)


def on_ranks(num_ranks: int, fn: Callable[[Group], Any]) -> list[Any]:
    """Return what `fn` returns on each rank."""

    def call() -> list[Any]:
        group = join()
        return group.gather(fn(group))

    return samestep.spawn(call, num_ranks)  # type: ignore[no-any-return]


@pytest.mark.parametrize("compares", [True, False])
def test_ranks_with_another_torch(compares: bool) -> None:
    """They do not form a group, except for the doctor, which reports this and all other problems."""

    def call() -> list[int]:
        environment = read_environment()
        torch.__version__ = f"2.0.{environment.rank}"
        group = open_group(environment, CPU, compares=compares)
        return group.gather(group.rank)

    if compares:
        with pytest.raises(Error, match=r"torch is '2\.0\.0' on rank 0 and '2\.0\.1' on rank 1: make it the same"):
            samestep.spawn(call, 2)
    else:
        assert samestep.spawn(call, 2) == [0, 1]


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    def fn(group: Group) -> str:
        def fail() -> None:
            raise Unreachable("file:///x", f"{group.rank} has no such file") if group.rank else OSError("never mind")

        with pytest.raises(samestep.RunDirectoryError, match="1 has no such file"):
            group.each(fail, on=[1, 2])
        with pytest.raises(OSError if group.rank == 0 else PeerFailed, match="never mind"):
            group.each(fail, on=[0])
        with pytest.raises(samestep.InvalidType, match="rank 0 cannot send a value to the other ranks: cannot pickle"):
            group.once(lambda: (x for x in "ab"))
        return group.each(lambda: "still there", on=[2])[0]

    assert on_ranks(3, fn) == ["still there"] * 3


def test_ranks_sign_their_messages_with_their_own_key() -> None:
    first, second = on_ranks(2, lambda group: group._key.hex())
    assert first == second
    assert len(first) == 64
    assert first not in on_ranks(2, lambda group: group._key.hex())


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_torchrun_starts_ranks_again(capfd: pytest.CaptureFixture[str], num_nodes: int) -> None:
    """torchrun keeps its store, in which gloo would find the previous ranks. Of several torchruns, an error says so."""
    store = open_store()

    def call() -> list[int]:
        del os.environ["SAMESTEP_LAUNCHER"]
        os.environ["LOCAL_WORLD_SIZE"] = str(3 // num_nodes)
        group = join()
        return group.gather(group.rank)

    variables = {"MASTER_PORT": str(store.port), "TORCHELASTIC_MAX_RESTARTS": "2"}
    for count in range(2 if num_nodes == 1 else 1):
        env = variables | {"TORCHELASTIC_RESTART_COUNT": str(count)}
        assert samestep.spawn(call, 3, env=env) == [0, 1, 2]
    said = capfd.readouterr().err
    assert ("run export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun" in said) is (num_nodes == 2)


def test_an_exchange_has_no_limit() -> None:
    """A function of the script may take long on one rank, such as in `run.once`."""

    limits: list[timedelta] = []

    def call() -> list[timedelta]:
        process_group.set_timeout = limits.append
        join()
        return limits

    assert samestep.spawn(call, 2) == [process_group.NO_LIMIT]


def test_local_ranks_of_a_process_group_are_counted_per_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of two machines alternate. No variable tells a rank its place."""

    def fn() -> tuple[list[list[int]], str]:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        monkeypatch.setattr(transport, "read_host_id", lambda namespace: f"machine {rank % 2}")
        found = find_ranks()
        place = [found.rank, found.world_size, found.local_rank, found.local_world_size]
        return [[*each] for each in Group(rank, 3, CPU).gather_bytes(bytes(place))], found.launcher

    assert samestep.spawn(fn, 3) == ([[0, 3, 0, 2], [1, 3, 0, 1], [2, 3, 1, 2]], "samestep")


# --- keys: what ranks exchange is unpickled only if a rank of the same launch has sent it -----------------------------


class Runs:
    """Executes code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("import builtins; builtins.ran_by_pickle = True",)


@pytest.mark.parametrize("data", [seal(Runs(), b""), seal(Runs(), b"another key"), pickle.dumps(Runs()), b"x" * 40])
def test_a_pickle_without_the_key_is_not_read(data: bytes) -> None:
    with pytest.raises(Error, match="does not have the key of this launch") as caught:
        unseal(memoryview(data), b"key")
    assert caught.value.code == "SS513"
    assert not hasattr(__import__("builtins"), "ran_by_pickle")
    assert unseal(memoryview(seal((1, 0.1), b"key")), b"key") == (1, 0.1)


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "wanted", "found"),
    [
        (0, 0, None, "cpu"),
        (0, 3, "cpu", "cpu"),
        (2, 0, "cpu", "cpu"),
        (2, 1, None, "cuda:1"),
        (2, 1, "cuda", "cuda:1"),
        (0, 0, "cuda", "device cuda was asked for, but torch finds no GPU"),
        (2, 0, "cuda:1", "device cuda:1 is one GPU, and 4 ranks run on this host: give cuda"),
        (2, 2, None, "4 ranks on a machine with 2 GPUs: start at most 2 ranks here, or give --device cpu"),
        (2, None, "cuda:1", "cuda:1"),
        (2, None, "cuda:2", "device cuda:2 does not exist: torch finds 2 GPUs, cuda:0 to cuda:1"),
        (4, "srun", None, "cuda:3"),  # srun may show each task all GPUs of the node, or only its own
        (1, "srun", None, "cuda:0"),
    ],
)
def test_devices(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, local_rank: int | str | None, wanted: str | None, found: str
) -> None:
    """Of four ranks, of one (None), and of the last one under srun. The machine may have no GPU: torch's count is
    replaced.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    world_size = 1 if local_rank is None else 4
    launcher, rank = ("srun", 3) if isinstance(local_rank, str) else ("torchrun", local_rank or 0)
    environment = Environment(rank, rank, world_size, world_size, launcher, None, None, {})
    if " " in found:
        with pytest.raises(samestep.Error, match=found):
            choose_device(environment, wanted)
    else:
        assert choose_device(environment, wanted) == torch.device(found)


@pytest.mark.parametrize(
    ("error", "is_of_peer"),
    [
        (RuntimeError("Connection closed by peer"), True),  # as gloo says it
        (dist.DistBackendError("NCCL error"), True),
        (PeerFailed("rank 1 has closed its connection"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), False),
        (NotImplementedError("a bug"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_which_errors_mean_that_another_rank_is_gone(error: RuntimeError, is_of_peer: bool) -> None:
    """The others would continue without a rank that has an error of its own, and this rank would wait forever."""

    def fail() -> None:
        raise error

    with pytest.raises(RuntimeError, match=re.escape(str(error))) as caught:
        communicate(fail)
    assert isinstance(caught.value, PeerFailed) == is_of_peer


def test_a_state_that_cannot_be_healed_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that are left would wait for a death that no launcher names."""
    group = Group(0, 1, CPU)
    monkeypatch.setattr(Group, "_healing", MagicMock())

    def fail() -> None:
        raise NotHealed("a part of the state is lost")

    with pytest.raises(NotHealed):
        group.complete(fail)


def test_a_forked_child_keeps_no_connection_open() -> None:
    """Such as a loader worker: the other ranks would not notice that this one has left the group, or is dead."""

    def list_inodes(fds: Iterable[int]) -> list[tuple[int, int]]:
        return sorted((os.fstat(fd).st_dev, os.fstat(fd).st_ino) for fd in fds)

    def fn(group: Group) -> bool:
        assert group.local_sockets is not None
        local = [each.fileno() for each in group.local_sockets._sockets.values()]
        before = list_inodes([*list_gloo_sockets(), *local])
        assert len(before) >= 3  # two to the other rank, and the one that listens
        if (pid := os.fork()) == 0:
            kept = list_inodes(int(path.name) for path in Path("/proc/self/fd").glob("*") if path.exists())
            os._exit(len({*before} & {*kept}))
        num_kept = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return num_kept == 0 and list_inodes([*list_gloo_sockets(), *local]) == before and group.gather(0) == [0, 0]

    assert on_ranks(2, fn) == [True, True]


# --- the thread that waits for large messages -------------------------------------------------------------------------


class Message:
    """A message that is complete when `is_there` is set."""

    def __init__(self, error: str = "") -> None:
        self.is_waited_for = threading.Event()
        self.is_there = threading.Event()
        self._error = error

    def wait(self, timeout: timedelta | None = None) -> None:
        self.is_waited_for.set()
        self.is_there.wait()
        if self._error:
            raise RuntimeError(self._error)


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    others = {*threading.enumerate()}
    waiter = Waiter()
    (thread,) = {*threading.enumerate()} - others
    yield waiter
    waiter.close()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "wait",
    [
        lambda group, message: group.wait_for([message]),
        lambda group, message: group._broadcast_tensor(torch.zeros(transport.LARGE_BYTES), source=1),
    ],
    ids=["an exchange", "a large broadcast"],
)
def test_a_wait_is_given_up(monkeypatch: pytest.MonkeyPatch, waiter: Waiter, wait: Callable[..., None]) -> None:
    """Gloo would wait on for the rest of a message of which a rank that has died has sent a part."""
    message, group = Message(), Group(0, 2, torch.device("cpu"))
    monkeypatch.setattr(transport, "_begin", lambda *_: message)
    group.waiter = waiter

    def give_up() -> None:
        message.is_waited_for.wait()
        group._break_connections()

    thread = threading.Thread(target=give_up, daemon=True)
    thread.start()
    with pytest.raises(PeerFailed, match="another rank has died"):
        wait(group, message)
    thread.join()
    message.is_there.set()


def wait_longer_than_the_group_permits() -> float:
    """Return what rank 1 has sent."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=0.5))
    number = torch.zeros(1)
    if dist.get_rank() == 1:
        time.sleep(1)
        wait_for_messages([dist.isend(number + 3, 0)])
    else:
        wait_for_messages([dist.irecv(number, 1)])
    return number.item()


def test_a_message_may_take_longer_than_it_took_to_open_the_group() -> None:
    """After a death, the survivors open a group with a short limit. Gloo applies it to each later message."""
    assert samestep.spawn(wait_longer_than_the_group_permits, 2) == 3


@pytest.mark.parametrize("error", ["", "Connection closed by peer"])
def test_no_message_is_kept(waiter: Waiter, error: str) -> None:
    """It would keep the connections open, and its memory."""
    message = Message(error)
    message.is_there.set()
    with pytest.raises(RuntimeError, match=error) if error else nullcontext():
        waiter.wait([message])
    is_there = weakref.ref(message)
    del message
    assert is_there() is None


# --- the sockets between the ranks of one host ------------------------------------------------------------------------


def build_mesh(num_ranks: int) -> list[LocalSockets]:
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    for high in range(num_ranks):
        for low in range(high):
            sockets[high][low], sockets[low][high] = socket.socketpair()
    return [LocalSockets(rank, sockets[rank]) for rank in range(num_ranks)]


def test_a_rank_that_has_ended_is_named() -> None:
    first, second = build_mesh(2)
    second.close()
    with pytest.raises(PeerFailed, match="rank 1 has closed its connection"):
        first.exchange([memoryview(bytearray(8))] * 2)
    first.close()


class Alone:
    """Rank 0 of two ranks. `place`: of the other one, which does not connect."""

    rank, local_rank, world_size = 0, 0, 2

    def __init__(self, place: Any = None, meet: Callable[[bytes], None] = lambda name: None) -> None:
        self._place = place
        self._meet = meet

    def gather(self, value: Any) -> list[Any]:
        place, name, _ = value
        self._meet(name)
        return [value, (self._place or place, b"", -1)]


def test_ranks_of_two_hosts_are_no_neighbors() -> None:
    assert connect(Alone(("another boot", "1"))) is None


def test_an_unknown_process_is_refused() -> None:
    """Every process of the machine can read the name in /proc/net/unix. A rank that dies is not waited for."""
    knocking: list[int] = []

    def knock(name: bytes) -> None:
        if (pid := os.fork()) == 0:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(name)
                os._exit(len(connection.recv(1)))  # nothing, when it is closed
        knocking.append(pid)

    def check() -> None:
        pid, status = os.waitpid(knocking[0], os.WNOHANG)
        if pid:
            raise PeerFailed(f"a further rank has died, and the other process got {status} bytes")

    with pytest.raises(PeerFailed, match="a further rank has died, and the other process got 0 bytes"):
        connect(Alone(meet=knock), check)


def test_this_machine_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its identity, ranks on one machine would not use local sockets, and would notice no rank that stops.
    A container may hide /proc/sys.
    """
    assert read_host_id("net").startswith(Path("/proc/sys/kernel/random/boot_id").read_text().strip() + "-")

    def forbid(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(host, "read_text", forbid)
    assert read_host_id("net") is None


def exchange(num_ranks: int, num_bytes: int, mesh: Sequence[LocalSockets], rank: int) -> None:
    for turn in range(3):
        rows = [bytearray(num_bytes) for _ in range(num_ranks)]
        rows[rank][:] = bytes([rank + turn]) * num_bytes
        mesh[rank].exchange([memoryview(row) for row in rows])
        assert rows == [bytes([peer + turn]) * num_bytes for peer in range(num_ranks)]


# The last is more than a socket's buffer holds.
@pytest.mark.parametrize(("num_ranks", "num_bytes"), [(3, 1), (2, 1000), (5, 3_000_001)])
def test_every_rank_gets_every_row(num_ranks: int, num_bytes: int) -> None:
    mesh = build_mesh(num_ranks)
    with ThreadPoolExecutor(num_ranks) as threads:
        list(threads.map(partial(exchange, num_ranks, num_bytes, mesh), range(num_ranks)))
    for local_sockets in mesh:
        local_sockets.close()
