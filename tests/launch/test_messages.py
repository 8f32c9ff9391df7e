"""Splitting streams into lines and messages, with a limit on what a peer can send."""

import math
import os
import socket

import pytest

from samestep.launch.messages import MessageReader, encode_message


def test_messages() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        reader = MessageReader(ours.fileno(), 64)
        assert reader.receive() is None
        theirs.sendall(encode_message({"a": 1}) + encode_message({"b": 2}) + b"{")
        assert [reader.receive(5), reader.receive(), reader.receive(0.01)] == [{"a": 1}, {"b": 2}, None]
        theirs.sendall(b"}\n")
        theirs.close()
        assert reader.receive(math.inf) == {}
        with pytest.raises(ConnectionError):
            reader.receive()


@pytest.mark.parametrize("line", [b"[1]\n", b"GET / HTTP/1.1\n", b"x" * 100, b"[" * 60 + b"\n"])
def test_what_is_no_message(line: bytes) -> None:
    ours, theirs = os.pipe()
    try:
        os.write(theirs, line)
        with pytest.raises(ValueError):  # noqa: PT011
            MessageReader(ours, 64).receive()
    finally:
        os.close(ours)
        os.close(theirs)
