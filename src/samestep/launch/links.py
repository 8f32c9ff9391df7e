"""Messages between launchers over TCP. Lengths are limited, because any machine can connect and send anything."""

import errno
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from samestep.errors import Error
from samestep.launch.lines import MAX_LINE_BYTES, MessageReader, encode_message, wait_readable
from samestep.world.host import plain_address

MAX_GREETING_BYTES = 512  # longest line before the peer has proven that it knows the secret
# The kernel closes the connection to a machine that has vanished after 2 + 3 x 1 s.
KEEP_ALIVE = (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 5000))


class Link:
    """A connection between a launcher and the rendezvous server. Every message has a "kind"."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = MessageReader(connection.fileno(), MAX_GREETING_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in KEEP_ALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def trust(self) -> None:
        """Accept long lines: the peer has proven that it knows the secret."""
        self._reader.lines.max_bytes = MAX_LINE_BYTES

    def fileno(self) -> int:
        """The file descriptor, for select."""
        return self._socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message. A closed connection is reported by `receive`, not here."""
        with suppress(OSError):
            self._socket.sendall(encode_message({"kind": kind, **fields}))

    def receive(self, timeout_s: float = 0.0) -> list[dict[str, Any]]:
        """Return the messages that have arrived, waiting up to `timeout_s` for the first.

        Raises:
            OSError: the connection is closed.
            ValueError: the peer has sent something else than a message, or a line that is too long.
        """
        messages: list[dict[str, Any]] | None = self._reader.take_pending()
        if not messages:
            messages = self._reader.read() if wait_readable(self._socket.fileno(), timeout_s) else []
        if messages is None:
            raise ConnectionError("closed")
        if not all(isinstance(message.get("kind"), str) for message in messages):
            raise ValueError("not a message")
        return messages

    def receive_one(self, timeout_s: float) -> dict[str, Any] | None:
        """Return one message; None if none arrives in time. The next call returns those that follow."""
        messages = self.receive(timeout_s)
        self._reader.put_back(messages[1:])
        return messages[0] if messages else None

    @property
    def addresses(self) -> tuple[str, str]:
        """The addresses of this side and of the peer."""
        return plain_address(self._socket.getsockname()[0]), plain_address(self._socket.getpeername()[0])

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def check_fields(fields: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Raise ValueError unless `fields` has exactly these names, each with a value of its type."""
    if fields.keys() != kinds.keys() or not all(isinstance(fields[name], kind) for name, kind in kinds.items()):
        raise ValueError("fields are missing, too many or of another type")


def open_listener(address: str, port: int) -> socket.socket | None:
    """Listen at an address of this machine ("": all). Returns None if the port is in use.

    Raises:
        Error: the port cannot be opened for another reason.
    """
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
            reason = error.strerror or str(error)  # IPv6 can be turned off
    raise Error(f"port {port} cannot be opened here ({reason}): choose one above 1023")
