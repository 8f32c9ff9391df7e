"""The ranks of one machine: which are ended, and which of several failures is reported."""

import subprocess
from typing import Any

import pytest

from samestep.launch.failure import SOON_S, RankFailure
from samestep.launch.local_ranks import Ranks
from samestep.launch.target import Target
from samestep.world.environment import JOIN


class Server:
    """A fork server that starts nothing, and reports `events`."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def start(self, ranks: list[dict[str, Any]], **common: Any) -> None: ...

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        return self.events.pop(0) if self.events else None


@pytest.fixture
def server() -> Server:
    return Server()


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


@pytest.mark.parametrize("leads_group", [True, False])  # the second: it was forked a moment ago
def test_a_rank_that_starts_after_it_was_dismissed_is_killed(server: Server, leads_group: bool) -> None:
    """Its launcher was still busy when the others ended."""
    ranks = Ranks(server)  # type: ignore[arg-type]
    process = subprocess.Popen(["sleep", "60"], start_new_session=leads_group)
    try:
        ranks.start(Target("script", "x.py", []), [{"RANK": "1", "WORLD_SIZE": "2", JOIN: "2"}])
        ranks.kill_joining()
        server.events.append({"started": {2: process.pid}})
        ranks.poll(0.0)
        assert process.wait(30) == -9
        server.events.append({"rank": 2, "code": -9, "time_s": 0.0})
        ranks.poll(0.0)
        assert ranks.done
    finally:
        process.kill()
        process.wait()
        ranks.close()
