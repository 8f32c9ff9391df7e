"""The processes of the ranks of one machine: which have failed."""

from typing import Any

import pytest

from samestep.launch import agent
from samestep.launch.local_ranks import Ranks
from samestep.launch.node_messages import Ended, Overdue, Signalled
from samestep.launch.target import Target
from samestep.world.environment import OPENING


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
    ranks.signal(15)
    assert ranks.poll(0.0) == [Ended(0, -15, 0.0)]
    assert ranks.are_done
    ranks.close()


def test_a_run_that_does_not_begin_its_first_step_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script has created a Run, and builds its data set, or ranks wait for each other: there is nothing to save."""
    monkeypatch.setattr(agent, "GRACE_S", 0.0)
    ranks = Ranks(Server())  # type: ignore[arg-type]
    received: list[int] = []
    own = agent.Agent(ranks, agent.Launch(Target("script", "x.py", []), 1, {}, received))
    opening = ranks.directory / OPENING
    opening.touch()
    assert own.poll() == []
    received.append(15)
    assert [type(event) for event in own.poll()] == [Signalled, Overdue]
    assert own.poll() == [], "once"
    ranks.close()
