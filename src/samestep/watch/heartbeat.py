"""The heartbeat of a rank: publishes its state from a background thread, without collectives.

The leader, which is the lowest rank that responds, reads the beats of all ranks and reports which rank is stuck or
slow.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from samestep.console import describe_ranks
from samestep.decoding import decode
from samestep.files import replace_file
from samestep.units import format_time
from samestep.watch.beat_builder import BeatBuilder
from samestep.watch.phase_clock import PhaseClock
from samestep.watch.records import RANKS, STACKS_WANTED, TIMELINE, RankStates
from samestep.watch.slow_ranks import SlowRanks
from samestep.watch.stall_diagnosis import Beat, Limits, Stall, diagnose
from samestep.watch.thread_state import read_process_state, read_stacks, trim_stack
from samestep.watch.timeline import Timeline
from samestep.world.forking import at_rest, at_work
from samestep.world.host import read_host_id
from samestep.world.rendezvous_store import SignedEntries

INTERVAL_S = 1.0
NUM_LEADERS = 8  # ranks that can lead if all lower ranks are silent
MISSED = 4  # missing beats after which a rank counts as silent
GRACE_S = 2.0  # time from the end of the stuck rank to the end of the others
END_S = 60.0  # limit for the end of stuck ranks, so that the others continue; then all end


@dataclass(frozen=True)
class RankFacts:
    """The rank, its run, and the functions that a heartbeat calls. Ranks are numbered as at the start of all ranks.

    Attributes:
        members: the ranks that exchange heartbeats, in order. The first one publishes them.
        say: prints a line on the terminal.
        end: ends this process. Takes a message, and whether this rank is the stuck one.
        end_others: ends ranks of this host that cannot end themselves. Takes (rank, pid) pairs and a message.
        request_end: requests that launchers of other hosts end ranks. Takes these and a message.
        run_dir: directory for ranks.json and timeline.jsonl; None: not written.
        logs: directory for the stacks of a stuck rank; None: not written.
        may_write: whether the directory still belongs to this run.
        began_step: the first step of this start of the run.
        can_heal: whether the other ranks continue if the stuck ones end.
        is_lost: returns whether a rank has died without which the others continue.
    """

    rank: int
    members: Sequence[int]
    host: str
    limits: Limits
    say: Callable[[str], None]
    end: Callable[[str, bool], None]
    end_others: Callable[[Sequence[tuple[int, int]], str], None]
    request_end: Callable[[Sequence[int], str], None]
    run_dir: Path | None = None
    logs: Path | None = None
    may_write: Callable[[], bool] = lambda: True
    micro_batch_size: int = 1
    began_step: int = 0
    can_heal: bool = False
    is_lost: Callable[[int], bool] = lambda rank: False


class Commands(Struct, frozen=True):
    """The leader's commands to ranks, sent with its beats.

    Attributes:
        stacks: the ranks that write their stacks.
        number: of that command, and unique, so that each rank executes it once.
        end: why ranks end; "" if all continue.
        first: the stuck ranks, which end before the others.
        is_for_all: whether the others end, too.
    """

    stacks: list[int] = []
    number: int = 0
    end: str = ""
    first: list[int] = []
    is_for_all: bool = True


Beats = dict[int, tuple[Beat, float]]  # rank -> its newest beat, and the time of arrival


class _Message(Struct, frozen=True):
    beat: Beat
    commands: Commands


class Heartbeat:
    """The background threads of one rank: one exchanges beats, which can block, and one checks the clock.

    Observes the thread that creates it. With one rank, only the second thread runs.

    Args:
        entries: None with one rank.
    """

    def __init__(
        self,
        clock: PhaseClock,
        facts: RankFacts,
        entries: SignedEntries | None,
    ) -> None:
        self._clock = clock
        self._facts = facts
        self._entries = entries
        self._system = read_host_id("pid") or facts.host
        self._ident = threading.get_ident()
        self._interval_s = min(INTERVAL_S, facts.limits.floor_s / 4)
        # One for each thread: a builder compares a thread's state with the one of its call before.
        self._sent, self._current = [
            BeatBuilder(
                clock, facts.rank, facts.host, self._system, interval_s=self._interval_s, began_step=facts.began_step
            )
            for _ in range(2)
        ]
        self._slow = SlowRanks(facts.limits.floor_s, facts.say)
        self._closed = threading.Event()
        self._published = 0  # bytes
        self._beats: Beats = {}  # of the other ranks
        self._exchanged_s = time.monotonic()
        self._awake_since_s = self._exchanged_s
        self._commands = Commands()
        self._executed = 0  # the number of the last command for stacks
        self._asked_s = 0.0  # when `samestep watch` last requested stacks
        self._reported: Stall | None = None
        self._is_cut_off = False  # and has reported it
        self._has_failed = False  # and has reported it
        self._still_s = 0.0
        self._ended_s = 0.0  # when the commands to end were sent
        self._timeline: Timeline | None = None
        if self._is_first and facts.run_dir is not None:
            self._timeline = Timeline(facts.run_dir / TIMELINE, facts.began_step)
        # The first one now: a rank that gets stuck before its thread runs is found, also in a later group.
        if entries is not None:
            with suppress(RuntimeError, OSError):
                self._put(entries, self._sent.build(self._published), self._commands)
        loops = [self._watch] if entries is None else [self._exchange, self._watch]
        self._threads = [threading.Thread(target=loop, name=f"samestep {loop.__name__}", daemon=True) for loop in loops]
        for started in self._threads:
            started.start()

    @property
    def limits(self) -> Limits:
        return self._facts.limits

    @property
    def _is_first(self) -> bool:
        return self._facts.rank == self._facts.members[0]

    def close(self, *, is_last: bool = True) -> None:
        """End the threads, unless they are blocked. A second call does nothing.

        Args:
            is_last: whether this start has no further heartbeat. Then `ranks.json` is removed.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        for thread in self._threads:
            thread.join(GRACE_S)
        if (self._is_first or self._published) and self._facts.run_dir is not None and self._facts.may_write():
            if self._timeline is not None and (ranks := self._collect()) is not None:
                self._timeline.add(ranks, is_last=True)
            if is_last:
                with suppress(OSError):
                    (self._facts.run_dir / RANKS).unlink()

    # --- this rank --------------------------------------------------------------------------------------------------

    def _write_stacks(self) -> None:
        """Write the Python stacks of this process's threads to the logs, the main thread first."""
        if self._facts.logs is None or not self._facts.may_write():
            return
        stacks = read_stacks()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        phase, step, since_s = self._clock.now
        lines = [f"rank {self._facts.rank}, step {step}, {phase} for {time.monotonic() - since_s:.1f} s", ""]
        for ident in sorted(stacks, key=lambda ident: ident != self._ident):
            name = names.get(ident, "unknown")
            if not name.startswith("samestep _"):
                lines.append(f"thread {name} (most recent call first):")
                lines += [f'  File "{f.file}", line {f.line}, in {f.function}' for f in trim_stack(stacks[ident])]
                lines.append("")
        with suppress(OSError):
            path = self._facts.logs / f"stacks-{self._facts.rank}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, "\n".join(lines).encode())

    # --- all ranks ----------------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Send beats, and read those of lower ranks; the leader reads those of all other ranks."""
        assert self._entries is not None
        facts = self._facts
        is_all_there = False
        while not self._closed.is_set():
            with suppress(RuntimeError, OSError, ValueError), at_work():
                self._put(self._entries, self._sent.build(self._published), self._commands)
                ranks = facts.members if self._leads() else self._find_lower()
                texts = self._entries.read([f"beat/{rank}" for rank in ranks if rank != facts.rank])
                if texts is not None:
                    self._process(texts)
                    is_all_there = True
                if is_all_there or texts is None:
                    self._exchanged_s = time.monotonic()
            self._closed.wait(self._interval_s)
        with suppress(RuntimeError, OSError), at_work():
            self._put(self._entries, replace(self._sent.build(self._published), phase="ended"), Commands())

    def _put(self, entries: SignedEntries, beat: Beat, commands: Commands) -> None:
        entries.put(f"beat/{beat.rank}", json.dumps(to_builtins(_Message(beat, commands))))

    def _process(self, texts: Sequence[str]) -> None:
        now_s = time.monotonic()
        for text in texts:
            message = decode(text, _Message)
            beat = message.beat
            known = self._beats.get(beat.rank)
            if known is None or known[0].number < beat.number:  # an older one was written again
                self._beats[beat.rank] = (beat, now_s)
                if not self._is_silent(beat.rank, now_s):
                    self._execute(message.commands)

    def _is_silent(self, rank: int, now_s: float) -> bool:
        known = self._beats.get(rank)
        return known is not None and now_s - known[1] > MISSED * self._interval_s

    def _leads(self) -> bool:
        """Return whether this rank is the leader, because all lower ranks are silent."""
        now_s = time.monotonic()
        lower = self._find_lower()
        return len(lower) < NUM_LEADERS and all(
            other in self._beats and self._is_silent(other, now_s) for other in lower
        )

    def _find_lower(self) -> Sequence[int]:
        """Return the ranks that lead before this one."""
        return [rank for rank in self._facts.members[:NUM_LEADERS] if rank < self._facts.rank]

    def _collect(self) -> list[Beat] | None:
        """Return the state of all ranks; None before the first beat of each other rank."""
        if self._entries is not None and len(self._beats) < len(self._facts.members) - 1:
            return None
        now_s = time.monotonic()
        ranks = [self._current.build(self._published)]
        for rank, (beat, came_s) in self._beats.items():
            is_silent = self._is_silent(rank, now_s)
            is_here = (beat.host, beat.system) == (self._facts.host, self._system)
            process = read_process_state(beat.pid) if is_silent and is_here else ""
            ranks.append(replace(beat, age_s=now_s - came_s, is_silent=is_silent, process=process))
        return sorted(ranks, key=lambda beat: beat.rank)

    # --- the clock --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        before_s = time.monotonic()
        while not self._closed.wait(self._interval_s):
            now_s = time.monotonic()
            if now_s - before_s > MISSED * self._interval_s:  # this process itself was stopped
                self._awake_since_s = now_s
            before_s = now_s
            try:
                with at_work():
                    self._check(now_s)
            except Exception as error:  # the run continues whatever fails here
                if not self._has_failed:
                    self._has_failed = True
                    self._facts.say(f"the check for stuck ranks has failed: {type(error).__name__}: {error}")

    def _check(self, now_s: float) -> None:
        facts = self._facts
        cut_off_s = now_s - max(self._exchanged_s, self._awake_since_s)
        if self._entries is not None and cut_off_s > facts.limits.floor_s:
            self._report_cut_off(cut_off_s)
            return
        self._is_cut_off = False
        if self._entries is not None and not self._leads():
            self._clear()  # a lower rank is back
            return
        ranks = self._collect()
        if ranks is None:
            return
        self._publish(ranks)
        ranks = [beat for beat in ranks if not facts.is_lost(beat.rank)]
        self._request_stacks(ranks, now_s)
        self._slow.observe(ranks, now_s)
        stall = diagnose(ranks, facts.limits, now_s - self._awake_since_s)
        if stall is None:
            self._clear()
            return
        self._still_s = min(rank.still_s for rank in ranks)
        if self._commands.end:  # the stuck ranks are ending; the others then form a new group
            if now_s - self._ended_s > END_S:
                self._commands = replace(self._commands, is_for_all=True)
                self._execute(self._commands)
            return
        if self._reported is None or self._reported.blocking != stall.blocking:
            self._report(stall, ranks)
        if stall.is_final:
            self._end(stall, ranks)

    def _request_stacks(self, ranks: Sequence[Beat], now_s: float) -> None:
        """If `samestep watch` requests stacks, command all ranks to write them, until each has read the command."""
        facts = self._facts
        if facts.logs is not None and (facts.logs / STACKS_WANTED).exists():
            with suppress(OSError):
                (facts.logs / STACKS_WANTED).unlink()
            self._asked_s = now_s
            self._commands = replace(self._commands, stacks=[beat.rank for beat in ranks], number=time.time_ns())
            self._write_stacks()
        elif self._asked_s and now_s - self._asked_s > MISSED * self._interval_s:
            self._asked_s = 0.0
            if self._reported is None:
                self._commands = Commands()

    def _clear(self) -> None:
        if self._reported is not None and not self._commands.end:
            self._facts.say(f"the run continues after {format_time(round(self._still_s))}")
            self._reported = None
            self._commands = Commands()

    def _report(self, stall: Stall, ranks: Sequence[Beat]) -> None:
        """Print the diagnosis. Request the stacks of the blocking ranks, or of all ranks if those wait for others."""
        self._reported = stall
        responding = [beat for beat in ranks if not beat.is_silent]
        blocking = [beat for beat in responding if beat.rank in stall.blocking]
        shown = [beat.rank for beat in (responding if any(beat.waits_in for beat in blocking) else blocking)][:16]
        where = ""
        if shown and self._facts.logs is not None:
            name = str(shown[0]) if len(shown) == 1 else "*"
            where = f" (stack: {self._facts.logs / f'stacks-{name}.txt'})"
        self._facts.say(stall.sentence + where)
        self._commands = Commands(shown, time.time_ns())
        if self._facts.rank in shown:
            self._write_stacks()

    def _end(self, stall: Stall, ranks: Sequence[Beat]) -> None:
        blocking = [beat for beat in ranks if beat.rank in stall.blocking]
        able = [beat.rank for beat in blocking if not beat.is_silent]
        frozen = [(beat.rank, beat.pid) for beat in blocking if beat.is_silent and beat.process in ("stopped", "alive")]
        if self._facts.can_heal and blocking and all(beat.process == "dead" for beat in blocking):
            return  # the launcher decides
        elsewhere = [beat.rank for beat in blocking if beat.is_silent and not beat.process]
        is_for_all = not self._facts.can_heal or len(blocking) in (0, len(ranks))
        first = able or ([] if frozen or self._facts.can_heal else [self._facts.rank])
        self._commands = replace(self._commands, end=stall.sentence, first=first, is_for_all=is_for_all)
        ended = "the run" if is_for_all else describe_ranks(stall.blocking)
        self._facts.say(f"nothing has moved for too long: stopping {ended}")
        with at_rest():  # give the other ranks time to read the command
            self._closed.wait(2 * self._interval_s if len(self._facts.members) > 1 else 0)
        if self._has_healed:
            return
        self._ended_s = time.monotonic()
        if frozen:
            self._facts.end_others(frozen, stall.sentence)
        if elsewhere and not is_for_all:
            self._facts.request_end(elsewhere, stall.sentence)
        self._execute(self._commands)

    @property
    def _has_healed(self) -> bool:
        """Whether this rank is in a new group, in which it has another heartbeat."""
        return self._facts.can_heal and self._closed.is_set()

    def _execute(self, commands: Commands) -> None:
        """Execute the leader's commands."""
        rank = self._facts.rank
        if rank in commands.stacks and commands.number != self._executed:
            self._executed = commands.number
            self._write_stacks()
        if commands.end:
            is_first = rank in commands.first
            if not is_first and not commands.is_for_all:
                return
            if not is_first:
                with at_rest():
                    self._closed.wait(GRACE_S)
                if self._has_healed:
                    return
            self._facts.end(commands.end, is_first)

    def _report_cut_off(self, cut_off_s: float) -> None:
        """Report that the rendezvous store does not answer, so that no leader can be reached."""
        facts = self._facts
        limits = self._facts.limits
        for_s = format_time(round(cut_off_s))
        sentence = (
            f"rank {facts.rank} (host {facts.host}) is cut off: the rendezvous store has not answered for {for_s}; the "
            "network, or the host or process that holds the store, is down"
        )
        if not self._is_cut_off:
            self._is_cut_off = True
            self._reported = Stall((facts.rank,), sentence, False)
            facts.say(sentence)
        *_, since_s = self._clock.now
        still_s = time.monotonic() - since_s
        if min(cut_off_s, still_s) > (limits.stop_s or max(limits.first_s, 2 * limits.floor_s)):
            facts.end(sentence, True)

    # --- ranks.json and the timeline ----------------------------------------------------------------------

    def _publish(self, ranks: Sequence[Beat]) -> None:
        """Write ranks.json for `samestep watch`, and the timeline."""
        facts = self._facts
        if facts.run_dir is None or not facts.may_write():
            return
        record = RankStates(time.time(), facts.micro_batch_size, [*ranks])
        text = json.dumps(to_builtins(record)).encode()
        with suppress(OSError):
            replace_file(facts.run_dir / RANKS, text)
            self._published += len(text)
        if self._timeline is not None:
            self._timeline.add(ranks)


def read_beats(entries: SignedEntries, members: Sequence[int]) -> list[Beat]:
    """Return the newest beat of each rank; [] before each has sent one, or if the store has closed."""
    with suppress(RuntimeError):
        texts = entries.read([f"beat/{rank}" for rank in members]) or []
        return [decode(text, _Message).beat for text in texts]
    return []
