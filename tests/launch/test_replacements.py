"""Which ranks are replaced, and when."""

from samestep.launch.failure import RankEnds, RankFailure
from samestep.launch.replacements import Replacements


def outlive(ends: RankEnds, rank: int) -> None:
    ends.add(rank, -9, RankFailure(rank, 0.0, -9, False, "died", "was killed by SIGKILL"))
    ends.outlive([rank])


def test_a_rank_is_replaced_at_once() -> None:
    ends = RankEnds()
    replacements = Replacements(ends, 3)
    assert replacements.take() == {}
    outlive(ends, 2)
    outlive(ends, 0)
    assert replacements.take() == {3: 2, 4: 0}
    assert replacements.take() == {}


def test_a_rank_that_has_replaced_another_is_replaced_after_a_snapshot() -> None:
    ends = RankEnds()
    replacements = Replacements(ends, 3)
    outlive(ends, 1)
    assert replacements.take() == {3: 1}
    outlive(ends, 3)
    assert replacements.take() == {}
    replacements.note_saved()
    assert replacements.take() == {4: 3}
    replacements.note_lost(4)  # before it joined the others
    assert replacements.take() == {}
    replacements.note_saved()
    assert replacements.take() == {5: 4}


def test_a_rank_whose_node_is_lost_is_not_replaced() -> None:
    ends = RankEnds()
    replacements = Replacements(ends, 3)
    outlive(ends, 1)
    outlive(ends, 2)
    assert replacements.take(lambda rank: rank == 2) == {3: 2}
    assert replacements.take_numbers(2) == [4, 5]
    assert replacements.take() == {}
