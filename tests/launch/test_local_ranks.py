"""The ranks of one machine: which are ended, and which of several failures is reported."""

from typing import Any

import pytest

from samestep.launch.failure import SOON_S, RankFailure
from samestep.launch.local_ranks import Ranks
from samestep.launch.target import Target


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


class Server:
    """A fork server that starts nothing, and reports `events`."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def start(self, ranks: list[dict[str, Any]], **common: Any) -> None:
        pass

    def signal(self, signum: int) -> None:
        self.events.append({"rank": 0, "code": -signum, "time_s": 0.0, "signals": [signum]})

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        return self.events.pop(0) if self.events else None


def test_a_rank_that_obeys_has_not_failed() -> None:
    """Also if the clock was set back meanwhile."""
    ranks = Ranks(Server())  # type: ignore[arg-type]
    ranks.start(Target("script", "x.py", []), [{"RANK": "0", "WORLD_SIZE": "1"}])
    ranks.request_stop()
    ranks.poll(0.0)
    assert ranks.done
    assert not ranks.ends.failures
    ranks.close()
