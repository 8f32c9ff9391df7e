"""Messages between processes: JSON objects, one per line, over a pipe."""

import json
import math
import os
import select
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from samestep.decoding import decode

READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 22  # the arguments of a program can be long


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
