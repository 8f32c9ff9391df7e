"""The sockets between the ranks of one host."""

import errno
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import PeerFailed
from samestep.world import host
from samestep.world.host import read_host_id
from samestep.world.local_sockets import LocalSockets, connect


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


def test_this_machine_is_known() -> None:
    """Without its identity, ranks on one machine would not use local sockets, and would notice no rank that stops."""
    assert read_host_id("net").startswith(Path("/proc/sys/kernel/random/boot_id").read_text().strip() + "-")


def test_a_machine_that_cannot_be_identified(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that hides /proc/sys."""

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
