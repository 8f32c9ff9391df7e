"""Which rank is reported as stuck, and when. The diagnosis reads beats only, so time is simulated."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from samestep.watch.stall_diagnosis import (
    LEARNT,
    NEW_GROUP,
    PHASES,
    STOP_S,
    WARM_UP,
    Beat,
    Limits,
    build_limits,
    describe_spent,
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


@given(worlds(), LIMITS, st.floats(1, 100))
def test_a_stuck_rank_stays_stuck(ranks: list[Beat], limits: Limits, more_s: float) -> None:
    later = [replace(heard, age_s=heard.age_s + more_s) for heard in ranks]
    now, then = diagnose(ranks, limits), diagnose(later, limits)
    if now is not None:
        assert then is not None
        assert then.blocking == now.blocking
        assert then.is_final >= now.is_final


@given(worlds())
def test_a_run_is_stopped_late(ranks: list[Beat]) -> None:
    """Not before the default of 300 s, and not while a rank computes, unless the user has set a limit."""
    verdict = diagnose(ranks, Limits())
    if verdict is not None and verdict.is_final:
        active = [heard for heard in ranks if heard.phase != "ended"]
        assert min(heard.still_s for heard in active) >= STOP_S
        if not any(heard.is_silent for heard in active):
            assert not any(by.is_busy and not by.waits_in for by in active)


def test_the_sentence() -> None:
    ranks = [wait(rank, 50) for rank in range(8) if rank != 3]
    slow = hear(3, "loading", 48, host="b", place="train.py:10 in __getitem__")
    verdict = diagnose([*ranks, slow], Limits())
    assert verdict is not None
    assert verdict.blocking == (3,)
    assert verdict.sentence == (
        "rank 3 (host b) has been loading data for 48 s at step 120, train.py:10 in __getitem__; 7 ranks wait for it "
        "in the reduction"
    )


@pytest.mark.parametrize(
    ("guilty", "words"),
    [
        (hear(1, "forward", 20, is_busy=True), "has been computing for 20 s at step 120"),
        (hear(1, "forward", 20, is_silent=True, process="stopped"), "was stopped (SIGSTOP)"),
        (hear(1, "forward", 20, is_silent=True, process="dead"), "the process has died"),
        (hear(1, "forward", 20, is_silent=True, process="alive"), "does not let other threads run"),
        (hear(1, "forward", 20, is_silent=True, host="far"), "the process, its host or the network is down"),
        (hear(1, "ended", 0), "left the run at step 120"),
    ],
)
def test_each_cause_has_its_message(guilty: Beat, words: str) -> None:
    verdict = diagnose([wait(0, 20), guilty, wait(2, 20)], Limits())
    assert verdict is not None
    assert verdict.blocking == (1,)
    assert words in verdict.sentence
    assert verdict.sentence.endswith("; 2 ranks wait for it in the reduction")


def test_a_collective_that_one_rank_skips() -> None:
    there = [wait(rank, 25, waits_in="all_reduce", place="train.py:31 in main") for rank in (0, 2, 3)]
    verdict = diagnose([*there, wait(1, 25, step=121)], Limits())
    assert verdict is not None
    assert verdict.blocking == (), "which of them is right is not known"
    assert "rank 1 (host h0) in the reduction at step 121" in verdict.sentence
    assert "ranks 0, 2 and 3 (host h0) in all_reduce (train.py:31 in main) at step 120" in verdict.sentence


def test_all_wait_for_a_rank_that_joins() -> None:
    """The launcher ends it after 15 s if it does not come, whatever the limits of the run are."""
    for limits in (Limits(), Limits(floor_s=5.0, first_s=6.0, stop_s=6.0)):
        assert diagnose([wait(rank, 299, waits_in=NEW_GROUP) for rank in range(2)], limits) is None
        assert diagnose([wait(rank, 301, waits_in=NEW_GROUP) for rank in range(2)], limits) is not None


def test_all_wait_in_the_same_exchange() -> None:
    verdict = diagnose([wait(rank, 25) for rank in range(3)], Limits())
    assert verdict is not None
    assert verdict.blocking == ()
    assert "ranks 0, 1 and 2 (host h0) in the reduction at step 120: a message between them is lost" in verdict.sentence


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in ("ended", *LEARNT)])
def test_code_of_the_script_has_the_longest_limit(phase: str) -> None:
    """The learned limits do not apply to it: the end of an epoch may take longer than a step."""
    assert diagnose([wait(0, 299), hear(1, phase, 299)], Limits()) is None
    assert diagnose([wait(0, 301), hear(1, phase, 301)], Limits()) is not None


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
    assert is_final(61, build_limits(60), is_busy=True), "the user has set it"


def test_where_the_time_went() -> None:
    spent = {"starting": 99.0, "loading": 1.0, "forward": 2.0, "backward": 4.0, "reducing": 2.0, "saving": 1.0}
    assert describe_spent(spent) == "compute 60 %, gradient reduction 20 %, snapshots 10 %, data 10 %"
    assert describe_spent({}) == ""
