"""Which ranks are replaced, and when."""

import pytest

from samestep.launch.failure import RankEnds, RankFailure
from samestep.launch.healer import Healer
from samestep.launch.local_ranks import open_store
from samestep.launch.replacements import Replacements
from samestep.world.membership import READY


class Launched:
    """Three ranks that have begun their first loop, or not."""

    def __init__(self, *, are_ready: bool = True) -> None:
        self.store = open_store()
        self.store.add(READY, 3 if are_ready else 2)
        self.ends = RankEnds()
        self.healer = Healer(self.store, "secret", 3, self.ends)
        self.replacements = Replacements(self.healer, self.ends, 3)

    def outlive(self, rank: int) -> None:
        self.ends.add(rank, -9, build_failure(rank))
        self.ends.outlive([rank])


def build_failure(rank: int) -> RankFailure:
    return RankFailure(rank, 0.0, -9, False, "died", "was killed by SIGKILL")


def test_a_rank_is_replaced_at_once() -> None:
    launched = Launched()
    assert launched.replacements.take() == {}
    launched.outlive(2)
    launched.outlive(0)
    assert launched.replacements.take() == {3: 2, 4: 0}
    assert launched.healer.are_coming
    assert launched.replacements.take() == {}


def test_a_rank_that_has_replaced_another_is_replaced_after_a_snapshot(capsys: pytest.CaptureFixture[str]) -> None:
    launched = Launched()
    replacements = launched.replacements
    launched.outlive(1)
    assert replacements.take() == {3: 1}
    launched.outlive(3)
    assert replacements.take() == {}
    replacements.note_saved()
    assert replacements.take() == {4: 3}
    assert replacements.forget(build_failure(4), [])
    assert "before it joined the others" in capsys.readouterr().err
    assert replacements.take() == {}
    replacements.note_saved()
    assert replacements.take() == {5: 4}


def test_one_of_the_others_is_not_forgotten() -> None:
    launched = Launched()
    assert not launched.replacements.forget(build_failure(1), [])
    launched.replacements.note_saved()
    assert launched.replacements.take() == {}


def test_a_rank_is_replaced_when_it_can_join() -> None:
    launched = Launched(are_ready=False)
    launched.outlive(2)
    assert launched.replacements.take() == {}
    launched.store.add(READY, 1)
    assert launched.replacements.take() == {3: 2}


def test_a_rank_whose_node_is_lost_is_not_replaced() -> None:
    launched = Launched()
    launched.outlive(1)
    launched.outlive(2)
    assert launched.replacements.take(lambda rank: rank == 2) == {3: 2}
    assert [*launched.replacements.add(2)] == [4, 5]
    assert launched.replacements.take() == {}


def test_ranks_are_not_replaced_after_the_script_has_failed_in_three(capsys: pytest.CaptureFixture[str]) -> None:
    """Before they join, or after."""
    launched = Launched()
    replacements = launched.replacements
    launched.outlive(1)
    for number in (3, 4, 5):
        assert [*replacements.take()] == [number]
        failure = RankFailure(number, 0.0, 1, False, "exception", "ValueError: none")
        if number == 4:
            launched.ends.add(number, 1, failure)
            launched.ends.outlive([number])
        else:
            assert replacements.forget(failure, [])
        assert replacements.take() == {}
        replacements.note_saved()
    assert "3 new ranks have failed" in capsys.readouterr().err
    launched.outlive(2)
    assert replacements.take() == {}
