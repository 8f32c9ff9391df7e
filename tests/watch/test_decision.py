"""What a rank says and does about a stall, in simulated time."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from watch.test_stall_diagnosis import hear, wait

from samestep.watch.decision import (
    END_S,
    GRACE_S,
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
from samestep.watch.stall_diagnosis import Beat, Limits, build_limits

LIMITS = build_limits(60)
OWN = wait(0, 0)


def refuse(*_: object) -> None:
    raise AssertionError("a decision has no effects")


def build_facts(rank: int = 0, *, can_heal: bool = True, limits: Limits = LIMITS) -> RankFacts:
    return RankFacts(rank, range(2), "h0", limits, refuse, refuse, refuse, refuse, can_heal)


# --- every sequence of what happens to three ranks --------------------------------------------------------------------

STOP_S = 12

BEATS: dict[str, dict[str, Any]] = {
    "waits": {"phase": "reducing", "waits_in": "the reduction"},  # for the others; moves if none of them is stuck
    "computes": {"phase": "forward"},
    "stopped": {"phase": "forward", "is_silent": True, "process": "stopped"},
    "far": {"phase": "forward", "is_silent": True, "host": "far"},
    "dead": {"phase": "forward", "is_silent": True, "process": "dead"},
}


class Ranks:
    """Three ranks: what happens to them, and what they do about it.

    Args:
        can_heal: whether the others continue if a rank ends.
        is_launched: whether the launcher does its part: it ends a rank of another host, and names one that is dead.
    """

    def __init__(self, *, can_heal: bool, is_launched: bool) -> None:
        self.kinds = dict.fromkeys(range(3), "waits")
        self.now_s = self.since_s = 0.0  # nothing has moved since then
        self.said: list[str] = []
        self.ends: list[bool] = []  # whether each rank that was ended was stuck
        self.were_stuck = set[int]()
        self._can_heal = can_heal
        self._is_launched = is_launched
        self._begin()

    def _begin(self) -> None:
        """Begin to exchange beats, in a new group after a death."""
        self._states: dict[int, State] = dict.fromkeys(self.kinds, Moving())
        self._orders: dict[int, EndOrder | None] = dict.fromkeys(self.kinds)
        self.since_s = self.now_s

    @property
    def is_halted(self) -> bool:
        return any(kind != "waits" for kind in self.kinds.values())

    def let(self, rank: int, kind: str) -> None:
        """Let something happen to a rank."""
        if rank in self.kinds and self.kinds[rank] != "dead":
            self.kinds[rank] = kind
            self.were_stuck |= {rank} if kind != "waits" else set()

    def tick(self) -> None:
        """Let a second pass."""
        self.now_s += 1.0
        if not self.is_halted:
            self.since_s = self.now_s
        for rank, kind in [*self.kinds.items()]:
            if kind == "dead" and self._can_heal and self._is_launched:
                del self.kinds[rank]
        able = [rank for rank, kind in self.kinds.items() if not BEATS[kind].get("is_silent")]
        beats = [hear(rank, still_s=self.now_s - self.since_s, **BEATS[kind]) for rank, kind in self.kinds.items()]
        for rank in able:
            ranks = beats if rank == able[0] else None
            own = next(beat for beat in beats if beat.rank == rank)
            view = View(self.now_s, self.now_s, 0.0, own, ranks, self._orders[rank])
            facts = build_facts(rank, can_heal=self._can_heal, limits=build_limits(STOP_S))
            self._states[rank], actions = decide(self._states[rank], view, facts)
            for action in actions:
                self._execute(rank, action)
        for rank in able[1:]:
            leader = self._states[able[0]] if able[0] in self.kinds else None
            self._orders[rank] = leader.order if isinstance(leader, Ending) else self._orders[rank]
        if len(self.kinds) < len(self._states) and not self.is_halted:
            self._begin()

    def _execute(self, rank: int, action: Action) -> None:
        if isinstance(action, Say):
            self.said.append(action.text)
        elif isinstance(action, EndSelf):
            self._end(rank, action.is_stuck)
        else:
            for other in [*(frozen for frozen, _ in action.frozen), *(action.elsewhere if self._is_launched else ())]:
                self._end(other, is_stuck=True)

    def _end(self, rank: int, is_stuck: bool) -> None:
        assert self.now_s - self.since_s > STOP_S, "a rank is ended too soon"
        assert self.said, "a rank is ended, and nothing was said"
        # If all end, the leader says why.
        assert not (is_stuck and self._can_heal) or rank in self.were_stuck, "a rank that waits is called stuck"
        self.ends.append(is_stuck)
        if self._can_heal:
            self.kinds.pop(rank, None)
        else:
            self.kinds[rank] = "dead"


@pytest.mark.parametrize(("can_heal", "is_launched"), [(False, True), (True, True), (True, False)])
def test_every_sequence_of_two_events(can_heal: bool, is_launched: bool) -> None:
    """A rank that is stuck ends, and the others continue if they can. If not, all end that can end themselves."""
    firsts = product((0, 1), BEATS)  # rank 0 leads, as long as it responds
    for first, second, at_s in product(firsts, product(range(3), BEATS), (STOP_S / 3, STOP_S + 1, STOP_S + 3)):
        is_late = at_s > STOP_S
        if is_late and second[1] == "waits":
            continue  # a rank is ended although it has just recovered
        ranks = Ranks(can_heal=can_heal, is_launched=is_launched)
        ranks.let(*first)
        while ranks.now_s <= at_s or (ranks.is_halted and ranks.now_s < 2 * STOP_S + END_S + at_s):
            ranks.tick()
            if ranks.now_s == at_s:
                ranks.let(*second)
        assert any(ranks.ends) or not ranks.ends or is_late or can_heal, "no rank says why"
        left = {*ranks.kinds.values()}
        if left == {"waits"} and len(ranks.kinds) == 3 and ranks.said:
            assert ranks.said[-1].startswith("the run continues")
        continues = left == {"waits"} and len(ranks.kinds) >= 3 - len(ranks.were_stuck)
        if can_heal and is_launched and len(ranks.were_stuck) < 2 and not is_late:
            assert continues, (first, second, at_s)
        is_left_to_launcher = can_heal and not is_launched and "dead" in left
        assert continues or left.isdisjoint({"waits", "computes"}) or is_left_to_launcher, (first, second, at_s)


# --- one rank ---------------------------------------------------------------------------------------------------------


def simulate(
    facts: RankFacts,
    ranks: Sequence[Beat] | None,
    seconds: float,
    order: EndOrder | None = None,
    cut_off_s: float = 0.0,
) -> list[tuple[float, Action]]:
    """Return what a rank does, with the time, while nothing moves."""
    state: State = Moving()
    done: list[tuple[float, Action]] = []
    now_s = 0.0
    while now_s < seconds:
        heard = None if ranks is None else [hear(each.rank, each.phase, now_s, **_describe(each)) for each in ranks]
        own = wait(facts.rank, now_s)
        view = View(now_s, now_s, cut_off_s and now_s, own, heard, order)
        state, actions = decide(state, view, facts)
        done += [(now_s, action) for action in actions]
        if any(isinstance(action, EndSelf) for action in actions):
            break
        now_s += 1.0
    return done


def _describe(beat: Beat) -> dict[str, object]:
    return {"waits_in": beat.waits_in, "is_silent": beat.is_silent, "process": beat.process, "host": beat.host}


def test_a_stopped_rank_is_ended_and_the_others_continue() -> None:
    frozen = hear(1, "forward", 0, is_silent=True, process="stopped")
    named, stopping, ended = simulate(build_facts(), [OWN, frozen], 65)
    assert (named[0], stopping[0], ended[0]) == (10.0, 60.0, 62.0), "the others receive the order first"
    assert isinstance(stopping[1], Say)
    assert stopping[1].text == "nothing has moved for too long: stopping rank 1"
    assert isinstance(ended[1], EndOthers)
    assert (ended[1].frozen, ended[1].elsewhere) == ([(1, 1)], [])


def test_a_rank_that_no_longer_responds_is_named_again() -> None:
    """It was named by what it did last: its beats are overdue only later."""
    state: State = Moving()
    said: list[str] = []
    for now_s in range(10, 40):
        other = hear(1, "loading", now_s, is_silent=20 <= now_s < 30)
        view = View(now_s, now_s, 0.0, OWN, [wait(0, now_s), other])
        state, actions = decide(state, view, build_facts())
        said += [action.text for action in actions if isinstance(action, Say)]
    first, second = said
    assert first.startswith("rank 1 (host h0) has been loading data")
    assert second.startswith("nothing was heard of rank 1 (host h0)")


def test_the_launcher_decides_about_a_dead_rank() -> None:
    [named] = simulate(build_facts(), [OWN, hear(1, "forward", 0, is_silent=True, process="dead")], 1000)
    assert isinstance(named[1], Say)
    assert simulate(build_facts(can_heal=False), [OWN, hear(1, "forward", 0, is_silent=True, process="dead")], 1000)[-1]


@pytest.mark.parametrize(
    ("order", "ends"),
    [
        (EndOrder("stuck", [1], False), (2.0, EndSelf("stuck", True))),
        (EndOrder("stuck", [2], True), (2.0 + GRACE_S, EndSelf("stuck", False))),
        (EndOrder("stuck", [2], False), None),
    ],
)
def test_a_rank_obeys_the_leader(order: EndOrder, ends: tuple[float, Action] | None) -> None:
    assert simulate(build_facts(1), None, 9, order) == ([] if ends is None else [ends])


def test_a_rank_that_is_cut_off_ends() -> None:
    said, ended = simulate(build_facts(), None, 1000, cut_off_s=1.0)
    assert isinstance(said[1], Say)
    assert (ended[0], isinstance(ended[1], EndSelf)) == (61.0, True)
