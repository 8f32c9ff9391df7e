"""Messages between launchers, as JSON lines over TCP; with limits, since anybody may connect and send anything."""

import errno
import ipaddress
import json
import select
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from samestep.errors import Error

RECEIVE_BYTES = 1 << 16
MAX_GREETING = 512  # bytes of a line before the other side has proven that it knows the secret
MAX_LINE = 1 << 22  # bytes of a line after that: a program's arguments may be long
# A machine that vanishes is given up after 2 + 3 x 1 s.
KEEP_ALIVE = (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 5000))


class Link:
    """Messages, as JSON lines, between a launcher and the hub."""

    def __init__(self, connection: socket.socket) -> None:
        self.max_line = MAX_GREETING  # bytes
        self._socket = connection
        self._received = b""
        self._kept: list[dict[str, Any]] = []
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in KEEP_ALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message. Who cannot be reached is found out by receiving."""
        with suppress(OSError):
            self._socket.sendall((json.dumps({"kind": kind, **fields}) + "\n").encode())

    def receive(self, timeout_s: float = 0.0) -> list[dict[str, Any]]:
        """What has come, waiting for up to `timeout_s` for it.

        Raises:
            OSError: the other side is gone.
            ValueError: what has come is no message, or too long for one.
        """
        kept, self._kept = self._kept, []
        if kept:
            return kept
        ready, _, _ = select.select([self._socket], [], [], timeout_s)
        if not ready:
            return []
        data = self._socket.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionError("closed")
        *lines, self._received = (self._received + data).split(b"\n")
        if max(map(len, (*lines, self._received))) > self.max_line:
            raise ValueError("a line is too long")
        return [_parse(line) for line in lines]

    def receive_one(self, timeout_s: float) -> dict[str, Any] | None:
        """As `receive`; what comes with the first message is kept for later."""
        messages = self.receive(timeout_s)
        self._kept = messages[1:]
        return messages[0] if messages else None

    @property
    def addresses(self) -> tuple[str, str]:
        """This side's, and the other's."""
        return plain_address(self._socket.getsockname()[0]), plain_address(self._socket.getpeername()[0])

    def close(self) -> None:
        """Lets the other side know."""
        self._socket.close()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("not a message")
    return message


def check_fields(fields: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Raises ValueError unless `fields` has exactly these names, each with a value of its type."""
    if fields.keys() != kinds.keys() or not all(isinstance(fields[name], kind) for name, kind in kinds.items()):
        raise ValueError("fields are missing, too many or of another type")


def plain_address(address: str) -> str:
    """An address without the dress that a socket for both families, or an interface, gives it."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)


def open_listener(address: str, port: int) -> socket.socket | None:
    """A socket at an address of this machine ("": at all); None where the port is in use. Raises Error at no socket."""
    reason = ""
    families = [socket.AF_INET6, socket.AF_INET] if socket.has_dualstack_ipv6() else [socket.AF_INET]
    if address:
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET]
    for family in families:
        try:
            both = family == socket.AF_INET6 and not address
            return socket.create_server((address, port), family=family, dualstack_ipv6=both, backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            reason = error.strerror or str(error)  # IPv6 may be turned off
    raise Error(f"port {port} cannot be opened here ({reason}): choose one above 1023")
