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
CHECK_S = 0.05  # between two calls of `check`


class Gatherer(Protocol):
    """What `connect` needs of a `Group`, to find out which ranks share a host."""

    rank: int
    local_rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]: ...


class LocalSockets:
    """One socket to each other rank of this host."""

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._sockets = dict(sockets)
        for connection in sockets.values():
            connection.setblocking(False)

    def exchange(self, rows: Sequence[memoryview]) -> None:
        """Send this rank's row of bytes to every other rank, and receive theirs into the other rows.

        Raises PeerFailed if another rank has closed its socket.
        """
        leaving = [(peer, rows[self._rank]) for peer in self._sockets]
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
        waiting.poll()

    def close(self) -> None:
        """Close all sockets."""
        for connection in self._sockets.values():
            connection.close()


def connect(group: Gatherer, check: Callable[[], None] = lambda: None) -> LocalSockets | None:
    """Connect all ranks of `group`. Collective. Returns None on every rank unless all run on this host.

    The kernel says which process is at the other end, so that no other one is taken for a rank.

    Args:
        check: is called again and again while this rank waits for another one to connect, and may raise.

    Raises:
        PeerFailed: a rank has ended, or has not connected in time, or this process may open no further files.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        system = (read_host_id("net"), read_host_id("pid"))
        name = b"\0samestep-" + secrets.token_hex().encode()  # abstract: no file; every user can read it
        if None not in system:
            listener.bind(name)
            listener.listen(group.world_size)
        systems, names, pids = zip(*group.gather((system, name, os.getpid())), strict=True)
        if None in system or len({*systems}) > 1:
            return None
        sockets: dict[int, socket.socket] = {}
        try:
            for peer in range(group.rank):
                sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sockets[peer].settimeout(CONNECT_S)
                sockets[peer].connect(names[peer])
                if _read_pid(sockets[peer]) != pids[peer]:
                    raise OSError(f"another process listens instead of rank {peer}")
            _accept(listener, sockets, {pid: rank for rank, pid in enumerate(pids)}, check)
        except (OSError, RuntimeError) as error:  # RuntimeError: of `check`
            for connection in sockets.values():
                connection.close()
            raise PeerFailed(f"a rank of this host cannot be reached ({error})") from error
        return LocalSockets(group.rank, sockets)


def _accept(
    listener: socket.socket, sockets: dict[int, socket.socket], ranks: Mapping[int, int], check: Callable[[], None]
) -> None:
    """Add the connections of the other ranks to `sockets`. `ranks`: by pid."""
    listener.settimeout(CHECK_S)
    deadline_s = time.monotonic() + CONNECT_S
    while len(sockets) < len(ranks) - 1:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            check()
            if time.monotonic() > deadline_s:
                raise
            continue
        peer = ranks.get(_read_pid(connection))
        if peer is None:
            connection.close()
        else:
            sockets[peer] = connection


def _read_pid(connection: socket.socket) -> int:
    """Ask the kernel for the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])
