"""What a rank says and does about a stall, in simulated time."""

from collections.abc import Sequence

import pytest
from watch.test_stall_diagnosis import hear, wait

from samestep.watch.decision import (
    END_S,
    GRACE_S,
    Action,
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
from samestep.watch.stall_diagnosis import Beat, build_limits

LIMITS = build_limits(60)
OWN = wait(0, 0)


def refuse(*_: object) -> None:
    raise AssertionError("a decision has no effects")


def build_facts(rank: int = 0, *, can_heal: bool = True) -> RankFacts:
    return RankFacts(rank, range(2), "h0", LIMITS, refuse, refuse, refuse, refuse, can_heal)


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


def test_all_end_if_a_rank_that_is_stuck_elsewhere_does_not() -> None:
    """Its launcher is asked to end it, but may not respond either."""
    done = simulate(build_facts(), [OWN, hear(1, "forward", 0, is_silent=True, host="far")], 1000)
    times = {type(action): at_s for at_s, action in done}
    assert isinstance(done[-1][1], EndSelf)
    assert not done[-1][1].is_stuck
    assert times[EndSelf] - times[EndOthers] == pytest.approx(END_S + 2 + GRACE_S, abs=2)


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
