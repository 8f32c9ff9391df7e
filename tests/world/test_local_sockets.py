"""The sockets between the ranks of one host."""

import errno
import multiprocessing
import os
import resource
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import samestep
from samestep.errors import PeerFailed
from samestep.world import host
from samestep.world import local_sockets as sockets_module
from samestep.world.environment import read_environment
from samestep.world.group_opening import open_group
from samestep.world.host import read_host_id
from samestep.world.local_sockets import LocalSockets, connect


class Alone:
    """Two ranks that appear to be on different hosts."""

    rank, world_size = 0, 2

    def gather(self, value: object) -> list[object]:
        return [value, (("another boot", 1), b"")]


def build_mesh(num_ranks: int, timeout_s: float = 60.0) -> list[LocalSockets]:
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    for high in range(num_ranks):
        for low in range(high):
            sockets[high][low], sockets[low][high] = socket.socketpair()
    return [LocalSockets(rank, sockets[rank], timeout_s) for rank in range(num_ranks)]


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


def test_a_rank_that_has_ended_is_named() -> None:
    first, second = build_mesh(2)
    second.close()
    with pytest.raises(PeerFailed, match="rank 1 has closed its connection"):
        first.exchange([memoryview(bytearray(8))] * 2)
    first.close()


def test_a_rank_that_is_silent_is_named() -> None:
    first, second = build_mesh(2, timeout_s=0.05)
    with pytest.raises(PeerFailed, match=r"nothing came from rank 1 for 0\.05 s"):
        first.exchange([memoryview(bytearray(8))] * 2)
    first.close()
    second.close()


def test_ranks_of_two_hosts_are_no_neighbors() -> None:
    assert connect(Alone(), 60.0) is None


class Bereft:
    """Rank 0 of two ranks, the other of which dies after it has sent its address."""

    rank, world_size = 0, 2

    def gather(self, value: object) -> list[object]:
        return [value, value]


def test_a_rank_that_dies_before_it_connects_is_not_waited_for() -> None:
    def watch() -> None:
        raise PeerFailed("a further rank has died")

    with pytest.raises(PeerFailed, match="a further rank has died"):
        connect(Bereft(), 60.0, watch=watch)


class Meeting:
    """Two ranks as two threads. Calls `attack` with rank 0's name before the ranks connect."""

    def __init__(self, rank: int, barrier: threading.Barrier, told: list[Any], attack: Callable[[Any], None]) -> None:
        self.rank, self.world_size = rank, 2
        self._barrier, self._told, self._attack = barrier, told, attack

    def gather(self, value: Any) -> list[Any]:
        self._told[self.rank] = value
        self._barrier.wait()
        values = list(self._told)
        if self.rank == 1 and isinstance(value, tuple):
            self._attack(values[0])
        self._barrier.wait()
        return values


def call_as_another_user(told: Any) -> None:
    """Connect by what every process of the machine can read in /proc/net/unix."""
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        knock(told[1], b"1")
        os._exit(0)
    os.waitpid(pid, 0)


def say_nothing(told: Any) -> None:
    knock(told[1], b"")


open_calls: list[socket.socket] = []


def knock(name: bytes, hello: bytes) -> None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(name)
    if hello:
        connection.sendall((1).to_bytes(4))
    open_calls.append(connection)


@pytest.mark.parametrize("attack", [call_as_another_user, say_nothing])
def test_an_unknown_process_is_refused(attack: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    if attack is call_as_another_user and os.geteuid() != 0:
        pytest.skip("needs root, to be two users")
    if attack is say_nothing:
        monkeypatch.setattr(sockets_module, "HELLO_S", 0.5)
    barrier, told = threading.Barrier(2, timeout=60), [None, None]
    with ThreadPoolExecutor(2) as threads:
        ranks = [Meeting(rank, barrier, told, attack) for rank in range(2)]
        mesh = list(threads.map(lambda rank: connect(rank, 10.0), ranks))
        list(threads.map(partial(exchange, 2, 100, mesh), range(2)))
    for connected in (*mesh, *open_calls):
        assert connected is not None
        connected.close()
    open_calls.clear()


def exchange_in_a_group() -> list[int]:
    environment = read_environment()
    group = open_group(environment, torch.device("cpu"))
    assert group.local_sockets is not None
    rows = [bytearray(8) for _ in range(group.world_size)]
    rows[group.rank][:] = os.getpid().to_bytes(8)
    group.local_sockets.exchange([memoryview(row) for row in rows])
    found = [int.from_bytes(row) for row in rows]
    assert found == group.gather(os.getpid())
    return found


def test_ranks_of_one_host_find_one_another() -> None:
    assert len(set(samestep.spawn(exchange_in_a_group, 3))) == 3


def test_this_machine_is_known() -> None:
    """Without its identity, ranks on one machine would not use local sockets, and would notice no rank that stops."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert read_host_id("net").startswith(f"{boot}-")


def read_with_no_file_left() -> str | None:
    """As a process that may open no further file."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        return read_host_id("net")
    except OSError as error:
        return error.strerror


def test_a_machine_that_cannot_be_identified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that hides /proc/sys is not an error; a process without a file descriptor is."""

    def forbid(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(read_with_no_file_left) == "Too many open files"
    monkeypatch.setattr(host, "read_text", forbid)
    assert read_host_id("net") is None
