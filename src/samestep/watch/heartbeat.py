"""The heartbeat of a rank: background threads that exchange its state with the other ranks, without collectives.

The leader, which is the lowest rank that responds, reads the beats of all ranks, and says which rank is stuck.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from msgspec import Struct, to_builtins
from msgspec.structs import asdict, replace

from samestep.files import replace_file
from samestep.processes import at_work
from samestep.watch.beats import Beat, PhaseClock, ThreadState, count_written, read_process_state, read_thread_state
from samestep.watch.diagnosis import (
    Action,
    Ending,
    EndOrder,
    EndOthers,
    EndSelf,
    Moving,
    RankFacts,
    Say,
    State,
    View,
    decide,
)
from samestep.watch.records import RANKS, RankStates
from samestep.world.host import read_host_id
from samestep.world.signed import SignedEntries

JOIN_S = 2.0  # for a thread to end, which a disk or the store may block
WRITTEN_BYTES = 1 << 18  # since the last beat: more than `ranks.json`, so that the snapshot makes progress
_numbers = count()  # of this process's beats, also of earlier loops
NUM_LEADERS = 8  # ranks that can lead if all lower ranks are silent
MISSED = 4  # missing beats after which a rank counts as silent


class BeatBuilder:
    """Builds the beats of a rank. Observes the thread that creates it."""

    def __init__(self, clock: PhaseClock, facts: RankFacts) -> None:
        self._clock = clock
        self._facts = facts
        self._system = read_host_id("pid") or facts.host
        self._ident = threading.get_ident()
        self._native_id = threading.get_native_id()
        self._before: tuple[float, ThreadState] | None = None  # the previous state, and its time
        self._written = 0  # bytes
        self._moved_s = 0.0

    def build(self) -> Beat:
        """Return the next beat."""
        now_s = time.monotonic()
        phase, step, since_s = self._clock.now
        state = ThreadState()
        is_busy = False
        interval_s = self._facts.limits.interval_s
        if now_s - since_s > interval_s:
            state = read_thread_state(self._ident, self._native_id)
            if self._before is not None and now_s > self._before[0] + interval_s / 2:
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
            rank=self._facts.rank,
            host=self._facts.host,
            pid=os.getpid(),
            number=next(_numbers),
            step=step,
            phase=phase,
            for_s=now_s - max(since_s, self._moved_s),
            system=self._system,
            num_seen=self._clock.tallies[phase].num,
            longest_s=self._clock.tallies[phase].longest_s,
            is_busy=is_busy,
            spent_s={name: round(spent_s, 6) for name, spent_s in self._clock.spent_s().items()},
            num_micro_batches=self._clock.tallies["loading"].num,
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
        members: all ranks, in order.
        first: the first message, which is sent at once: a rank that gets stuck before its threads run is found, also in
            a later group.

    Attributes:
        order: the newest order of a leader to end ranks.
        answered_s: when the store last answered.
    """

    def __init__(
        self, entries: SignedEntries, rank: int, members: Sequence[int], interval_s: float, first: Message
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
        with suppress(RuntimeError, OSError):  # the store has closed
            self._put(self._sent)
            ranks = self._others if self.leads(time.monotonic()) else self._lower
            for message in self._entries.read([f"beat/{rank}" for rank in ranks], Message) or ():
                self.note(message)
            self.answered_s = time.monotonic()

    def finish(self) -> None:
        """Send that this rank has ended."""
        with suppress(RuntimeError, OSError):
            self._put(Message(replace(self._sent.beat, phase="ended", number=next(_numbers))))

    def note(self, message: Message) -> None:
        """Note a message of another rank. An older one that was written again is ignored."""
        now_s = time.monotonic()
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
        self._entries.put(f"beat/{self._rank}", message)


class Heartbeat:
    """The background threads of one rank.

    One checks the clock, and never waits. The other two can block: one exchanges beats through the store, and one
    writes files. Observes the thread that creates it.

    Args:
        find_dir: returns the directory for ranks.json; None if it must not be written.
    """

    def __init__(
        self,
        clock: PhaseClock,
        facts: RankFacts,
        find_dir: Callable[[], Path | None],
        entries: SignedEntries,
    ) -> None:
        self.limits = facts.limits
        self._facts = facts
        self._builder = BeatBuilder(clock, facts)
        self._find_dir = find_dir
        self._shown: Sequence[Beat] | None = None  # the states of all ranks, for the thread that writes them
        self._has_written = False
        self._exchange = BeatExchange(
            entries, facts.rank, facts.members, self.limits.interval_s, first=Message(self._builder.build())
        )
        self._state: State = Moving()
        self._checked_s = self._awake_since_s = time.monotonic()
        self._failures = set[str]()  # that were printed
        self._closed = threading.Event()
        self._is_last = True
        works = {
            "check": (self._check, self._finish_checking),
            "exchange": (self._exchange.exchange, self._exchange.finish),
            "publish": (self._publish, self._finish_publishing),
        }
        self._threads = [
            threading.Thread(target=self._repeat, args=(name, *work), name=f"samestep _{name}", daemon=True)
            for name, work in works.items()
        ]
        for thread in self._threads:
            thread.start()

    def close(self, *, is_last: bool = True) -> None:
        """End the threads, unless they are blocked. A second call does nothing.

        Args:
            is_last: whether this start has no further heartbeat. Then `ranks.json` is removed.
        """
        if self._closed.is_set():
            return
        self._is_last = is_last
        self._closed.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def _repeat(self, name: str, work: Callable[[], None], finish: Callable[[], None]) -> None:
        """Work once per interval, and call `finish` at the end."""
        while not self._closed.wait(self.limits.interval_s):
            self._attempt(name, work)
        self._attempt(name, finish)

    def _attempt(self, name: str, work: Callable[[], None]) -> None:
        """Call a function. Print an unexpected error, once: the run continues whatever fails here."""
        try:
            with at_work():
                work()
        except Exception as error:
            text = f"the heartbeat's thread {name!r} has failed: {type(error).__name__}: {error}"
            if text not in self._failures:
                self._failures.add(text)
                self._facts.say(text)

    def _publish(self) -> None:
        ranks, self._shown = self._shown, None
        if ranks is not None and (run_dir := self._find_dir()) is not None:
            text = json.dumps(to_builtins(RankStates(time.time(), [*ranks])))
            with suppress(OSError):
                replace_file(run_dir / RANKS, text.encode())
                self._has_written = True

    def _finish_publishing(self) -> None:
        if self._is_last and self._has_written and (run_dir := self._find_dir()) is not None:
            with suppress(OSError):
                (run_dir / RANKS).unlink()

    def _check(self) -> None:
        """Build this rank's beat, and decide what to say and do."""
        now_s = time.monotonic()
        if now_s - self._checked_s > MISSED * self.limits.interval_s:  # this process itself was stopped
            self._awake_since_s = now_s
        self._checked_s = now_s
        own = self._builder.build()
        others = self._exchange.collect(now_s) if self._exchange.leads(now_s) else None
        ranks: list[Beat] | None = None
        if others is not None:
            shown = sorted([own, *(_add_process(beat, own) for beat in others)], key=lambda beat: beat.rank)
            ranks = [beat for beat in shown if not self._facts.is_lost(beat.rank)]
            self._shown = shown
        view = View(
            now_s=now_s,
            awake_s=now_s - self._awake_since_s,
            cut_off_s=now_s - max(self._exchange.answered_s, self._awake_since_s),
            own=own,
            ranks=ranks,
            order=self._exchange.order,
        )
        self._state, actions = decide(self._state, view, self._facts)
        order = self._state.order if isinstance(self._state, Ending) else None
        for action in actions:
            self._execute(action)
        self._exchange.send(Message(own, order))

    def _finish_checking(self) -> None:
        """End this process if the main thread has failed meanwhile because the stuck rank has ended."""
        if isinstance(self._state, Ending) and not self._facts.can_heal:
            self._facts.end(self._state.order.reason, False)

    def _execute(self, action: Action) -> None:
        facts = self._facts
        if isinstance(action, Say):
            facts.say(action.text)
        elif isinstance(action, EndOthers):
            facts.end_others(action.frozen, action.reason)
            if action.elsewhere:
                facts.request_end(action.elsewhere, action.reason)
        elif isinstance(action, EndSelf):
            facts.end(action.reason, action.is_stuck)


def _add_process(beat: Beat, own: Beat) -> Beat:
    """Add the state of a silent rank's process, if it is in the system of this rank."""
    is_here = (beat.host, beat.system) == (own.host, own.system)
    return replace(beat, process=read_process_state(beat.pid)) if beat.is_silent and is_here else beat
