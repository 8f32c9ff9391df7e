"""Exchanges beats between ranks through the rendezvous store, without collectives."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from samestep.decoding import decode
from samestep.watch.beat_builder import number_beat
from samestep.watch.decision import EndOrder
from samestep.watch.stall_diagnosis import Beat
from samestep.world.rendezvous_store import SignedEntries

NUM_LEADERS = 8  # ranks that can lead if all lower ranks are silent
MISSED = 4  # missing beats after which a rank counts as silent


class Message(Struct, frozen=True):
    """What a rank sends: its state, and its order if it leads."""

    beat: Beat
    order: EndOrder | None = None


class BeatExchange:
    """Sends the messages of one rank, and reads those of lower ranks; a leader reads those of all other ranks.

    The leader is the lowest rank that responds. `exchange` and `finish` can block as long as the store does not answer.

    Args:
        entries: None with one rank, which leads.
        members: all ranks, in order.
        first: the first message, which is sent at once: a rank that gets stuck before its threads run is found, also in
            a later group.

    Attributes:
        order: the newest order of a leader to end ranks.
        answered_s: when the store last answered.
    """

    def __init__(
        self, entries: SignedEntries | None, rank: int, members: Sequence[int], interval_s: float, first: Message
    ) -> None:
        self._sent = first
        self.order: EndOrder | None = None
        self.answered_s = time.monotonic()
        self._entries = entries
        self._rank = rank
        self._others = [each for each in members if each != rank]
        self._lower = [each for each in members[:NUM_LEADERS] if each < rank]  # those that lead before this one
        self._silent_after_s = MISSED * interval_s
        self._beats: dict[int, tuple[Beat, float]] = {}  # of other ranks, with their times of arrival
        with suppress(RuntimeError, OSError):
            self._put(first)

    def send(self, message: Message) -> None:
        """Let `exchange` send a message. A rank whose message is not renewed is silent."""
        self._sent = message

    def exchange(self) -> None:
        """Send the message, and read those of others."""
        if self._entries is None:
            return
        with suppress(RuntimeError, OSError):  # the store has closed
            self._put(self._sent)
            ranks = self._others if self.leads(time.monotonic()) else self._lower
            for text in self._entries.read([f"beat/{rank}" for rank in ranks]) or ():
                self.read(text)
            self.answered_s = time.monotonic()

    def finish(self) -> None:
        """Send that this rank's part has ended."""
        with suppress(RuntimeError, OSError):
            self._put(Message(replace(self._sent.beat, phase="ended", number=number_beat())))

    def read(self, text: str) -> None:
        """Read a message of another rank. An older one that was written again is ignored."""
        now_s = time.monotonic()
        message = decode(text, Message)
        rank = message.beat.rank
        if rank in self._beats and message.beat.number <= self._beats[rank][0].number:
            return
        self._beats[rank] = (message.beat, now_s)
        self.order = message.order or self.order

    def leads(self, now_s: float) -> bool:
        """Return whether this rank is the leader, because all lower ranks are silent."""
        return len(self._lower) < NUM_LEADERS and all(
            rank in self._beats and self._is_silent(rank, now_s) for rank in self._lower
        )

    def collect(self, now_s: float) -> list[Beat] | None:
        """Return the states of all other ranks, with their ages; None before the first beat of each."""
        if len(self._beats) < len(self._others):
            return None
        return [
            replace(beat, age_s=now_s - came_s, is_silent=self._is_silent(rank, now_s))
            for rank, (beat, came_s) in [*self._beats.items()]
        ]

    def _is_silent(self, rank: int, now_s: float) -> bool:
        return now_s - self._beats[rank][1] > self._silent_after_s

    def _put(self, message: Message) -> None:
        if self._entries is not None:
            self._entries.put(f"beat/{self._rank}", json.dumps(to_builtins(message)))
