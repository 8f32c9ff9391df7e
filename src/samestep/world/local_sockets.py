"""Stream sockets between the ranks of one host, for the small messages that every step waits for.

A gloo message shakes hands first and arrives in a thread that must be scheduled before the waiting one is: 0.4 ms and
more for a few kB, against 0.05 ms here (docs/decisions/routes.md).
"""

import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from samestep.errors import PeerFailed

# A peer that works on a like share is at most this late as a rule. A rank that slept meanwhile would lose as much
# again on waking up.
SPIN_S = 200e-6
CONNECT_S = 60.0  # for all ranks of the host to connect
HELLO_S = 10.0  # for one that has connected to say which rank it is
TOKEN_BYTES = 16


class Gatherer(Protocol):
    """What connecting needs of a `Group`."""

    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]: ...


class Neighbors:
    """The other ranks of this host, each over a socket of its own.

    Args:
        sockets: by rank; closed by `close`.
        timeout_s: for how long `exchange` waits for a sign of life.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], timeout_s: float) -> None:
        self._rank, self._sockets, self._timeout_s = rank, dict(sockets), timeout_s
        for connection in sockets.values():
            connection.setblocking(False)

    def exchange(self, rows: Sequence[memoryview]) -> None:
        """Sends this rank's row of bytes to every other rank, and receives theirs into their rows.

        Raises:
            PeerFailed: another rank is gone, or has sent nothing for `timeout_s`.
        """
        mine = rows[self._rank]
        leaving = [(peer, mine) for peer in self._sockets]
        arriving = [(peer, rows[peer]) for peer in self._sockets]
        waiting_since_s = 0.0
        while True:
            left, expected = leaving, arriving
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
            raise PeerFailed(f"rank {peer} is gone ({error.strerror})") from None

    def _receive(self, peer: int, row: memoryview) -> memoryview:
        try:
            size = self._sockets[peer].recv_into(row)
        except BlockingIOError:
            return row
        except OSError as error:
            raise PeerFailed(f"rank {peer} is gone ({error.strerror})") from None
        if not size:
            raise PeerFailed(f"rank {peer} is gone")
        return row[size:]

    def _sleep(self, to: Sequence[int], of: Sequence[int]) -> None:
        waiting = select.poll()
        for peer in {*to, *of}:
            wanted = (select.POLLOUT if peer in to else 0) | (select.POLLIN if peer in of else 0)
            waiting.register(self._sockets[peer], wanted)
        if not waiting.poll(self._timeout_s * 1000):
            raise PeerFailed(f"nothing came from rank {', '.join(map(str, of))} for {self._timeout_s:g} s")

    def close(self) -> None:
        """Hangs up on all of them."""
        for connection in self._sockets.values():
            connection.close()


def connect(
    group: Gatherer, timeout_s: float, said: Any = None, check: Callable[[Sequence[Any]], None] | None = None
) -> Neighbors | None:
    """Connects all ranks of `group`; None, on every rank, unless they all run on this one host.

    Args:
        said, check: each rank's value that goes along in the exchange, and what is called with those of all. May raise.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        where, token = _find_host(), secrets.token_bytes(TOKEN_BYTES)
        name = b"\0samestep-" + secrets.token_hex(TOKEN_BYTES).encode()  # abstract: no file; everybody can read it
        if where is not None:
            listener.bind(name)
            listener.listen(group.world_size)
        told = group.gather((where, name, token, said))
        if check is not None:
            check([each[3] for each in told])
        if where is None or any(theirs != where for theirs, *_ in told):
            return None
        sockets: dict[int, socket.socket] = {}
        failure, deadline_s = "", time.monotonic() + CONNECT_S
        try:
            for peer in range(group.rank):
                sockets[peer] = connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(CONNECT_S)
                connection.connect(told[peer][1])
                if not _is_of_this_user(connection):
                    raise OSError(f"another user listens in place of rank {peer}")
                connection.sendall(told[peer][2] + group.rank.to_bytes(4))
            while len(sockets) < group.world_size - 1:
                listener.settimeout(max(0.0, deadline_s - time.monotonic()))
                connection, _ = listener.accept()
                said_rank = _read_hello(connection, token)
                if said_rank is None or said_rank in sockets or not group.rank < said_rank < group.world_size:
                    connection.close()  # a stranger
                    continue
                sockets[said_rank] = connection
        except OSError as error:
            failure = str(error)
        neighbors = Neighbors(group.rank, sockets, timeout_s)
        if any(group.gather(failure)):
            neighbors.close()
            return None
        return neighbors


def _read_hello(connection: socket.socket, token: bytes) -> int | None:
    """The rank that has connected; None for a process of another user, or one that does not know the token."""
    if not _is_of_this_user(connection):
        return None
    connection.settimeout(HELLO_S)
    try:
        hello = connection.recv(TOKEN_BYTES + 4, socket.MSG_WAITALL)
    except OSError:
        return None
    return int.from_bytes(hello[TOKEN_BYTES:]) if hmac.compare_digest(hello[:TOKEN_BYTES], token) else None


def _is_of_this_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user, as the kernel says."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.geteuid())


def _find_host() -> tuple[str, int] | None:
    """What tells hosts apart: the kernel's boot and its network namespace, in which the sockets' names live."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(), os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None
