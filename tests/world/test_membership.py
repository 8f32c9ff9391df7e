"""What the ranks agree on after a death, through the launcher's entries. `make sim` tries the protocol."""

from collections.abc import Callable, Sequence
from typing import Any

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
    survivor = Membership(store, "secret", rank=0, members=range(3))
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


class LateStore:
    """A store to which `arrive` is called when a rank has looked for another one three times."""

    def __init__(self, store: Any, arrive: Callable[[], None]) -> None:
        self._store = store
        self._arrive = arrive
        self.num_missing = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: Sequence[str]) -> bool:
        is_there = bool(self._store.check(keys))
        if not is_there and f"samestep/{name_generation(1)}/2" in keys:
            self.num_missing += 1
            if self.num_missing == 3:
                self._arrive()
        return is_there


def test_a_survivor_may_come_late(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    """The limit is for the launcher."""
    monkeypatch.setattr(membership, "GENERATION_S", 0.0)
    monkeypatch.setattr(membership, "_gone", [])  # this process has lost no rank
    late = Membership(store, "secret", rank=2, members=range(3))
    watched = LateStore(store, lambda: late.advance("a rank is gone"))
    survivor = Membership(watched, "secret", rank=0, members=range(3))
    with pytest.raises(PeerFailed, match="a rank is gone"):
        survivor.advance("a rank is gone")
    name(store, 1, [0, 2])
    survivor.advance("a rank is gone")
    assert watched.num_missing == 3
    assert (survivor.members, survivor.generation) == (late.members, late.generation) == ([0, 2], 1)
    name(store, 2, [])
    with pytest.raises(PeerFailed, match="a rank is gone"):
        survivor.advance("a rank is gone")
