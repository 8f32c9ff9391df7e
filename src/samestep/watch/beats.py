"""The beats of a rank: what it does now, and what it has spent its time on. Ranks exchange them through the store."""

import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from msgspec import Struct, to_builtins
from msgspec.structs import asdict, replace

from samestep.decoding import decode
from samestep.watch.decision import EndOrder
from samestep.watch.phase_clock import PhaseClock
from samestep.watch.stall_diagnosis import Beat, ThreadState
from samestep.watch.thread_state import count_written, read_thread_state
from samestep.world.rendezvous_store import SignedEntries

WRITTEN_BYTES = 1 << 18  # since the last beat: more than `ranks.json`, so that the snapshot makes progress
_numbers = count()  # of this process's beats, also of earlier loops
NUM_LEADERS = 8  # ranks that can lead if all lower ranks are silent
MISSED = 4  # missing beats after which a rank counts as silent


class BeatBuilder:
    """Builds the beats of one loop. Observes the thread that creates it.

    Args:
        clock: the phases of this rank.
        rank, host: of this process.
        system: identity of the host, see `read_host_id`.
        interval_s: time between two beats.
        began_step: the first step of this start of the run.
    """

    def __init__(
        self, clock: PhaseClock, rank: int, host: str, system: str, *, interval_s: float, began_step: int
    ) -> None:
        self._clock = clock
        self._rank = rank
        self._host = host
        self._system = system
        self._interval_s = interval_s
        self._began_step = began_step
        self._ident = threading.get_ident()
        self._native_id = threading.get_native_id()
        spent_s = clock.spent_s()  # in earlier loops; before the first loop, only the start, which counts
        self._spent_before_s = spent_s if len(spent_s) > 1 else {}
        self._num_before = clock.tallies["loading"].num
        self._before: tuple[float, ThreadState] | None = None  # the previous state, and its time
        self._written = 0  # bytes
        self._moved_s = 0.0

    def build(self) -> Beat:
        """Return the next beat."""
        now_s = time.monotonic()
        phase, step, since_s = self._clock.now
        state = ThreadState()
        is_busy = False
        if now_s - since_s > self._interval_s:
            state = read_thread_state(self._ident, self._native_id)
            if self._before is not None and now_s > self._before[0] + self._interval_s / 2:
                before_s, before = self._before
                is_busy = state.cpu_s - before.cpu_s > (now_s - before_s) / 2
            if phase == "saving":
                written = count_written()
                if written > self._written + WRITTEN_BYTES:
                    self._moved_s = now_s
                self._written = written
            self._before = (now_s, state)
        else:
            self._before = None
        return Beat(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            number=next(_numbers),
            step=step,
            phase=phase,
            for_s=now_s - max(since_s, self._moved_s),
            system=self._system,
            num_seen=self._clock.tallies[phase].num,
            longest_s=self._clock.tallies[phase].longest_s,
            is_busy=is_busy,
            spent_s={
                name: round(spent_s - self._spent_before_s.get(name, 0.0), 6)
                for name, spent_s in self._clock.spent_s().items()
            },
            num_steps=step - self._began_step,
            num_micro_batches=self._clock.tallies["loading"].num - self._num_before,
            **asdict(state),
        )


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
            self._put(Message(replace(self._sent.beat, phase="ended", number=next(_numbers))))

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
