"""Lines and JSON messages on sockets and pipes. The length of a line is limited."""

import json
import math
import os
import select
from collections.abc import Mapping
from typing import Any

READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 22  # the arguments of a program can be long


def wait_readable(file: int, timeout_s: float) -> bool:
    """Wait up to `timeout_s` for input or the end of the stream. Raises ValueError if the file is closed here."""
    poller = select.poll()  # unlike select.select, works for file descriptors above 1024
    poller.register(file, select.POLLIN)
    return bool(poller.poll(math.ceil(timeout_s * 1000)))


class LineSplitter:
    """Splits a stream of bytes into lines.

    Args:
        max_bytes: the longest line.
        cuts: cut a longer line into pieces instead of raising.
    """

    def __init__(self, max_bytes: int = MAX_LINE_BYTES, *, cuts: bool = False) -> None:
        self.max_bytes = max_bytes
        self._cuts = cuts
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes. Returns the complete lines, without their newlines.

        Raises:
            ValueError: a line is too long.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self.max_bytes and self._cuts:
            lines.append(self.flush())
        elif max(map(len, (*lines, self._rest))) > self.max_bytes and not self._cuts:
            raise ValueError(f"a line is longer than {self.max_bytes} bytes")
        return lines

    def flush(self) -> bytes:
        """Return the incomplete last line, and drop it."""
        rest, self._rest = self._rest, b""
        return rest


def encode_message(message: Mapping[str, Any]) -> bytes:
    """Return a message as one line of JSON."""
    return json.dumps(message).encode() + b"\n"


def parse_message(line: bytes) -> dict[str, Any]:
    """Parse a line of JSON. Raises ValueError if it is not an object."""
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")
    return message


class MessageReader:
    """Reads JSON messages, one per line, from a file descriptor. Empty lines are skipped.

    Attributes:
        lines: the splitter, which holds the limit.
    """

    def __init__(self, file: int, max_bytes: int = MAX_LINE_BYTES) -> None:
        self.lines = LineSplitter(max_bytes)
        self._file = file
        self._pending: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]] | None:
        """Read once. Returns the complete messages, maybe none; None at the end of the stream.

        Raises:
            ValueError: a line is too long, or is not a JSON object.
        """
        if self._pending:
            return self.take_pending()
        try:
            data = os.read(self._file, READ_BYTES)
        except OSError:  # the other side has closed the connection or the terminal
            data = b""
        return [parse_message(line) for line in self.lines.feed(data) if line] if data else None

    def read_one(self) -> dict[str, Any] | None:
        """Block until a message arrives; None at the end of the stream. `read` returns the messages that follow."""
        while (messages := self.read()) is not None:
            if messages:
                self._pending = messages[1:]
                return messages[0]
        return None

    def take_pending(self) -> list[dict[str, Any]]:
        """Return, without reading, the messages that `read_one` or `put_back` has left."""
        messages, self._pending = self._pending, []
        return messages

    def put_back(self, messages: list[dict[str, Any]]) -> None:
        """Make the next `read` return these messages."""
        self._pending = messages
