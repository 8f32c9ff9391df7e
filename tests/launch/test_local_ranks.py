"""The ranks of one machine: which are ended, and which of several failures is reported."""

import pytest

from samestep.launch.failure import SOON_S, RankFailure
from samestep.launch.local_ranks import Ranks


def test_a_rank_that_the_others_have_outlived_is_not_blamed_for_a_later_death() -> None:
    ranks = Ranks(None)  # type: ignore[arg-type]
    for rank in (1, 3):
        ranks.ends.add(rank, -9, RankFailure(rank, float(rank), -9, False, "died", "was killed by SIGKILL"))
        if rank == 1:
            ranks.ends.outlive([1])
    ranks.ends.add(0, 1, RankFailure(0, 4.0, 1, True, "exception", "PeerFailed: another rank has died"))
    failure = ranks.first_failure()
    ranks.close()
    assert failure is not None
    assert failure.rank == 3


@pytest.mark.parametrize(("later_s", "blamed"), [(20.0, 1), (2 * SOON_S, 0)])
def test_a_death_is_blamed_if_the_others_fail_soon_after(later_s: float, blamed: int) -> None:
    ranks = Ranks(None)  # type: ignore[arg-type]
    ranks.ends.add(1, -9, RankFailure(1, 0.0, -9, False, "died", "was killed by SIGKILL"))
    ranks.ends.outlive([1])
    ranks.ends.add(0, 1, RankFailure(0, later_s, 1, True, "exception", "PeerFailed: another rank has died"))
    failure = ranks.first_failure()
    ranks.close()
    assert failure is not None
    assert failure.rank == blamed
