"""Diagnoses which rank stops a run, from the beats of all ranks, and decides what a rank does about it.

Pure functions.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import Struct

from samestep.console import describe_ranks, format_time
from samestep.watch.beats import NEW_GROUP, PHASES, WARM_UP, Beat

# State of a process -> why its beats have stopped.
SILENCE = {
    "stopped": "the process was stopped (SIGSTOP)",
    "dead": "the process has died",
    "alive": "the process lives, but its main thread is in a call that does not let other threads run",
    "": "the process, its host or the network is down",
}
# Phases whose earlier durations predict the next one. The others contain any code that a script runs now and then.
LEARNT = ("loading", "forward", "backward", "reducing", "validating")

INTERVAL_S = 1.0
FLOOR_S = 10.0
FIRST_S = 300.0
STOP_S = 300.0
UNKNOWN_STOP_S = 1800.0
TIMES_LONGER = 10.0
MAX_GROUPS = 4  # that a sentence lists
GRACE_S = 2.0  # time from the end of the stuck ranks to the end of the others
END_S = 60.0  # limit for the end of stuck ranks, so that the others continue; then all end


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
    waiting = [rank for rank in ranks if rank.waits_in and not rank.is_silent]
    others = [rank for rank in ranks if not rank.waits_in and not rank.is_silent]
    blocking = silent or others or ended
    if silent:
        limit_s = max([limits.floor_s, *[limits.of(rank) for rank in silent if rank.process == "alive"]])
        sentence = _describe_silent(silent, still_s)
    elif others:
        limit_s = max([limits.of(rank) for rank in others])
        sentence = _describe_others(others, still_s)
    elif ended:
        limit_s = limits.floor_s
        sentence = f"{_name(ended)} left the run at step {max(rank.step for rank in ended)}"
    else:
        groups = _group(waiting, lambda beat: f"in {_describe_exchange(beat)} at step {beat.step}")
        limit_s = 2 * limits.floor_s if len(groups) > 1 else max([limits.of(rank) for rank in waiting])
        if any(rank.waits_in == NEW_GROUP for rank in waiting):  # for the launcher, which has a limit of its own
            limit_s = FIRST_S
        sentence = _describe_waiting(groups, still_s)
    if still_s < limit_s:
        return None
    if blocking and waiting:
        sentence += _describe_wait(waiting, len(blocking))
    stop_s = limits.stop_s
    if stop_s is None:
        stop_s = max(UNKNOWN_STOP_S if limit_s == limits.first_s else STOP_S, 2 * limit_s)
        if not silent and any(rank.is_busy for rank in others):  # it computes, and is not stuck
            stop_s = float("inf")
    return Stall(tuple(rank.rank for rank in blocking), sentence, bool(silent), still_s >= stop_s)


# --- the words of a diagnosis -----------------------------------------------------------------------------------------


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
        return f"{what}, {beat.line}" if beat.line else what

    groups = _group(others, describe)
    return "; ".join(f"{_name(each)} {'has' if len(each) == 1 else 'have'} {what}" for what, each in groups.items())


def _describe_silent(silent: Sequence[Beat], still_s: float) -> str:
    """Describe ranks whose beats have stopped."""
    processes = {rank.process for rank in silent}
    why = SILENCE.get(processes.pop() if len(processes) == 1 else "", SILENCE[""])
    last = max(rank.step for rank in silent)
    found = f"nothing was heard of {_name(silent)} for {format_time(round(still_s))}"
    return f"{found}, last heartbeat at step {last}: {why}"


def _describe_waiting(groups: Mapping[str, Sequence[Beat]], still_s: float) -> str:
    """Describe ranks that all wait for other ranks."""
    lost = "a message between them is lost, or very slow"
    why = lost if len(groups) == 1 else "one of these collectives is called by some ranks only"
    named = [f"{_name(beats)} {where}" for where, beats in [*groups.items()][:MAX_GROUPS]]
    return f"the ranks have waited for each other for {format_time(round(still_s))}: {', '.join(named)}: {why}"


def _describe_exchange(beat: Beat) -> str:
    if beat.waits_in == "the exchange":  # one that is not about gradients
        return f"an exchange while {PHASES[beat.phase].removeprefix('been ')}"
    if beat.waits_in.startswith("the ") or not beat.line:
        return beat.waits_in
    return f"{beat.waits_in} ({beat.line})"


def _describe_wait(waiting: Sequence[Beat], num_blocking: int) -> str:
    where = Counter(_describe_exchange(beat) for beat in waiting).most_common(1)[0][0]
    who = f"rank {waiting[0].rank} waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait"
    return f"; {who} for {'it' if num_blocking == 1 else 'them'} in {where}"


# --- the decision -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankFacts:
    """The rank, and the functions that a heartbeat calls. Ranks are numbered as at the start of all ranks.

    Attributes:
        members: the ranks that exchange heartbeats, in order.
        say: prints a line on the terminal. Does not block.
        end: ends this process. Takes a message, and whether this rank is the stuck one.
        end_others: ends ranks of this host that cannot end themselves. Takes (rank, pid) pairs and a message.
        request_end: requests that launchers of other hosts end ranks. Takes these and a message.
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
    can_heal: bool = False
    is_lost: Callable[[int], bool] = lambda rank: False


class EndOrder(Struct, frozen=True):
    """The leader's order to end ranks. `first`: the stuck ranks. `is_for_all`: the others end after them."""

    reason: str
    first: list[int]
    is_for_all: bool


@dataclass(frozen=True)
class View:
    """What a rank knows at one time.

    Attributes:
        now_s: of the monotonic clock.
        awake_s: how long this process has run without an interruption: it may have been stopped.
        cut_off_s: how long the store has not answered.
        own: the state of this rank.
        ranks: the states of all ranks that are not lost; None if another rank leads, or before each has sent one.
        order: the order of the leader, if there is one.
    """

    now_s: float
    awake_s: float
    cut_off_s: float
    own: Beat
    ranks: Sequence[Beat] | None
    order: EndOrder | None = None


# --- states ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moving:
    """The run makes progress, as far as this rank knows."""


@dataclass(frozen=True)
class CutOff:
    """This rank has said that the store does not answer."""


@dataclass(frozen=True)
class Stalled:
    """This rank leads, and has named the ranks that stop the run.

    Attributes:
        named: these ranks, with whether they were silent then. Under load, the diagnosis may change to and fro.
    """

    named: frozenset[tuple[tuple[int, ...], bool]]


@dataclass(frozen=True)
class Ending:
    """Ranks end.

    Attributes:
        due_s: when this rank executes the order.
        others: ranks that cannot end themselves, and that this rank still has to end.
    """

    order: EndOrder
    due_s: float
    others: "EndOthers | None" = None


State = Moving | CutOff | Stalled | Ending

# --- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Say:
    """Print a line."""

    text: str


@dataclass(frozen=True)
class EndOthers:
    """End ranks of this host (with their pids), and have launchers of other hosts end theirs."""

    frozen: Sequence[tuple[int, int]]
    elsewhere: Sequence[int]
    reason: str


@dataclass(frozen=True)
class EndSelf:
    """End this process. `is_stuck`: it is one that stops the run."""

    reason: str
    is_stuck: bool


Action = Say | EndOthers | EndSelf

# --- the decision ---------------------------------------------------------------------------------------------------


def decide(state: State, view: View, facts: RankFacts) -> tuple[State, list[Action]]:
    """Return the next state of this rank, and what it does now. Called about once per second."""
    if isinstance(state, Ending):
        return _end(state, view, facts)
    order = view.order
    if order is not None and (order.is_for_all or facts.rank in order.first):
        return Ending(order, view.now_s + 2 * facts.limits.interval_s), []
    if view.cut_off_s > facts.limits.floor_s:
        return _report_cut_off(state, view, facts)
    stall = None if view.ranks is None else diagnose(view.ranks, facts.limits, view.awake_s)
    if view.ranks is None or stall is None:
        if isinstance(state, Moving):
            return state, []
        if view.ranks is not None and diagnose(view.ranks, facts.limits) is not None:
            return state, []  # only this process was suspended meanwhile
        return Moving(), [Say("the run continues")]
    actions: list[Action] = []
    named = state.named if isinstance(state, Stalled) else frozenset()
    # A rank whose host goes down is named by what it did last, until its beats are overdue.
    if named.isdisjoint({(stall.blocking, stall.is_silent), (stall.blocking, True)}):
        actions.append(Say(stall.sentence))
    ending = _begin_end(stall, view, view.ranks, facts) if stall.is_final else None
    if ending is None:
        return Stalled(named | {(stall.blocking, stall.is_silent)}), actions
    ended = "the run" if ending.order.is_for_all else describe_ranks(stall.blocking)
    return ending, [*actions, Say(f"nothing has moved for too long: stopping {ended}")]


def _begin_end(stall: Stall, view: View, ranks: Sequence[Beat], facts: RankFacts) -> Ending | None:
    """Return how the blocking ranks end; None if their launcher decides."""
    blocking = [beat for beat in ranks if beat.rank in stall.blocking]
    if facts.can_heal and blocking and all(beat.process == "dead" for beat in blocking):
        return None
    able = [beat.rank for beat in blocking if not beat.is_silent]
    frozen = [(beat.rank, beat.pid) for beat in blocking if beat.is_silent and beat.process in ("stopped", "alive")]
    elsewhere = [beat.rank for beat in blocking if beat.is_silent and not beat.process]
    is_for_all = not facts.can_heal or len(blocking) in (0, len(ranks))
    first = able or ([] if frozen or facts.can_heal else [facts.rank])
    order = EndOrder(stall.sentence, first, is_for_all)
    others = EndOthers(frozen, [] if is_for_all else elsewhere, stall.sentence)
    return Ending(order, view.now_s + 2 * facts.limits.interval_s, others)


def _end(state: Ending, view: View, facts: RankFacts) -> tuple[State, list[Action]]:
    """Execute an order, from the time when it is due."""
    order = state.order
    since_s = view.now_s - state.due_s
    if since_s < 0:
        return state, []
    actions: list[Action] = [] if state.others is None else [state.others]
    is_stuck = facts.rank in order.first
    if is_stuck or (order.is_for_all and since_s >= GRACE_S):
        actions.append(EndSelf(order.reason, is_stuck))
    elif not order.is_for_all and since_s > END_S and view.ranks and diagnose(view.ranks, facts.limits, view.awake_s):
        return Ending(EndOrder(order.reason, order.first, True), view.now_s + 2 * facts.limits.interval_s), actions
    return replace(state, others=None), actions


def _report_cut_off(state: State, view: View, facts: RankFacts) -> tuple[State, list[Action]]:
    """Report that the rendezvous store does not answer, so that no leader can be reached."""
    limits = facts.limits
    sentence = (
        f"rank {facts.rank} (host {facts.host}) is cut off: the rendezvous store has not answered for "
        f"{format_time(round(view.cut_off_s))}; the network, or the host or process of the store, is down"
    )
    actions: list[Action] = [] if isinstance(state, CutOff) else [Say(sentence)]
    if min(view.cut_off_s, view.own.still_s) > (limits.stop_s or max(limits.first_s, 2 * limits.floor_s)):
        actions.append(EndSelf(sentence, True))
    return CutOff(), actions
