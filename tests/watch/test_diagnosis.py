"""Which rank is reported as stuck, when, and what the ranks do about it. Time is simulated."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from samestep.watch.beats import PHASES, WARM_UP, Beat
from samestep.watch.diagnosis import (
    END_S,
    LEARNT,
    NEW_GROUP,
    Action,
    Ending,
    EndOrder,
    EndSelf,
    Limits,
    Moving,
    RankFacts,
    Say,
    State,
    View,
    build_limits,
    decide,
    diagnose,
)

FRESH = {"num_seen": WARM_UP + 100, "longest_s": 0.02}


def hear(rank: int, phase: str, still_s: float, **more: Any) -> Beat:
    """The beat of a rank that has made no progress for `still_s`, in a known phase."""
    process, is_silent, age_s = more.pop("process", ""), more.pop("is_silent", False), more.pop("age_s", 0.0)
    facts = {"host": f"h{rank // 4}", "pid": rank, "number": 1, "step": 120, **FRESH, **more}
    more = {"for_s": still_s - age_s, "age_s": age_s, "is_silent": is_silent, "process": process, **facts}
    return Beat(rank=rank, phase=phase, **more)


def wait(rank: int, still_s: float, **more: Any) -> Beat:
    return hear(rank, "reducing", still_s, **{"waits_in": "the reduction", **more})


@st.composite
def worlds(draw: st.DrawFn) -> list[Beat]:
    ranks = []
    for rank in range(draw(st.integers(1, 6))):
        waits_in = draw(st.sampled_from(["", "the reduction", "all_reduce"]))
        is_silent = draw(st.booleans())
        ranks.append(
            hear(
                rank,
                draw(st.sampled_from(list(PHASES))),
                draw(st.floats(0, 5000)),
                step=draw(st.integers(0, 3)),
                waits_in=waits_in,
                num_seen=draw(st.integers(0, 5)),
                longest_s=draw(st.floats(0, 50)),
                is_busy=draw(st.booleans()),
                is_compiling=draw(st.booleans()),
                is_silent=is_silent,
                process=draw(st.sampled_from(["", "stopped", "dead", "alive"])) if is_silent else "",
            )
        )
    return ranks


LIMITS = st.sampled_from([Limits(), build_limits(3), build_limits(60), build_limits(10_000)])


@given(worlds(), LIMITS)
def test_no_rank_is_reported_while_any_makes_progress(ranks: list[Beat], limits: Limits) -> None:
    moving = replace(ranks[0], for_s=limits.floor_s * 0.99, phase="forward", age_s=0.0)
    assert diagnose([moving, *ranks[1:]], limits) is None


@given(worlds(), LIMITS, st.floats(0, 0.99))
def test_a_suspended_process_reports_no_rank(ranks: list[Beat], limits: Limits, share: float) -> None:
    assert diagnose(ranks, limits, awake_s=share * limits.floor_s) is None


@given(worlds(), LIMITS)
def test_a_waiting_rank_is_not_the_cause_while_another_computes(ranks: list[Beat], limits: Limits) -> None:
    verdict = diagnose(ranks, limits)
    if verdict is None:
        return
    by_rank = {heard.rank: heard for heard in ranks}
    guilty = [by_rank[rank] for rank in verdict.blocking]
    active = [heard for heard in ranks if heard.phase != "ended"]
    if any(heard.is_silent for heard in active):
        assert all(heard.is_silent for heard in guilty)
    elif any(not heard.waits_in for heard in active):
        assert guilty
        assert not any(heard.waits_in for heard in guilty)
    for heard in guilty:
        assert str(heard.rank) in verdict.sentence


IN_ALL_REDUCE = {"waits_in": "all_reduce", "line": "train.py:31 in main"}


@pytest.mark.parametrize(
    ("guilty", "words"),
    [
        (hear(1, "loading", 18, host="b", line="train.py:10 in __getitem__"),
         "rank 1 (host b) has been loading data for 18 s at step 120, train.py:10 in __getitem__"),
        (hear(1, "forward", 20, is_busy=True), "rank 1 (host h0) has been computing for 20 s at step 120"),
        (hear(1, "forward", 20, is_silent=True, process="stopped"), "was stopped (SIGSTOP)"),
        (hear(1, "forward", 20, is_silent=True, process="dead"), "the process has died"),
        (hear(1, "forward", 20, is_silent=True, process="alive"), "does not let other threads run"),
        (hear(1, "forward", 20, is_silent=True, host="far"), "the process, its host or the network is down"),
        (hear(1, "ended", 0), "left the run at step 120"),
    ],
)  # fmt: skip
def test_each_cause_has_its_message(guilty: Beat, words: str) -> None:
    stall = diagnose([wait(0, 20), guilty, wait(2, 20)], Limits())
    assert stall.blocking == (1,)
    assert stall.sentence.endswith(f"{words}; 2 ranks wait for it in the reduction")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([wait(rank, 25) for rank in range(3)],
         "ranks 0, 1 and 2 (host h0) in the reduction at step 120: a message between them is lost, or very slow"),
        ([*(wait(rank, 25, **IN_ALL_REDUCE) for rank in (0, 2)), wait(1, 25, step=121)],
         "ranks 0 and 2 (host h0) in all_reduce (train.py:31 in main) at step 120, rank 1 (host h0) in the reduction "
         "at step 121: one of these collectives is called by some ranks only"),
    ],
)  # fmt: skip
def test_no_rank_is_blamed_if_all_wait(ranks: list[Beat], words: str) -> None:
    stall = diagnose(ranks, Limits())
    assert (stall.blocking, stall.sentence) == ((), f"the ranks have waited for each other for 25 s: {words}")


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in ("ended", *LEARNT)])
def test_code_of_the_script_has_the_longest_limit(phase: str) -> None:
    """The learned limits do not apply to it: the end of an epoch may take longer than a step."""
    assert diagnose([wait(0, 299), hear(1, phase, 299)], Limits()) is None
    assert diagnose([wait(0, 301), hear(1, phase, 301)], Limits()) is not None


@pytest.mark.parametrize("limits", [Limits(), Limits(floor_s=5.0, first_s=6.0, stop_s=6.0)])
def test_all_wait_for_a_rank_that_joins(limits: Limits) -> None:
    """The launcher ends it after 15 s if it does not come, whatever the limits of the run are."""
    assert diagnose([wait(rank, 299, waits_in=NEW_GROUP) for rank in range(2)], limits) is None
    assert diagnose([wait(rank, 301, waits_in=NEW_GROUP) for rank in range(2)], limits) is not None


@pytest.mark.parametrize("phase", LEARNT)
def test_the_limit_is_learnt(phase: str) -> None:
    ranks = [hear(0, phase, 40, longest_s=5.0), wait(1, 60)]
    assert diagnose(ranks, Limits()) is None, "10 times the longest so far is 50 s"
    assert diagnose([hear(0, phase, 51, longest_s=5.0), wait(1, 60)], Limits()) is not None
    first = hear(0, phase, 51, longest_s=0.1, num_seen=WARM_UP)
    compiling = hear(0, phase, 51, longest_s=0.1, is_compiling=True)
    assert diagnose([first, wait(1, 60)], Limits()) is None
    assert diagnose([compiling, wait(1, 60)], Limits()) is None


def test_the_end_is_learnt_or_given() -> None:
    def is_final(still_s: float, limits: Limits, **more: Any) -> bool:
        verdict = diagnose([wait(0, still_s), hear(1, "loading", still_s, **more)], limits)
        return verdict is not None and verdict.is_final

    assert not is_final(299, Limits())
    assert is_final(301, Limits())
    assert not is_final(301, Limits(), longest_s=20.0), "twice 10 times the longest"
    assert not is_final(900, Limits(), num_seen=1), "there is no earlier one to learn from"
    assert not is_final(10_000, Limits(), is_busy=True)
    assert not is_final(299, Limits(), is_silent=True)
    assert is_final(10_000, Limits(), age_s=9_900), "it is still stuck, also by its last beat"
    assert is_final(61, build_limits(60), is_busy=True), "the user has set it"


# --- what the ranks do about it ---------------------------------------------------------------------------------------


OWN = wait(0, 0)


def build_facts(rank: int = 0, *, can_heal: bool = True, stuck_after_s: int = 60) -> RankFacts:
    """The facts of a rank. A decision calls no function."""
    limits = build_limits(stuck_after_s)
    return RankFacts(rank, range(2), "h0", limits, pytest.fail, pytest.fail, pytest.fail, pytest.fail, can_heal)


# --- every sequence of what happens to three ranks --------------------------------------------------------------------

HALT_S = 12

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
            facts = build_facts(rank, can_heal=self._can_heal, stuck_after_s=HALT_S)
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
        assert self.now_s - self.since_s > HALT_S, "a rank is ended too soon"
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
    for first, second, at_s in product(firsts, product(range(3), BEATS), (HALT_S / 3, HALT_S + 1, HALT_S + 3)):
        is_late = at_s > HALT_S
        if is_late and second[1] == "waits":
            continue  # a rank is ended although it has just recovered
        ranks = Ranks(can_heal=can_heal, is_launched=is_launched)
        ranks.let(*first)
        while ranks.now_s <= at_s or (ranks.is_halted and ranks.now_s < 2 * HALT_S + END_S + at_s):
            ranks.tick()
            if ranks.now_s == at_s:
                ranks.let(*second)
        assert is_late or can_heal or ranks.ends[:1] in ([], [True]), "the launcher shows what the first one says"
        if can_heal and {first[1], second[1]} <= {"waits", "dead"}:
            assert not ranks.ends, "the launcher decides about a dead rank"
        left = {*ranks.kinds.values()}
        if left == {"waits"} and len(ranks.kinds) == 3 and ranks.said:
            assert ranks.said[-1].startswith("the run continues")
        continues = left == {"waits"} and len(ranks.kinds) >= 3 - len(ranks.were_stuck)
        if can_heal and is_launched and len(ranks.were_stuck) < 2 and not is_late:
            assert continues, (first, second, at_s)
        is_left_to_launcher = can_heal and not is_launched and "dead" in left
        assert continues or left.isdisjoint({"waits", "computes"}) or is_left_to_launcher, (first, second, at_s)


# --- one rank ---------------------------------------------------------------------------------------------------------


def follow(views: Iterable[View]) -> list[Action]:
    """Return what rank 0 does at these moments."""
    state: State = Moving()
    done: list[Action] = []
    for view in views:
        state, actions = decide(state, view, build_facts())
        done += actions
    return done


def test_a_rank_that_no_longer_responds_is_named_again() -> None:
    """It was named by what it did last: its beats are overdue only later."""
    others = [hear(1, "loading", now_s, is_silent=20 <= now_s < 30) for now_s in range(10, 40)]
    first, second = follow(View(s, s, 0.0, OWN, [wait(0, s), other]) for s, other in enumerate(others, 10))
    assert first.text.startswith("rank 1 (host h0) has been loading data")
    assert second.text.startswith("nothing was heard of rank 1 (host h0)")


def test_a_suspended_leader_does_not_say_that_the_run_continues() -> None:
    [said] = follow(View(s, s % 20, 0.0, OWN, [wait(0, s), hear(1, "loading", s)]) for s in range(10, 40))
    assert isinstance(said, Say)


def test_a_rank_that_is_cut_off_ends() -> None:
    def find_actions(until_s: int) -> list[type[Action]]:
        return [*map(type, follow(View(s, s, s, wait(0, s), None) for s in range(until_s)))]

    assert [*map(find_actions, (11, 12, 61, 62))] == [[], [Say], [Say], [Say, EndSelf]]
