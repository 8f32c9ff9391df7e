"""Splitting streams into lines and messages, with a limit on what a peer can send."""

import os
import socket

import pytest

from samestep.launch.lines import LineSplitter, MessageReader, encode_message, wait_readable


def test_lines_that_arrive_in_pieces() -> None:
    lines = LineSplitter(8)
    assert lines.feed(b"on") == []
    assert lines.feed(b"e\ntwo\nth") == [b"one", b"two"]
    assert (lines.flush(), lines.flush()) == (b"th", b"")


@pytest.mark.parametrize("data", [b"x" * 9, b"x" * 9 + b"\n", b"one\n" + b"x" * 9])
def test_a_line_that_is_too_long(data: bytes) -> None:
    with pytest.raises(ValueError, match="longer than 8 bytes"):
        LineSplitter(8).feed(data)
    assert b"".join(LineSplitter(8, cuts=True).feed(data)) == data.replace(b"\n", b"")


def test_messages() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        reader = MessageReader(ours.fileno(), 64)
        assert not wait_readable(ours.fileno(), 0)
        theirs.sendall(b"\n" + encode_message({"a": 1}) + encode_message({"b": 2}))
        assert wait_readable(ours.fileno(), 5)
        assert reader.read_one() == {"a": 1}
        assert reader.read() == [{"b": 2}]
        theirs.close()
        assert wait_readable(ours.fileno(), 5), "the end of the stream is an event"
        assert reader.read() is None
        assert reader.read_one() is None


@pytest.mark.parametrize("line", [b"[1]\n", b"GET / HTTP/1.1\n", b"x" * 100, b"[" * 60 + b"\n"])
def test_what_is_no_message(line: bytes) -> None:
    ours, theirs = os.pipe()
    try:
        os.write(theirs, line)
        with pytest.raises(ValueError):  # noqa: PT011
            MessageReader(ours, 64).read()
    finally:
        os.close(ours)
        os.close(theirs)
