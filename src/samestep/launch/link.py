"""The messages between the nodes of a launch, through a store on node 0. A node is one machine's agent.

Everything that reaches the store's port can write to it, so that each entry is signed with the nodes' secret, together
with its name. A node writes its beat again and again: the name of its process, and a number. Messages are in entries
that are named by both processes and numbered, so that those of an earlier start, or a repeated one, are never read.
"""

import hmac
import math
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from msgspec import Struct

from samestep.launch.rank_reports import RankFailure
from samestep.world.environment import LOCALHOST, Outcome, Restart
from samestep.world.signed import SignedEntries

EVERY_S = 0.05  # between two looks into the store
LOST_S = 3.0  # without a beat

# --- events -----------------------------------------------------------------------------------------------------------


class Tick(Struct, tag=True, frozen=True):
    """Time has passed."""


class Joined(Struct, tag=True, frozen=True):
    """A node is there.

    Attributes:
        host: its name.
        address: from which it reaches the others; "" on one machine.
    """

    host: str
    num_ranks: int
    address: str = ""


class Ended(Struct, tag=True, frozen=True):
    """The process of a rank has ended.

    Attributes:
        code: exit code, or minus the signal that killed it.
        failure: None if it has done what it should.
        outcome: how its run has ended, if it has noted that.
    """

    rank: int
    code: int
    failure: RankFailure | None = None
    outcome: Outcome = Outcome.UNKNOWN


class Signalled(Struct, tag=True, frozen=True):
    """A node has received a signal to stop."""

    signum: int


class Broken(Struct, tag=True, frozen=True):
    """A node cannot start its ranks. Has the message and the code of an Error."""

    message: str
    error_code: str = ""


class Lost(Struct, tag=True, frozen=True):
    """A node no longer answers. `time_s`: wall-clock time."""

    time_s: float


class Board(Struct, tag=True, frozen=True):
    """What the ranks of a launch with `--heal` have written into their store.

    Attributes:
        is_ready: all have begun their first loop, so that others can continue if one dies.
        has_met: all members of the newest generation have come to it.
        stuck: ranks that do not respond.
        reason: why they must end.
    """

    is_ready: bool
    has_met: bool
    stuck: list[int] = []
    reason: str = ""


Event = Tick | Joined | Ended | Signalled | Broken | Lost | Board

# --- commands ---------------------------------------------------------------------------------------------------------


class Start(Struct, tag=True, frozen=True):
    """Start the ranks.

    Attributes:
        num_restarts, restart: how often the ranks were restarted, and why the last time.
        node: the number of this node.
        first_rank: the number of this node's first rank.
        addresses: those of all nodes.
        sentence: which ranks are where.
        heals: whether the other ranks continue if one dies.
        port: of the ranks' store, on node 0.
    """

    num_restarts: int
    restart: Restart | None
    node: int
    first_rank: int
    world_size: int
    addresses: list[str] = []
    sentence: str = ""
    heals: bool = False
    port: int = 0


class Signal(Struct, tag=True, frozen=True):
    """Send a signal to the ranks. `spares`: not to those that have reported an error, and complete a snapshot."""

    signum: int
    spares: bool = False


class EndStuck(Struct, tag=True, frozen=True):
    """Kill a rank that does not respond. `reason`: a sentence, for the failure."""

    rank: int
    reason: str


class Continue(Struct, tag=True, frozen=True):
    """Name the ranks that continue after a death: a generation. No members: none continues."""

    number: int
    members: list[int]


class Print(Struct, tag=True, frozen=True):
    """Print a sentence."""

    sentence: str


class Report(Struct, tag=True, frozen=True):
    """Print the failure of a rank of this node. `then`: what follows, if the launch does not end."""

    failure: RankFailure
    world_size: int
    then: str = ""


class Finish(Struct, tag=True, frozen=True):
    """End the launch.

    Attributes:
        code: its exit code.
        message: the reason, if that is not the failure of a rank.
        error_code: its code, if it is an Error.
        failure: of the rank that has failed first.
    """

    code: int
    message: str = ""
    error_code: str = ""
    failure: RankFailure | None = None


Command = Start | Signal | EndStuck | Continue | Print | Report | Finish
Message = Event | Command

# --- the link ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nodes:
    """The nodes of a launch.

    Attributes:
        node: the number of this one.
        host, port: where they meet, at node 0.
        timeout_s: limit for the other nodes to join.
        secret: shared by all nodes.
        has_store: whether the engine that has started the nodes holds a store there.
    """

    num_nodes: int = 1
    node: int = 0
    host: str = LOCALHOST
    port: int = 0
    timeout_s: float = 0.0
    secret: str = field(default_factory=secrets.token_hex, repr=False)
    has_store: bool = False

    @property
    def endpoint(self) -> str:
        """Host and port, as on the command line."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PeerState(Enum):
    """Whether another node is there."""

    UNSEEN = auto()  # it has not written two beats: its entry may be that of an earlier start
    HERE = auto()
    LOST = auto()


@dataclass
class Peer:
    """Another node, as this one sees it.

    Attributes:
        beat: its newest: the name of its process, and a number, which is negative at the end.
        beat_s: when the newest was seen.
        sent, received: number of messages.
        waiting: messages to send once it is there.
    """

    beat: tuple[str, int] = ("", 0)
    state: PeerState = PeerState.UNSEEN
    beat_s: float = 0.0
    sent: int = 0
    received: int = 0
    waiting: deque[Message] = field(default_factory=deque)


class Link(threading.Thread):
    """The link of one node to others. Its thread uses the store, because a store that no longer answers blocks it.

    Args:
        own: the number of this node.
        others: those of the others: node 0 has links to all, and each of them to node 0.
        open_store: opens the store, or a connection to it; called in the thread.
    """

    def __init__(self, own: int, others: Sequence[int], secret: str, open_store: Callable[[], Any]) -> None:
        super().__init__(name="samestep link", daemon=True)
        self._own = own
        self._secret = secret
        self._open_store = open_store
        self._process = secrets.token_hex(8)
        self._count = 0
        self._inbox = deque[tuple[int, Message]]()
        self._peers = {node: Peer() for node in others}
        self._alive_s = math.inf  # when the store last answered
        self._is_closing = threading.Event()

    def send(self, node: int, message: Message) -> None:
        """Send a message, now or once the node is there."""
        self._peers[node].waiting.append(message)

    def receive(self) -> list[tuple[int, Message]]:
        """Return the messages that have arrived, each with its node; `Lost` for a node that no longer answers."""
        found = [self._inbox.popleft() for _ in range(len(self._inbox))]
        if time.monotonic() > self._alive_s + LOST_S:  # the store no longer answers
            found += [(node, Lost(time.time())) for node in self._peers]
        return found

    def sees(self, node: int) -> bool:
        """Return whether a node is there, or was."""
        return self._peers[node].state is not PeerState.UNSEEN

    def close(self, limit_s: float) -> None:
        """Send what is left, and wait until the other nodes have closed their links, too."""
        self._is_closing.set()
        self.join(limit_s)

    def run(self) -> None:
        try:
            entries = SignedEntries(self._secret.encode(), self._open_store())
            while not self._is_closing.wait(EVERY_S):
                self._work(entries)
            self._work(entries)
            if self._own == 0:  # the others must have read its last messages before the store closes
                while any(peer.state is PeerState.HERE for peer in self._peers.values()):
                    self._work(entries)
                    time.sleep(EVERY_S)
            else:
                self._count = -2
                self._work(entries)
        # The store has closed, or cannot be reached, or the other node has another version of samestep.
        except (RuntimeError, OSError, ValueError):
            for node, peer in self._peers.items() if self._alive_s < math.inf else ():
                self._lose(node, peer)

    def _work(self, entries: SignedEntries) -> None:
        self._count += 1
        entries.put(f"node/{self._own}", (self._process, self._count))
        for node, peer in self._peers.items():
            if peer.state is not PeerState.LOST:
                self._exchange(entries, node, peer)
        self._alive_s = time.monotonic()

    def _exchange(self, entries: SignedEntries, node: int, peer: Peer) -> None:
        beat = entries.get(f"node/{node}", tuple[str, int])
        if beat is None:  # it is not there, or a stranger has written its entry
            return
        if beat != peer.beat:
            is_same = beat[0] == peer.beat[0]
            peer.beat = beat
            peer.beat_s = time.monotonic()
            if is_same:
                peer.state = PeerState.HERE
            elif peer.state is PeerState.HERE:
                self._lose(node, peer)  # it was started again
        if peer.state is not PeerState.HERE:
            return
        process, count = beat
        while peer.waiting:
            entries.put(f"{self._process}/{process}/{peer.sent}", peer.waiting.popleft())
            peer.sent += 1
        kind: Any = Message  # a union is no type for mypy
        while (message := entries.get(f"{process}/{self._process}/{peer.received}", kind)) is not None:
            peer.received += 1
            self._inbox.append((node, message))
        if count < 0 or time.monotonic() > peer.beat_s + LOST_S:
            self._lose(node, peer)

    def _lose(self, node: int, peer: Peer) -> None:
        if peer.state is not PeerState.LOST:
            peer.state = PeerState.LOST
            self._inbox.append((node, Lost(time.time())))


def derive_key(secret: str, purpose: str) -> str:
    """Derive a key for another purpose, from which the secret cannot be computed."""
    return hmac.new(secret.encode(), f"samestep key for {purpose}".encode(), "sha256").hexdigest()


def is_listening(host: str, port: int) -> bool:
    """Return whether something listens there. torch prints pages while it tries to connect."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
