"""The heartbeat of a rank: background threads that exchange its state with the other ranks, without collectives.

The leader, which is the lowest rank that responds, reads the beats of all ranks, and says which rank is stuck.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec import to_builtins
from msgspec.structs import replace

from samestep.files import replace_file
from samestep.watch.beats import MISSED, BeatBuilder, BeatExchange, Message
from samestep.watch.decision import Action, Ending, EndOthers, EndSelf, Moving, RankFacts, Say, State, View, decide
from samestep.watch.phase_clock import PhaseClock
from samestep.watch.records import RANKS, RankStates
from samestep.watch.stall_diagnosis import Beat
from samestep.watch.thread_state import read_process_state
from samestep.world.forking import at_work
from samestep.world.host import read_host_id
from samestep.world.rendezvous_store import SignedEntries

JOIN_S = 2.0  # for a thread to end, which a disk or the store may block


@dataclass(frozen=True)
class Files:
    """Where a rank writes.

    Attributes:
        run_dir: directory for ranks.json; None: not written.
        may_write: returns whether the directory still belongs to this run.
        micro_batch_size: of the run, for ranks.json.
        began_step: the first step of this start of the run.
    """

    run_dir: Path | None = None
    may_write: Callable[[], bool] = lambda: True
    micro_batch_size: int = 1
    began_step: int = 0


class Heartbeat:
    """The background threads of one rank.

    One checks the clock, and never waits. The other two can block: one exchanges beats through the store, and one
    writes files. Observes the thread that creates it.

    Args:
        entries: None with one rank.
    """

    def __init__(self, clock: PhaseClock, facts: RankFacts, files: Files, entries: SignedEntries | None) -> None:
        self.limits = facts.limits
        self._facts = facts
        self._is_alone = entries is None
        interval_s = facts.limits.interval_s
        self._interval_s = interval_s
        self._system = read_host_id("pid") or facts.host
        self._builder = BeatBuilder(
            clock, facts.rank, facts.host, self._system, interval_s=interval_s, began_step=files.began_step
        )
        self._files = files
        self._shown: Sequence[Beat] | None = None  # the states of all ranks, for the thread that writes them
        self._has_written = False
        first = Message(self._builder.build())
        self._exchange = BeatExchange(entries, facts.rank, facts.members, interval_s, first)
        self._state: State = Moving()
        self._checked_s = self._awake_since_s = time.monotonic()
        self._failures = set[str]()  # that were printed
        self._closed = threading.Event()
        self._is_last = True
        self._publishing = self._start("publish", self._publish, self._finish_publishing)
        self._threads = [self._start("watch", self._check, self._finish_checking)]
        if not self._is_alone:
            self._threads.append(self._start("exchange", self._exchange.exchange, self._exchange.finish))

    def close(self, *, is_last: bool = True) -> None:
        """End the threads, unless they are blocked. A second call does nothing.

        Args:
            is_last: whether this start has no further heartbeat. Then `ranks.json` is removed.
        """
        if self._closed.is_set():
            return
        self._is_last = is_last
        self._closed.set()
        for thread in (*self._threads, self._publishing):
            thread.join(JOIN_S)

    def _start(self, name: str, work: Callable[[], None], finish: Callable[[], None]) -> threading.Thread:
        """Start a thread that works once per interval, and calls `finish` at the end."""

        def attempt(work: Callable[[], None]) -> None:
            try:
                with at_work():
                    work()
            except Exception as error:  # the run continues whatever fails here
                self._report_failure(name, error)

        def repeat() -> None:
            while not self._closed.wait(self._interval_s):
                attempt(work)
            attempt(finish)

        thread = threading.Thread(target=repeat, name=f"samestep _{name}", daemon=True)
        thread.start()
        return thread

    def _report_failure(self, name: str, error: Exception) -> None:
        """Print an unexpected error of a thread, once."""
        text = f"the heartbeat's thread {name!r} has failed: {type(error).__name__}: {error}"
        if text not in self._failures:
            self._failures.add(text)
            self._facts.say(text)

    def _publish(self) -> None:
        files = self._files
        ranks, self._shown = self._shown, None
        if ranks is not None and files.run_dir is not None and files.may_write():
            text = json.dumps(to_builtins(RankStates(time.time(), files.micro_batch_size, [*ranks]))).encode()
            with suppress(OSError):
                replace_file(files.run_dir / RANKS, text)
                self._has_written = True

    def _finish_publishing(self) -> None:
        files = self._files
        if self._is_last and self._has_written and files.run_dir is not None and files.may_write():
            with suppress(OSError):
                (files.run_dir / RANKS).unlink()

    def _collect(self, now_s: float, own: Beat | None = None) -> list[Beat] | None:
        """Return the states of all ranks; None before the first beat of each other rank."""
        others = self._exchange.collect(now_s)
        if others is None:
            return None
        ranks = [own or self._builder.build()]
        for beat in others:
            is_here = (beat.host, beat.system) == (self._facts.host, self._system)
            process = read_process_state(beat.pid) if beat.is_silent and is_here else ""
            ranks.append(replace(beat, process=process))
        return sorted(ranks, key=lambda beat: beat.rank)

    def _check(self) -> None:
        """Build this rank's beat, and decide what to say and do. Without any call that can block."""
        now_s = time.monotonic()
        if now_s - self._checked_s > MISSED * self._interval_s:  # this process itself was stopped
            self._awake_since_s = now_s
        self._checked_s = now_s
        own = self._builder.build()
        ranks = self._collect(now_s, own) if self._exchange.leads(now_s) else None
        if ranks is not None:
            self._shown = ranks
            ranks = [beat for beat in ranks if not self._facts.is_lost(beat.rank)]
        cut_off_s = 0.0 if self._is_alone else now_s - max(self._exchange.answered_s, self._awake_since_s)
        view = View(now_s, now_s - self._awake_since_s, cut_off_s, own, ranks, self._exchange.order)
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
