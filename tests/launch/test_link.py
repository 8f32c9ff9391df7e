"""Links between nodes over one store: messages arrive once and in order, and what a stranger writes is not read."""

import math
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch.distributed as dist
from support.ports import reserve_port
from support.waiting import wait_until

from samestep.errors import Error
from samestep.launch import launcher
from samestep.launch.launcher import Agent, Launch
from samestep.launch.link import LOST_S, Finish, Link, Lost, Message, Nodes, Print, Signal
from samestep.launch.target import Target
from samestep.world.signed import SignedEntries

SECRET = "a secret of this run's nodes"


class Place:
    """A store, and the links over it."""

    def __init__(self) -> None:
        self.store = dist.HashStore()  # type: ignore[attr-defined]  # a TCPStore would be inherited by later forks
        self.entries = SignedEntries(SECRET.encode(), self.store)
        self.links: list[Link] = []

    def open(self, own: int, others: list[int], secret: str = SECRET) -> Link:
        link = Link(own, others, secret, lambda: self.store)
        link.start()
        self.links.append(link)
        return link

    def pair(self) -> tuple[Link, Link]:
        return self.open(0, [1]), self.open(1, [0])

    def assert_lost(self, link: Link, other: int) -> None:
        """Its next message is that another node is lost."""
        assert [(node, type(message)) for node, message in self.take(link, 1)] == [(other, Lost)]

    def take(self, link: Link, num: int) -> list[tuple[int, Message]]:
        found: list[tuple[int, Message]] = []
        wait_until(lambda: found.extend(link.receive()) or len(found) >= num, f"{num} messages")
        return found


@pytest.fixture
def place() -> Iterator[Place]:
    opened = Place()
    yield opened
    for link in reversed(opened.links):
        link.close(5.0)
    assert not any(link.is_alive() for link in opened.links)


def test_messages_arrive_in_order(place: Place) -> None:
    """Also those that were sent before the other node was there."""
    first = place.open(0, [1, 2])
    for number in range(20):
        first.send(1, Print(str(number)))
    second, third = place.open(1, [0]), place.open(2, [0])
    assert place.take(second, 20) == [(0, Print(str(number))) for number in range(20)]
    second.send(0, Print("from 1"))
    third.send(0, Print("from 2"))
    assert dict(place.take(first, 2)) == {1: Print("from 1"), 2: Print("from 2")}


def test_a_node_that_ends_is_lost(place: Place) -> None:
    first, second = place.pair()
    wait_until(lambda: first.sees(1) and second.sees(0), "they see each other")
    second.close(5.0)
    place.assert_lost(first, 1)


def test_a_node_that_stands_still_is_lost_within_seconds(place: Place) -> None:
    """As if its machine had vanished: its connection does not close."""
    first = place.open(0, [1])
    for number in (1, 2):
        place.entries.put("node/1", ("0123456789abcdef", number))
        wait_until(lambda: first._peers[1].beat == ("0123456789abcdef", number), "it is seen")  # noqa: B023
    began_s = time.monotonic()
    assert first.sees(1)
    place.assert_lost(first, 1)
    assert time.monotonic() - began_s >= LOST_S - 1.0, "it was not lost before"


def repeat(place: Place) -> None:
    """A signed entry under another name."""
    signed = place.store.get("samestep/node/0")
    for name in ("node/1", "node/2"):
        place.store.set(f"samestep/{name}", signed)


def forge(place: Place) -> None:
    """Entries with the signature of another secret."""
    forger = SignedEntries(b"another secret", place.store)
    forger.put("node/1", ("0123456789abcdef", 7))
    for key in ("a/b/0", "node/0/0"):
        forger.put(key, Signal(9))


@pytest.mark.parametrize(
    "attack", [lambda place: place.store.set("samestep/node/1", b"x" * 99), repeat, forge]
)
def test_a_stranger_is_not_heard(place: Place, attack: Callable[[Place], None]) -> None:
    first = place.open(0, [1])
    wait_until(lambda: math.isfinite(first._alive_s), "the store is open")
    attack(place)
    count = first._count
    wait_until(lambda: first._count > count + 1, "it has looked")
    assert (first.receive(), first.sees(1)) == ([], False)
    second = place.open(1, [0])
    second.send(0, Print("a message"))
    assert place.take(first, 1) == [(1, Print("a message"))]


def run_node(nodes: Nodes, received: list[int] | None = None) -> Finish:
    class Server:
        def receive(self, timeout_s: float) -> None:
            time.sleep(timeout_s)

    launch = Launch(Target("script", "train.py"), 1, {}, received or [], nodes)
    with closing(Agent(Server(), launch)) as agent:  # type: ignore[arg-type]
        return launcher.run_node(agent)


def test_no_answer() -> None:
    with reserve_port() as port, pytest.raises(Error, match=f"no answer from 127.0.0.1:{port} within 0 s"):
        run_node(Nodes(2, 1, "127.0.0.1", port, 0.2, SECRET))


def test_the_port_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(Error, match=f"port {port} is in use here: choose another one"):
            run_node(Nodes(2, 0, "127.0.0.1", port, 60.0, SECRET))


def test_a_node_that_waits_ends_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been trained, and the user gives the same command again."""
    store = dist.HashStore()  # the nodes of this process meet without a port
    monkeypatch.setattr(launcher, "_find_store", lambda nodes: lambda: store)
    with reserve_port() as port:
        for node in (0, 1):
            assert run_node(Nodes(2, node, "127.0.0.1", port, 60.0, SECRET), [signal.SIGINT]).code == 130


def test_a_node_that_was_started_again_is_lost(place: Place) -> None:
    """The launch has begun with another process, whose messages are not mixed with those of the new one."""
    first, second = place.pair()
    wait_until(lambda: first.sees(1), "it is there")
    second._is_closing.set()
    place.open(1, [0])
    place.assert_lost(first, 1)


def test_a_beat_of_an_earlier_start_is_no_node(place: Place) -> None:
    """The engine's store outlives a start of the agents."""
    place.entries.put("node/1", ("0123456789abcdef", 7))
    first = place.open(0, [1])
    first.send(1, Print("a message"))
    wait_until(lambda: first._count > 5, "it has looked")
    assert not first.sees(1)
    assert place.take(place.open(1, [0]), 1) == [(0, Print("a message"))], "it was not sent to the earlier start"
