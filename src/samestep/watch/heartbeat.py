"""Every rank tells what it is at, from a thread that needs no collective; one of them judges, and says who is stuck."""

import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from samestep.files import replace_file
from samestep.watch.records import RANKS
from samestep.watch.stall_diagnosis import (
    PHASES,
    SLOW_AFTER_STEPS,
    WARM_UP,
    Beat,
    Heard,
    Limits,
    Verdict,
    describe_seconds,
    find_slow,
    judge,
)
from samestep.watch.thread_state import OWN, Symptoms, count_written, find_fate, find_system, look
from samestep.world.forking import at_rest, at_work

INTERVAL_S = 1.0
NUM_LEADERS = 8  # ranks that judge when those before them are silent
MISSED = 4  # beats, after which a rank is silent
GRACE_S = 2.0  # for the guilty rank to be the first that ends
WRITTEN_BYTES = 1 << 16  # since the last beat: a snapshot grows
COMPUTE = ("loading", "forward", "backward", "updating")


class Mail(Protocol):
    """Where ranks leave texts for each other: `world.notes.Mail`."""

    def put(self, name: str, text: str) -> None: ...

    def read(self, names: Sequence[str]) -> list[str] | None: ...


class _Tally:
    __slots__ = ("longest_s", "num", "total_s")

    def __init__(self) -> None:
        self.num, self.total_s, self.longest_s = 0, 0.0, 0.0


class Pulse:
    """What the main thread is at. `enter` is called 5 times per micro-batch: 0.4 us.

    Attributes:
        now: (phase, step, how often it has moved, since when on the monotonic clock).
    """

    def __init__(self) -> None:
        self.now: tuple[str, int, int, float] = ("starting", 0, 0, time.monotonic())
        self._tallies = {phase: _Tally() for phase in PHASES}

    def enter(self, phase: str, step: int) -> None:
        """The main thread goes on to `phase` of step `step`."""
        now_s = time.monotonic()
        before, _, count, since_s = self.now
        tally, took_s = self._tallies[before], now_s - since_s
        tally.num += 1
        tally.total_s += took_s
        if took_s > tally.longest_s and tally.num > WARM_UP:
            tally.longest_s = took_s
        self.now = (phase, step, count + 1, now_s)

    def move(self, before: str, after: str, seconds: float) -> None:
        """Of what was counted as the phase `before`, some seconds were `after`."""
        self._tallies[before].total_s -= seconds
        self._tallies[after].total_s += seconds

    def count(self, phase: str) -> int:
        """How often it was through a phase."""
        return self._tallies[phase].num

    def longest_s(self, phase: str) -> float:
        """The longest that it was in a phase, but for the first times."""
        return self._tallies[phase].longest_s

    def spent_s(self) -> dict[str, float]:
        """Phase -> seconds in all, without those of the present one."""
        return {phase: tally.total_s for phase, tally in self._tallies.items() if tally.num}


@dataclass(frozen=True)
class Facts:
    """Of the rank and its run.

    Attributes:
        say: puts a line on the terminal.
        end: ends this process: takes a sentence, and whether the others' end is this rank's fault.
        condemn: the ranks of this host that cannot end themselves: takes (rank, pid) pairs and a sentence.
        run_dir: takes ranks.json, of rank 0; None: nothing is written.
        logs: takes the stacks of a rank that is stuck; None: they are not written.
        may_write: whether it is still this run's.
        began_step: where this start of the run began.
    """

    rank: int
    world_size: int
    host: str
    limits: Limits
    say: Callable[[str], None]
    end: Callable[[str, bool], None]
    condemn: Callable[[Sequence[tuple[int, int]], str], None]
    run_dir: Path | None = None
    logs: Path | None = None
    may_write: Callable[[], bool] = lambda: True
    micro_batch_size: int = 1
    began_step: int = 0


class Heartbeat:
    """The threads of one rank: one that exchanges beats by `mail`, which may be held up, one that looks at the clock.

    With one rank there is nobody to tell: the second thread alone looks after the main one.

    The thread that is looked at is the one that builds this.

    Args:
        mail: None with one rank.
    """

    def __init__(self, pulse: Pulse, facts: Facts, mail: Mail | None) -> None:
        self._pulse, self._facts, self._mail, self._system = pulse, facts, mail, find_system()
        self._ident, self._native_id = threading.get_ident(), threading.get_native_id()
        self._interval_s = min(INTERVAL_S, facts.limits.floor_s / 4)
        self._closed = threading.Event()
        self._number = 0
        self._before: tuple[float, Symptoms] | None = None  # when it was last looked at, and what was seen
        self._written = self._published = 0  # bytes
        self._moved_s = 0.0
        self._mine: Beat | None = None
        self._heard: dict[int, tuple[Beat, float]] = {}  # of each rank the newest beat, and when it came
        self._exchanged_s = self._awake_since_s = time.monotonic()
        self._orders: dict[str, Any] = {}
        self._is_obeying = False
        self._named: Verdict | None = None
        self._paces: deque[tuple[float, dict[int, Beat]]] = deque()
        self._told_slow: set[int] = set()
        self._stood_s = 0.0
        loops = [self._watch] if mail is None else [self._exchange, self._watch]
        self._threads = [threading.Thread(target=loop, name=f"samestep {loop.__name__}", daemon=True) for loop in loops]
        for started in self._threads:
            started.start()

    def close(self) -> None:
        """Ends the threads; one that is held up is left behind. A second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        for thread in self._threads:
            thread.join(GRACE_S)
        shows = self._facts.rank == 0 or self._published
        if shows and self._facts.run_dir is not None and self._facts.may_write():
            with suppress(OSError):
                (self._facts.run_dir / RANKS).unlink()

    # --- this rank ----------------------------------------------------------------------------------------------

    def _build_beat(self) -> Beat:
        now_s = time.monotonic()
        phase, step, _, since_s = self._pulse.now
        symptoms, faults_per_s, is_busy = Symptoms(), 0.0, False
        if now_s - since_s > self._interval_s:
            symptoms = look(self._ident, self._native_id)
            if self._before is not None and now_s > self._before[0] + self._interval_s / 2:
                before_s, before = self._before
                faults_per_s = (symptoms.num_faults - before.num_faults) / (now_s - before_s)
                is_busy = symptoms.cpu_s - before.cpu_s > (now_s - before_s) / 2
            if phase == "saving":
                written = count_written() - self._published
                if written > self._written + WRITTEN_BYTES:
                    self._moved_s = now_s
                self._written = written
            self._before = (now_s, symptoms)
        else:
            self._before = None
        self._number += 1
        return Beat(
            rank=self._facts.rank,
            host=self._facts.host,
            pid=os.getpid(),
            number=self._number,
            step=step,
            phase=phase,
            for_s=now_s - max(since_s, self._moved_s),
            system=self._system,
            num_seen=self._pulse.count(phase),
            longest_s=self._pulse.longest_s(phase),
            waits_in=symptoms.waits_in,
            place=symptoms.place,
            ails=symptoms.ails,
            is_busy=is_busy,
            is_compiling=symptoms.is_compiling,
            faults_per_s=faults_per_s,
            spent_s={name: round(spent_s, 6) for name, spent_s in self._pulse.spent_s().items()},
            num_steps=step - self._facts.began_step,
            num_micro_batches=self._pulse.count("loading"),
        )

    def _write_stacks(self) -> None:
        """The Python stacks of this process's threads, the main one first."""
        if self._facts.logs is None or not self._facts.may_write():
            return
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = []
        for ident in sorted(frames, key=lambda ident: ident != self._ident):
            name = names.get(ident, "unknown")
            if not name.startswith("samestep _"):
                lines += [f"thread {name}:\n", *_format_stack(frames[ident]), "\n"]
        phase, step, _, since_s = self._pulse.now
        head = f"rank {self._facts.rank}, step {step}, {phase} for {time.monotonic() - since_s:.1f} s\n\n"
        with suppress(OSError):
            path = self._facts.logs / f"stacks-{self._facts.rank}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, (head + "".join(lines)).encode())

    # --- all ranks ----------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Tells, and hears what lower ranks tell; who leads hears all."""
        assert self._mail is not None
        facts, is_all_there = self._facts, False
        while not self._closed.is_set():
            with suppress(RuntimeError, OSError, ValueError), at_work():
                self._mine = beat = self._build_beat()
                text = json.dumps({"beat": asdict(beat), "orders": self._orders})
                self._mail.put(f"beat/{facts.rank}", text)
                ranks = range(facts.world_size) if self._leads() else range(min(facts.rank, NUM_LEADERS))
                texts = self._mail.read([f"beat/{rank}" for rank in ranks])
                if texts is not None:
                    self._take(texts)
                    is_all_there = True
                if is_all_there or texts is None:
                    self._exchanged_s = time.monotonic()
            self._closed.wait(self._interval_s)
        with suppress(RuntimeError, OSError), at_work():
            ended = replace(self._build_beat(), phase="ended")
            self._mail.put(f"beat/{facts.rank}", json.dumps({"beat": asdict(ended), "orders": {}}))

    def _take(self, texts: Sequence[str]) -> None:
        now_s = time.monotonic()
        for text in texts:
            told = json.loads(text)
            beat = Beat(**told["beat"])
            known = self._heard.get(beat.rank)
            if known is None or known[0].number != beat.number:
                self._heard[beat.rank] = (beat, now_s)
                if told["orders"] and beat.rank != self._facts.rank and not self._is_silent(beat.rank, now_s):
                    self._obey(told["orders"])

    def _is_silent(self, rank: int, now_s: float) -> bool:
        heard = self._heard.get(rank)
        return heard is not None and now_s - heard[1] > MISSED * self._interval_s

    def _leads(self) -> bool:
        """Whether it is this rank that judges: the lowest that is heard of."""
        now_s, rank = time.monotonic(), self._facts.rank
        return rank < NUM_LEADERS and all(
            other in self._heard and self._is_silent(other, now_s) for other in range(rank)
        )

    def _collect(self) -> list[Heard] | None:
        """What is known of all ranks; None where one has not been heard of yet."""
        if self._mail is None:
            self._mine = self._build_beat()
            return [Heard(self._mine)]
        now_s = time.monotonic()
        if len(self._heard) < self._facts.world_size:
            return None
        ranks = []
        for rank, (beat, came_s) in sorted(self._heard.items()):
            is_silent = self._is_silent(rank, now_s)
            is_here = (beat.host, beat.system) == (self._facts.host, self._system)
            fate = find_fate(beat.pid) if is_silent and is_here else ""
            ranks.append(Heard(beat, now_s - came_s, is_silent, fate))
        return ranks

    # --- the clock ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        before_s = time.monotonic()
        while not self._closed.wait(self._interval_s):
            now_s = time.monotonic()
            if now_s - before_s > MISSED * self._interval_s:  # this process was stopped itself
                self._awake_since_s = now_s
            before_s = now_s
            with suppress(Exception), at_work():  # whatever fails here, the run goes on
                self._look_around(now_s)

    def _look_around(self, now_s: float) -> None:
        facts = self._facts
        cut_off_s = now_s - max(self._exchanged_s, self._awake_since_s)
        if self._mail is not None and cut_off_s > facts.limits.floor_s:
            self._say_cut_off(cut_off_s)
            return
        if self._mail is not None and not self._leads():
            self._forget()  # a lower rank is back
            return
        ranks = self._collect()
        if ranks is None:
            return
        self._publish(ranks)
        self._look_for_slow(ranks, now_s)
        verdict = judge(ranks, facts.limits, now_s - self._awake_since_s)
        if verdict is None:
            self._forget()
            return
        self._stood_s = min(heard.still_s for heard in ranks)
        if self._named is None or self._named.guilty != verdict.guilty:
            self._name(verdict, ranks)
        if verdict.is_final and "end" not in self._orders:
            self._end(verdict, ranks, now_s)

    def _forget(self) -> None:
        if self._named is not None and "end" not in self._orders:
            self._facts.say(f"the run goes on, after {describe_seconds(self._stood_s)}")
            self._named, self._orders = None, {}

    def _name(self, verdict: Verdict, ranks: Sequence[Heard]) -> None:
        self._named = verdict
        there = [heard.beat for heard in ranks if not heard.is_silent]
        told = [beat for beat in there if beat.rank in verdict.guilty]
        shown = [beat.rank for beat in (there if any(beat.waits_in for beat in told) else told)][:16]
        where = ""
        if shown and self._facts.logs is not None:
            name = str(shown[0]) if len(shown) == 1 else "*"
            where = f" (stack: {self._facts.logs / f'stacks-{name}.txt'})"
        self._facts.say(verdict.sentence + where)
        self._orders = {"stacks": shown}
        if self._facts.rank in shown:
            self._write_stacks()

    def _end(self, verdict: Verdict, ranks: Sequence[Heard], now_s: float) -> None:
        able = [heard.beat.rank for heard in ranks if heard.beat.rank in verdict.guilty and not heard.is_silent]
        frozen = [
            (heard.beat.rank, heard.beat.pid)
            for heard in ranks
            if heard.is_silent and heard.fate in ("stopped", "alive") and heard.beat.rank in verdict.guilty
        ]
        first = able or ([] if frozen else [self._facts.rank])
        self._orders = {**self._orders, "end": {"first": first, "sentence": verdict.sentence}}
        self._facts.say("nothing has moved for too long: the run is stopped")
        with at_rest():
            self._closed.wait(2 * self._interval_s if self._facts.world_size > 1 else 0)  # for the others to hear
        if frozen:
            self._facts.condemn(frozen, verdict.sentence)
        self._obey(self._orders)

    def _obey(self, orders: Mapping[str, Any]) -> None:
        """Does what the leading rank has all ranks do."""
        rank = self._facts.rank
        if rank in orders.get("stacks", ()) and not self._is_obeying:
            self._is_obeying = True
            self._write_stacks()
        if not orders.get("stacks"):
            self._is_obeying = False
        if "end" in orders:
            is_first = rank in orders["end"]["first"]
            if not is_first:
                with at_rest():
                    self._closed.wait(GRACE_S)
            self._facts.end(orders["end"]["sentence"], is_first)

    def _say_cut_off(self, cut_off_s: float) -> None:
        """The store where ranks meet does not answer: it, or this host, is cut off. Judged by each host alone."""
        facts, limits = self._facts, self._facts.limits
        for_s = describe_seconds(cut_off_s)
        sentence = (
            f"rank {facts.rank} (host {facts.host}) is cut off: the place where the ranks meet has not answered for "
            f"{for_s}; the network, or the host or process that holds it, is down"
        )
        if self._named is None:
            self._named = Verdict((facts.rank,), sentence, False)
            facts.say(sentence)
        *_, since_s = self._pulse.now
        still_s = time.monotonic() - since_s
        if min(cut_off_s, still_s) > (limits.stop_s or max(limits.first_s, 2 * limits.floor_s)):
            facts.end(sentence, True)

    # --- who is slow, and what is shown -------------------------------------------------------------------------

    def _look_for_slow(self, ranks: Sequence[Heard], now_s: float) -> None:
        """Names a rank, once, that computes more slowly than the others over the last steps."""
        if len(ranks) < 2:
            return
        beats = {heard.beat.rank: heard.beat for heard in ranks}
        if self._paces and now_s - self._paces[-1][0] < self._facts.limits.floor_s / 4:
            return
        self._paces.append((now_s, beats))
        first_s, first = self._paces[0]
        if beats[0].step - first[0].step < SLOW_AFTER_STEPS or now_s - first_s < self._facts.limits.floor_s:
            return
        while len(self._paces) > 2 and (
            beats[0].step - self._paces[1][1][0].step >= SLOW_AFTER_STEPS
            and now_s - self._paces[1][0] >= self._facts.limits.floor_s
        ):
            self._paces.popleft()
        for rank, (phase, mine_s, usual_s) in find_slow(_compute_paces(self._paces[0][1], beats)).items():
            if rank not in self._told_slow:
                self._told_slow.add(rank)
                what = "loading data" if phase == "loading" else f"in the {phase}" if phase != "updating" else phase
                self._facts.say(
                    f"rank {rank} (host {beats[rank].host}) is slow: it takes {1000 * mine_s:.1f} ms per micro-batch, "
                    f"the others {1000 * usual_s:.1f} ms; it loses time {what}"
                )

    def _publish(self, ranks: Sequence[Heard]) -> None:
        """Writes down what `samestep watch` shows."""
        facts = self._facts
        if facts.run_dir is None or not facts.may_write():
            return
        rows = [{**asdict(heard.beat), "age_s": heard.age_s, "is_silent": heard.is_silent} for heard in ranks]
        record = {"time_s": time.time(), "micro_batch_size": facts.micro_batch_size, "ranks": rows}
        text = json.dumps(record).encode()
        with suppress(OSError):
            replace_file(facts.run_dir / RANKS, text)
            self._published += len(text)


def _format_stack(frame: FrameType) -> list[str]:
    """Without the frames that led to the script."""
    stack = traceback.extract_stack(frame)
    ours = [i for i, line in enumerate(stack) if line.filename.startswith(f"{OWN}launch/")]
    return traceback.format_list(stack[ours[-1] + 1 :] if ours else stack)


def _compute_paces(before: Mapping[int, Beat], now: Mapping[int, Beat]) -> dict[int, dict[str, float]]:
    """Rank -> phase -> seconds per micro-batch, between two times; of ranks that have loaded any."""
    paces = {}
    for rank, beat in now.items():
        num = beat.num_micro_batches - before[rank].num_micro_batches
        if num > 0:
            spent, was = beat.spent_s, before[rank].spent_s
            paces[rank] = {phase: (spent.get(phase, 0.0) - was.get(phase, 0.0)) / num for phase in COMPUTE}
    return paces
