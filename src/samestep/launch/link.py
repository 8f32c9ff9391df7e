"""Messages between the nodes of a launch, through a store on node 0.

Everything that reaches the store's port can write to it, so that each entry is signed with the nodes' secret, together
with its name. A node writes its beat again and again: the name of its process, and a number. Messages are in entries
that are named by both processes and numbered, so that those of an earlier start, or a repeated one, are never read.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from samestep.world.rendezvous_store import SignedEntries

EVERY_S = 0.05  # between two looks into the store
LOST_S = 3.0  # without a beat


class NodeBeat(NamedTuple):
    """What a node writes again and again. `number` grows, and is -1 at the end."""

    process: str
    number: int


@dataclass
class Peer:
    """Another node, as this one sees it.

    Attributes:
        beat: its newest.
        is_here: it has written two beats, so that its entry is not that of an earlier start.
        beat_s: when the newest was seen.
        sent, received: number of messages.
        waiting: messages to send once it is there.
    """

    beat: NodeBeat | None = None
    is_here: bool = False
    is_lost: bool = False
    beat_s: float = 0.0
    sent: int = 0
    received: int = 0
    waiting: list[str] = field(default_factory=list)


class Link(threading.Thread):
    """The link of one node to others. Its thread uses the store, because a store that no longer answers blocks it.

    Args:
        own: the number of this node.
        others: those of the others: node 0 has links to all, and each of them to node 0.
        open_store: opens the store, or a connection to it; called in the thread.

    Attributes:
        is_open: whether the store has answered.
        has_stranger: a beat has a wrong signature.
    """

    def __init__(self, own: int, others: Sequence[int], secret: str, open_store: Callable[[], Any]) -> None:
        super().__init__(name="samestep link", daemon=True)
        self.is_open = False
        self.has_stranger = False
        self._own = own
        self._secret = secret
        self._open_store = open_store
        self._process = secrets.token_hex(8)
        self._count = 0
        self._outbox = SimpleQueue[tuple[int, str]]()
        self._inbox = SimpleQueue[tuple[int, str | None]]()
        self._peers = {node: Peer() for node in others}
        self._alive_s = time.monotonic()
        self._is_closing = threading.Event()

    def send(self, node: int, message: str) -> None:
        """Send a message, now or once the node is there."""
        self._outbox.put((node, message))

    def receive(self) -> list[tuple[int, str | None]]:
        """Return the messages that have arrived, each with its node; None for a node that no longer answers."""
        found = list[tuple[int, str | None]]()
        while True:
            try:
                found.append(self._inbox.get_nowait())
            except Empty:
                break
        if self.is_open and time.monotonic() > self._alive_s + LOST_S:  # the store does not answer
            found += [(node, None) for node in self._peers]
        return found

    def sees(self, node: int) -> bool:
        """Return whether a node is there."""
        return self._peers[node].is_here

    def close(self, limit_s: float) -> None:
        """Send what is left, and wait until the other nodes have closed their links, too."""
        self._is_closing.set()
        self.join(limit_s)

    def run(self) -> None:
        try:
            entries = SignedEntries(self._secret.encode(), self._open_store())
            while not self._is_closing.wait(EVERY_S):
                self._work(entries)
            self._say_goodbye(entries)
        except (RuntimeError, OSError):  # the store has closed, or cannot be reached
            for node, peer in self._peers.items():
                if self.is_open:
                    self._lose(node, peer)

    def _say_goodbye(self, entries: SignedEntries) -> None:
        self._work(entries)
        if self._own == 0:  # the others must have read its last messages before the store closes
            while any(peer.is_here and not peer.is_lost for peer in self._peers.values()):
                self._work(entries)
                time.sleep(EVERY_S)
        else:
            self._count = -2
            self._work(entries)

    def _work(self, entries: SignedEntries) -> None:
        self._count += 1
        entries.put(f"node/{self._own}", f"{self._process} {self._count}")
        while not self._outbox.empty():
            node, message = self._outbox.get()
            self._peers[node].waiting.append(message)
        for node, peer in self._peers.items():
            if not peer.is_lost:
                self._exchange(entries, node, peer)
        self._alive_s = time.monotonic()
        self.is_open = True

    def _exchange(self, entries: SignedEntries, node: int, peer: Peer) -> None:
        texts = entries.read([f"node/{node}"])
        if texts is None:
            return
        if not texts:
            self.has_stranger = True
            return
        process, _, count = texts[0].partition(" ")
        self._note_beat(node, peer, NodeBeat(process, int(count)))
        if peer.beat is None or not peer.is_here:
            return
        for message in peer.waiting:
            entries.put(f"{self._process}/{peer.beat.process}/{peer.sent}", message)
            peer.sent += 1
        peer.waiting = []
        while arrived := entries.read([f"{peer.beat.process}/{self._process}/{peer.received}"]):
            peer.received += 1
            self._inbox.put((node, arrived[0]))
        if peer.beat.number < 0 or time.monotonic() > peer.beat_s + LOST_S:
            self._lose(node, peer)

    def _note_beat(self, node: int, peer: Peer, beat: NodeBeat) -> None:
        if beat == peer.beat:
            return
        if peer.is_here and peer.beat is not None and beat.process != peer.beat.process:
            self._lose(node, peer)  # it was started again
            return
        peer.is_here = peer.beat is not None and beat.process == peer.beat.process
        peer.beat = beat
        peer.beat_s = time.monotonic()

    def _lose(self, node: int, peer: Peer) -> None:
        if not peer.is_lost:
            peer.is_lost = True
            self._inbox.put((node, None))


def is_listening(host: str, port: int) -> bool:
    """Return whether something listens there. torch prints pages while it tries to connect."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
