"""What the ranks agree on after a death, through the launcher's entries. `make sim` tries the protocol."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from samestep.errors import PeerFailed
from samestep.world import membership
from samestep.world.membership import (
    Membership,
    name_generation,
)
from samestep.world.signed import SignedEntries


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]


def name(store: Any, number: int, members: Sequence[int]) -> None:
    SignedEntries(b"secret", store).put(name_generation(number), members)


def test_only_the_launcher_names_a_generation(store: Any) -> None:
    first, second = name_generation(1), name_generation(2)
    entries = SignedEntries(b"secret", store)
    assert entries.get(first, list[int]) is None
    name(store, 1, [0, 2])
    assert entries.get(first, list[int]) == [0, 2]
    assert SignedEntries(b"another", store).get(first, list[int]) is None
    for forged in (store.get(f"samestep/{first}"), b""):  # the former was seen before
        store.set(f"samestep/{second}", forged)
        assert entries.get(second, list[int]) is None


def test_a_wait_that_was_ended_does_not_count(store: Any) -> None:
    """NCCL's collectives return without an error when the connections are broken, with a wrong result."""
    survivor = Membership(store, "secret", 0, 3, 1)
    is_noticed = []

    def end_wait() -> None:
        with pytest.raises(PeerFailed, match="another rank has died"):
            survivor.check_connected()
        is_noticed.append(True)

    name(store, 1, [0, 2])
    seen = survivor.break_late(store, 0, end_wait)
    survivor.check_connected()  # it may still notice the death itself
    assert survivor.break_late(store, seen, end_wait) == 1
    assert is_noticed == [True]
    survivor.leave(lambda: None)
    survivor.check_connected()
    survivor.break_late(store, seen, end_wait)
    assert is_noticed == [True]


def test_a_survivor_may_come_late(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    """It comes when the other one has looked for it three times. The limit is for the launcher."""
    missing: list[Sequence[str]] = []

    def check(keys: Sequence[str]) -> bool:
        is_there = bool(store.check(keys))
        if not is_there and f"samestep/{name_generation(1)}/2" in keys:
            missing.append(keys)
            if len(missing) == 3:
                late.advance("a rank is gone")
        return is_there

    monkeypatch.setattr(membership, "GENERATION_S", 0.0)
    monkeypatch.setattr(membership, "_gone", [])  # this process has lost no rank
    late = Membership(store, "secret", 2, 3, 1)
    watched = Mock(wraps=store, **{"check.side_effect": check})
    survivor = Membership(watched, "secret", 0, 3, 1)
    with pytest.raises(PeerFailed, match="a rank is gone"):
        survivor.advance("a rank is gone")
    name(store, 1, [0, 2])
    survivor.advance("a rank is gone")
    assert len(missing) == 3
    assert (survivor.members, survivor.generation) == (late.members, late.generation) == ([0, 2], 1)
    name(store, 2, [])
    with pytest.raises(PeerFailed, match="a rank is gone"):
        survivor.advance("a rank is gone")
