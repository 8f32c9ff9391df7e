"""Splitting streams into lines and messages, with a limit on what a peer can send."""

import math
import os
import socket
import struct

import pytest

from samestep.launch.messages import LauncherLink, MessageReader, encode_message


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


def test_the_addresses_of_a_peer_that_has_reset_the_connection() -> None:
    """The rendezvous server asks for them before it has read the end of the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        link = LauncherLink(listener.accept()[0])
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends a reset
        theirs.close()
        with pytest.raises(ConnectionError):
            link.receive(math.inf)
        assert link.addresses == ("127.0.0.1", "127.0.0.1")
        link.close()


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
