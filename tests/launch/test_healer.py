"""What the launcher names after a death, without ranks."""

import signal

import pytest

from samestep.launch import healer
from samestep.launch.failure import RankEnds, RankFailure
from samestep.launch.healer import Healer, LateEnds
from samestep.launch.local_ranks import open_store
from samestep.world import membership
from samestep.world.membership import READY, name_generation, read_generation

SIGNAL = [signal.SIGTERM]


def test_after_a_signal_nobody_waits_for_a_rank_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may save for as long as they like, but a rank that waits for it after a death ends."""
    store = open_store()
    ends = RankEnds()
    late = Healer(store, "secret", 3, ends)
    late.heal(SIGNAL)
    ends.add(1, 0)
    late.heal(SIGNAL)
    assert read_generation(store, "secret", 1) is None, "the others may end soon"
    monkeypatch.setattr(healer, "GENERATION_S", 0.0)
    late = Healer(store, "secret", 3, ends)
    for _ in range(3):
        late.heal(SIGNAL)
    assert read_generation(store, "secret", 1) == []
    assert read_generation(store, "secret", 2) is None, "once"


def test_after_a_signal_the_others_complete_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have outlived a rank do not wait for it, and a refusal would break their connections."""
    monkeypatch.setattr(healer, "GENERATION_S", 0.0)
    ends = RankEnds()
    late = LateEnds(ends)
    ends.add(2, -9, RankFailure(2, 0.0, -9, False, "died", "was killed"))
    ends.outlive([2])
    assert not late.are_due()
    ends.add(0, 0)
    assert [late.are_due(), late.are_due()] == [True, False]


def test_a_death_after_a_signal_is_no_end_that_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others continue without that rank, and a refusal would break their connections in a long step."""
    monkeypatch.setattr(healer, "GENERATION_S", 0.0)
    store = open_store()
    store.add(READY, 3)
    ends = RankEnds()
    healing = Healer(store, "secret", 3, ends)
    ends.add(2, -9, RankFailure(2, 0.0, -9, False, "died", "was killed"))
    for _ in range(3):
        healing.heal(SIGNAL)
    assert read_generation(store, "secret", 1) == [0, 1]
    assert read_generation(store, "secret", 2) is None


def test_a_rank_that_ends_after_a_healed_death_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the death, the others would fail, too. But ranks that wait for it after a death continue without it."""
    monkeypatch.setattr(membership, "_gone", [])  # of this process
    store = open_store()
    store.add(READY, 4)
    ends = RankEnds()
    healing = Healer(store, "secret", 4, ends)
    ends.add(3, -9, RankFailure(3, 0.0, -9, False, "died", "was killed"))
    healing.heal([])
    assert read_generation(store, "secret", 1) == [0, 1, 2]
    ends.add(2, 0)  # and has not come
    healing.heal([])
    assert read_generation(store, "secret", 2) == [0, 1]
    for rank in (0, 1):
        store.set(f"{name_generation(2)}/{rank}", b"")
    ends.add(1, 0)
    healing.heal([])
    assert read_generation(store, "secret", 3) is None


def test_the_last_rank_is_killed_before_it_continues(capfd: pytest.CaptureFixture[str]) -> None:
    """Its number is not the number of ranks, since others have died before."""
    store = open_store()
    store.add(READY, 3)
    ends = RankEnds()
    healing = Healer(store, "secret", 3, ends)
    for rank in (0, 2):
        ends.add(rank, -9, RankFailure(rank, 0.0, -9, False, "died", "was killed by SIGKILL"))
        healing.heal([])
    ends.add(1, -9, RankFailure(1, 0.0, -9, False, "died", "was killed by SIGKILL"))
    healing.heal([])
    sentence = "the other ranks do not continue, because none is left"
    healing.report(is_end=False)
    assert capfd.readouterr().err.endswith(f"{sentence}\n")
    healing.report(is_end=True)
    assert capfd.readouterr().err.endswith(f"{sentence}: the same command resumes from the newest snapshot\n")
    healing.report(is_end=True, could_restart=True)
    assert capfd.readouterr().err.endswith(f"{sentence}: --max-restarts N starts again from the newest snapshot\n")
