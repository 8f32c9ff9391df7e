"""Messages between processes: JSON objects, one per line, over pipes and TCP.

The length of a line is limited, because any machine can connect to a rendezvous and send anything.
"""

import json
import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from samestep.decoding import decode
from samestep.world.host import plain_address

READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 22  # the arguments of a program can be long
MAX_GREETING_BYTES = 512  # longest line before the peer has proven knowledge of the secret
# The kernel closes the connection to a machine that has vanished after 2 + 3 x 1 s.
KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 2,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 5000,
}


def encode_message(message: Mapping[str, Any]) -> bytes:
    """Return a message as one line of JSON."""
    return json.dumps(message).encode() + b"\n"


class MessageReader:
    """Reads messages from a file descriptor."""

    def __init__(self, file: int, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._rest = b""  # an incomplete line
        self._messages: deque[dict[str, Any]] = deque()

    def receive(self, timeout_s: float = 0.0) -> dict[str, Any] | None:
        """Return the next message, waiting up to `timeout_s` for it; None if none arrives.

        Raises:
            OSError: the other side has closed the stream.
            ValueError: a line is too long, or is not a JSON object.
        """
        deadline_s = time.monotonic() + timeout_s
        poller = select.poll()  # unlike select.select, works for file descriptors above 1024
        poller.register(self._file, select.POLLIN)
        # With a limit of 0 this reads once, so a peer that sends without end cannot hold the caller.
        while not self._messages and timeout_s >= 0:
            if not poller.poll(None if timeout_s == math.inf else math.ceil(timeout_s * 1000)):
                return None
            data = os.read(self._file, READ_BYTES)
            if not data:
                raise ConnectionError("closed")
            *lines, self._rest = (self._rest + data).split(b"\n")
            if max(map(len, (*lines, self._rest))) > self._max_bytes:
                raise ValueError(f"a line is longer than {self._max_bytes} bytes")
            self._messages += [decode(line, dict[str, Any]) for line in lines]
            timeout_s = deadline_s - time.monotonic()
        return self._messages.popleft() if self._messages else None


class LauncherLink(MessageReader):
    """A TCP connection between a launcher and the rendezvous server. Every message has a "kind".

    Attributes:
        addresses: the addresses of this side and of the peer; they are known after the peer has gone, too.

    Raises:
        OSError: the peer has closed the connection.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection.fileno(), MAX_GREETING_BYTES)
        self._socket = connection
        try:
            self.addresses = (
                plain_address(connection.getsockname()[0]),
                plain_address(connection.getpeername()[0]),
            )
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option, value in KEEP_ALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        except OSError:
            connection.close()
            raise

    def trust(self) -> None:
        """Accept long lines, because the peer has proven knowledge of the secret."""
        self._max_bytes = MAX_LINE_BYTES

    def fileno(self) -> int:
        """The file descriptor, for select."""
        return self._socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message. A closed connection is reported by `receive`, not here."""
        with suppress(OSError):
            self._socket.sendall(encode_message({"kind": kind, **fields}))

    def receive(self, timeout_s: float = 0.0) -> dict[str, Any] | None:
        """As for `MessageReader`. Raises ValueError for a message without a kind, too."""
        message = super().receive(timeout_s)
        if message is not None and not isinstance(message.get("kind"), str):
            raise ValueError("not a message")
        return message

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
