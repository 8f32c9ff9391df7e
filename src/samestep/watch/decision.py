"""Decides what a rank says and does about a run that makes no progress. Pure functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import Struct

from samestep.console import describe_ranks
from samestep.units import format_time
from samestep.watch.stall_diagnosis import Beat, Limits, Stall, diagnose

GRACE_S = 2.0  # time from the end of the stuck ranks to the end of the others
END_S = 60.0  # limit for the end of stuck ranks, so that the others continue; then all end


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
    """This rank leads, and has named the ranks that stop the run."""

    stall: Stall


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
        if isinstance(state, (Stalled, CutOff)):
            return Moving(), [Say("the run continues")]
        return Moving(), []
    actions: list[Action] = []
    said = state.stall if isinstance(state, Stalled) else None
    # A rank whose host goes down is named by what it did last, until its beats are overdue.
    if said is None or said.blocking != stall.blocking or (stall.is_silent and not said.is_silent):
        actions.append(Say(stall.sentence))
    ending = _begin_end(stall, view, view.ranks, facts) if stall.is_final else None
    if ending is None:
        return Stalled(stall), actions
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
        f"{format_time(round(view.cut_off_s))}; the network, or the host or process that holds the store, is down"
    )
    actions: list[Action] = [] if isinstance(state, CutOff) else [Say(sentence)]
    if min(view.cut_off_s, view.own.still_s) > (limits.stop_s or max(limits.first_s, 2 * limits.floor_s)):
        actions.append(EndSelf(sentence, True))
    return CutOff(), actions
