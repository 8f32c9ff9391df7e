"""What a launcher does about what it finds in one poll."""

from types import SimpleNamespace
from typing import Any

from samestep.launch import supervisor


def test_a_snapshot_found_together_with_a_death_replaces_no_rank() -> None:
    """It may be older than the death. The next one does."""
    requests: list[bool] = []
    ranks: Any = SimpleNamespace(
        poll=lambda: None,
        take_saved=lambda: True,
        request_replacement=lambda: requests.append(True),
        ends=SimpleNamespace(failures=[], outlived=[]),
        started=True,
        is_stopping=False,
    )
    launch: Any = SimpleNamespace(received=[], replaces=True)
    healer: Any = SimpleNamespace(heal=lambda: ranks.ends.outlived.append("a rank"))
    supervisor._poll(ranks, launch, healer)
    assert not requests
    supervisor._poll(ranks, launch, healer)
    assert requests == [True]
