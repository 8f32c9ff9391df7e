"""Unix sockets between the ranks of one host, for the small messages that every step waits for.

A gloo message starts with a handshake and arrives in another thread, which must be scheduled before the waiting one:
0.4 ms and more for a few kB, against 0.05 ms here (docs/dev/routes.md).
"""

import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from samestep.errors import PeerFailed
from samestep.world.host import read_host_id

# Ranks with equal shares of work usually arrive within this time. Sleeping and waking up would take as long again.
SPIN_S = 200e-6
CONNECT_S = 60.0  # limit for all ranks of the host to connect
WATCH_S = 0.05  # between two calls of `watch`
HELLO_S = 10.0  # limit for a new connection to send its rank


class Gatherer(Protocol):
    """The part of `Group` that finds out which ranks share a host or a directory."""

    rank: int
    local_rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]: ...


class LocalSockets:
    """One socket to each other rank of this host. `exchange` fails if nothing arrives for `timeout_s`."""

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], timeout_s: float) -> None:
        self._rank = rank
        self._sockets = dict(sockets)
        self._timeout_s = timeout_s
        for connection in sockets.values():
            connection.setblocking(False)

    def exchange(self, rows: Sequence[memoryview]) -> None:
        """Send this rank's row of bytes to every other rank, and receive theirs into the other rows.

        Raises PeerFailed if another rank has closed its socket, or nothing arrived for `timeout_s`.
        """
        mine = rows[self._rank]
        leaving = [(peer, mine) for peer in self._sockets]
        arriving = [(peer, rows[peer]) for peer in self._sockets]
        waiting_since_s = 0.0
        while True:
            left = leaving
            expected = arriving
            if leaving:
                leaving = [(peer, rest) for peer, row in left if (rest := self._send(peer, row))]
            arriving = [(peer, rest) for peer, row in expected if (rest := self._receive(peer, row))]
            if not (leaving or arriving):
                return
            if leaving != left or arriving != expected:
                waiting_since_s = 0.0
            elif not waiting_since_s:
                waiting_since_s = time.monotonic()
            elif time.monotonic() - waiting_since_s < SPIN_S:
                os.sched_yield()
            else:
                self._sleep([peer for peer, _ in leaving], [peer for peer, _ in arriving])

    def _send(self, peer: int, row: memoryview) -> memoryview:
        try:
            return row[self._sockets[peer].send(row) :]
        except BlockingIOError:
            return row
        except OSError as error:
            raise PeerFailed(f"rank {peer} has closed its connection ({error.strerror})") from None

    def _receive(self, peer: int, row: memoryview) -> memoryview:
        try:
            size = self._sockets[peer].recv_into(row)
        except BlockingIOError:
            return row
        except OSError as error:
            raise PeerFailed(f"rank {peer} has closed its connection ({error.strerror})") from None
        if not size:
            raise PeerFailed(f"rank {peer} has closed its connection")
        return row[size:]

    def _sleep(self, to: Sequence[int], of: Sequence[int]) -> None:
        waiting = select.poll()
        for peer in {*to, *of}:
            wanted = (select.POLLOUT if peer in to else 0) | (select.POLLIN if peer in of else 0)
            waiting.register(self._sockets[peer], wanted)
        if not waiting.poll(self._timeout_s * 1000):
            raise PeerFailed(f"nothing came from rank {', '.join(map(str, of))} for {self._timeout_s:g} s")

    def close(self) -> None:
        """Close all sockets."""
        for connection in self._sockets.values():
            connection.close()


def connect(group: Gatherer, timeout_s: float, watch: Callable[[], None] = lambda: None) -> LocalSockets | None:
    """Connect all ranks of `group`. Collective. Returns None on every rank unless all run on this host.

    `watch` is called again and again while this rank waits for another one to connect, and may raise.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        host = read_host_id("net")
        name = b"\0samestep-" + secrets.token_hex().encode()  # abstract: no file; every user can read it
        if host is not None:
            listener.bind(name)
            listener.listen(group.world_size)
        ranks = group.gather((host, name))
        if host is None or any(other != host for other, _ in ranks):
            return None
        sockets: dict[int, socket.socket] = {}
        failure = ""
        deadline_s = time.monotonic() + CONNECT_S
        try:
            for peer in range(group.rank):
                sockets[peer] = connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(CONNECT_S)
                connection.connect(ranks[peer][1])
                if not _is_of_this_user(connection):
                    raise OSError(f"another user listens in place of rank {peer}")
                connection.sendall(group.rank.to_bytes(4))
            while len(sockets) < group.world_size - 1:
                listener.settimeout(min(max(0.0, deadline_s - time.monotonic()), WATCH_S))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    watch()
                    if time.monotonic() < deadline_s:
                        continue
                    raise
                sender = _read_hello(connection)
                if sender is None or sender in sockets or not group.rank < sender < group.world_size:
                    connection.close()  # not a rank of this group
                    continue
                sockets[sender] = connection
        except OSError as error:
            failure = str(error)
        except RuntimeError:  # of `watch`
            for connection in sockets.values():
                connection.close()
            raise
        local_sockets = LocalSockets(group.rank, sockets, timeout_s)
        if any(group.gather(failure)):
            local_sockets.close()
            return None
        return local_sockets


def _read_hello(connection: socket.socket) -> int | None:
    """Return the rank that has connected; None for another user's process or one that is silent."""
    if not _is_of_this_user(connection):
        return None
    connection.settimeout(HELLO_S)
    try:
        return int.from_bytes(connection.recv(4, socket.MSG_WAITALL))
    except OSError:
        return None


def _is_of_this_user(connection: socket.socket) -> bool:
    """Ask the kernel whether the process at the other end runs as this user."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.geteuid())
