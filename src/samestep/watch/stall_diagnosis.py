"""Diagnoses which rank stops a run, from the beats of all ranks. Pure functions."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from samestep.console import describe_ranks
from samestep.decoding import Count, Number
from samestep.units import format_time

# Phase -> its description, after "rank 3 has".
PHASES = {
    "starting": "been starting",
    "loading": "been loading data",
    "forward": "been computing",
    "backward": "been in the backward",
    "reducing": "been in the reduction",
    "updating": "been updating",
    "saving": "been saving",
    "validating": "been validating",
    "script": "been in the script's own code between two steps",
    "left": "been outside the loop",
    "ended": "ended its part",
}
# State of a process -> why its beats have stopped.
SILENCE = {
    "stopped": "the process was stopped (SIGSTOP)",
    "dead": "the process has died",
    "alive": "the process lives, but its main thread is in a call that does not let other threads run",
    "": "the process, its host or the network is down",
}
NEW_GROUP = "the new group"  # after a death, ranks wait in it for all others
# Phases whose earlier durations predict the next one. The others contain any code that a script runs now and then.
LEARNT = ("loading", "forward", "backward", "reducing", "validating")

INTERVAL_S = 1.0
FLOOR_S = 10.0
FIRST_S = 300.0
STOP_S = 300.0
UNKNOWN_STOP_S = 1800.0
TIMES_LONGER = 10.0
MAX_GROUPS = 4  # that a sentence lists
WARM_UP = 2  # the first phases of each kind: they compile, open files, start workers

# Row of the table at the end -> its phases.
SUMMARY = {
    "data": ("loading",),
    "compute": ("forward", "backward"),
    "gradient reduction": ("reducing",),
    "update": ("updating",),
    "snapshots": ("saving",),
    "validation": ("validating",),
    "other": ("script", "left"),
}


class ThreadState(Struct, frozen=True, kw_only=True):
    """The state of a thread.

    Attributes:
        waits_in: the current exchange with other ranks, such as "the reduction" or "all_reduce"; "" if there is none.
        place: the innermost line of the user's code, such as "train.py:31 in load".
        is_compiling: torch.compile is active.
        cpu_s: CPU time since the thread's start.
    """

    waits_in: str = ""
    place: str = ""
    is_compiling: bool = False
    cpu_s: Number = 0.0


class Beat(ThreadState, frozen=True, kw_only=True):
    """The state of a rank. The rank publishes it; the leader adds the last three attributes.

    Ranks exchange it, and `ranks.json` holds it, as JSON.

    Attributes:
        number: sequence number.
        system: identifies the system in which `pid` is valid.
        step, phase: the current step, and a key of PHASES.
        for_s: seconds without progress: no change of phase or micro-batch, no bytes written to a snapshot.
        num_seen, longest_s: how often this phase has ended, and its longest duration after WARM_UP.
        is_busy: it uses the CPU.
        spent_s: phase -> total seconds since the start.
        num_steps, num_micro_batches: of this start, so far.
        age_s: seconds since this arrived.
        is_silent: the next beat is overdue.
        process: state of its process: "stopped", "dead", "alive", or "" on another host.
    """

    rank: Count
    host: str
    pid: Count
    number: Count
    step: Count
    phase: str
    for_s: Number
    system: str = ""
    num_seen: Count = 0
    longest_s: Number = 0.0
    is_busy: bool = False
    spent_s: dict[str, Number] = {}
    num_steps: Count = 0
    num_micro_batches: Count = 0
    age_s: Number = 0.0
    is_silent: bool = False
    process: str = ""

    @property
    def still_s(self) -> float:
        """Seconds without progress."""
        return self.for_s + self.age_s


@dataclass(frozen=True)
class Limits:
    """Limits in seconds.

    Attributes:
        floor_s: shorter stalls are not reported.
        first_s: limit without earlier durations: the first phases of a kind, compilation, the script's own code.
        stop_s: the run is stopped after this long; None: derived from the earlier durations.
    """

    floor_s: float = FLOOR_S
    first_s: float = FIRST_S
    stop_s: float | None = None

    @property
    def interval_s(self) -> float:
        """The time between two heartbeats."""
        return min(INTERVAL_S, self.floor_s / 4)

    def of(self, beat: Beat) -> float:
        """Return how long this rank can stay in its phase before it counts as stuck."""
        learnt_s = max(self.floor_s, TIMES_LONGER * beat.longest_s)
        if beat.phase in LEARNT and beat.num_seen > WARM_UP and not beat.is_compiling:
            return learnt_s
        return max(self.first_s, learnt_s)


def build_limits(stuck_after_s: int | None) -> Limits:
    """Return the limits for `--stuck-after-s`; None: derive the limit from earlier durations."""
    if stuck_after_s is None:
        return Limits()
    return Limits(min(FLOOR_S, stuck_after_s / 3), min(FIRST_S, stuck_after_s), stuck_after_s)


@dataclass(frozen=True)
class Stall:
    """No rank has made progress for too long.

    Attributes:
        blocking: the ranks that the others wait for; none if all wait.
        sentence: the diagnosis.
        is_silent: they do not respond.
        is_final: the run must be stopped.
    """

    blocking: tuple[int, ...]
    sentence: str
    is_silent: bool
    is_final: bool


def diagnose(ranks: Sequence[Beat], limits: Limits, awake_s: float = float("inf")) -> Stall | None:
    """Return why the run makes no progress; None if a rank makes progress, or its limit has not passed.

    Args:
        ranks: all ranks.
        awake_s: how long the caller has run without interruption: its process may have been stopped.
    """
    ended = [rank for rank in ranks if rank.phase == "ended"]
    ranks = [rank for rank in ranks if rank.phase != "ended"]
    if not ranks:
        return None
    still_s = min([awake_s, *[rank.still_s for rank in ranks]])
    silent = [rank for rank in ranks if rank.is_silent]
    responding = [rank for rank in ranks if not rank.is_silent]
    waiting = [rank for rank in responding if rank.waits_in]
    others = [rank for rank in responding if not rank.waits_in]
    is_known = True
    is_busy = False
    if silent:
        limit_s = max([limits.floor_s, *[limits.of(rank) for rank in silent if rank.process == "alive"]])
        blocking = silent
        sentence = _describe_silent(silent, still_s)
    elif others:
        limit_s = max([limits.of(rank) for rank in others])
        blocking = others
        sentence = _describe_others(others, still_s)
        is_known = limit_s != limits.first_s
        is_busy = any(rank.is_busy for rank in others)
    elif ended:
        limit_s = limits.floor_s
        blocking = ended
        sentence = f"{_name(ended)} left the run at step {max(rank.step for rank in ended)}"
    else:
        blocking = []
        groups = _group(waiting, lambda beat: f"in {_describe_exchange(beat)} at step {beat.step}")
        sentence = _describe_waiting(groups, still_s)
        if any(rank.waits_in == NEW_GROUP for rank in waiting):  # for the launcher, which has a limit of its own
            limit_s = FIRST_S
        elif len(groups) > 1:
            limit_s = 2 * limits.floor_s
        else:
            limit_s = max([limits.of(rank) for rank in waiting])
            is_known = limit_s != limits.first_s
    if still_s < limit_s:
        return None
    if silent or others or ended:
        sentence += _describe_wait(waiting, len(blocking))
    stop_s = limits.stop_s
    if stop_s is None:
        stop_s = max(STOP_S if is_known else UNKNOWN_STOP_S, 2 * limit_s)
        if is_busy:  # it computes, and is not stuck
            stop_s = float("inf")
    return Stall(tuple(rank.rank for rank in blocking), sentence, bool(silent), still_s >= stop_s)


# --- words ----------------------------------------------------------------------------------------------------------


def describe_spent(spent_s: Mapping[str, float]) -> str:
    """Format the shares of the time, the largest first, such as "compute 71 %, data 12 %"."""
    shares = sorted([(share, name) for name, share in share_spent(spent_s).items() if share >= 0.005], reverse=True)
    return ", ".join([f"{name} {share:.0%}".replace("%", " %") for share, name in shares])


def share_spent(spent_s: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each row of `SUMMARY` in the total time; {} if there is none."""
    spans_s = {name: sum(spent_s.get(phase, 0.0) for phase in phases) for name, phases in SUMMARY.items()}
    total_s = sum(spans_s.values())
    return {name: span_s / total_s for name, span_s in spans_s.items()} if total_s > 0 else {}


def _name(beats: Sequence[Beat]) -> str:
    """Format ranks and their hosts."""
    hosts = sorted({beat.host for beat in beats})
    return f"{describe_ranks([beat.rank for beat in beats])} (host {', '.join(hosts[:4])})"


def _group(beats: Sequence[Beat], describe: Callable[[Beat], str]) -> dict[str, list[Beat]]:
    """Group ranks by their description."""
    groups: dict[str, list[Beat]] = {}
    for beat in beats:
        groups.setdefault(describe(beat), []).append(beat)
    return groups


def _describe_others(others: Sequence[Beat], still_s: float) -> str:
    """Describe ranks that do not wait for other ranks."""

    def describe(beat: Beat) -> str:
        # All are described with the time of the whole run, because the times of the ranks differ.
        what = f"{PHASES[beat.phase]} for {format_time(round(still_s))} at step {beat.step}"
        return f"{what}, {beat.place}" if beat.place else what

    groups = _group(others, describe).items()
    return "; ".join(f"{_name(beats)} {'has' if len(beats) == 1 else 'have'} {what}" for what, beats in groups)


def _describe_silent(silent: Sequence[Beat], still_s: float) -> str:
    """Describe ranks whose beats have stopped."""
    processes = {rank.process for rank in silent}
    why = SILENCE.get(processes.pop() if len(processes) == 1 else "", SILENCE[""])
    last = max(rank.step for rank in silent)
    for_s = format_time(round(still_s))
    return f"nothing was heard of {_name(silent)} for {for_s}, last heartbeat at step {last}: {why}"


def _describe_waiting(groups: Mapping[str, Sequence[Beat]], still_s: float) -> str:
    """Describe ranks that all wait for other ranks."""
    if len(groups) == 1:
        why = "a message between them is lost, or very slow"
    else:
        why = "one of these collectives is called by some ranks only"
    named = [f"{_name(beats)} {where}" for where, beats in [*groups.items()][:MAX_GROUPS]]
    return f"the ranks have waited for each other for {format_time(round(still_s))}: {', '.join(named)}: {why}"


def _describe_exchange(beat: Beat) -> str:
    if beat.waits_in == "the exchange":  # one that is not about gradients
        return f"an exchange while {PHASES[beat.phase].removeprefix('been ')}"
    is_ours = beat.waits_in.startswith("the ")
    return beat.waits_in if is_ours or not beat.place else f"{beat.waits_in} ({beat.place})"


def _describe_wait(waiting: Sequence[Beat], num_blocking: int) -> str:
    if not waiting:
        return ""
    where = Counter(_describe_exchange(beat) for beat in waiting).most_common(1)[0][0]
    who = f"rank {waiting[0].rank} waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait"
    return f"; {who} for {'it' if num_blocking == 1 else 'them'} in {where}"
