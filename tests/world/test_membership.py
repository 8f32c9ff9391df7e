"""What the ranks agree on after a death, through the launcher's entries. `make sim` tries the protocol."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import LeftOver, NotHealed, PeerFailed
from samestep.world import membership
from samestep.world.membership import Membership, arrange, name_generation
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


@settings(max_examples=200)
@given(st.integers(1, 3), st.integers(1, 4), st.data())
def test_replicas_of_several_ranks(num_ranks: int, num_replicas: int, data: st.DataObject) -> None:
    """As many as can be formed. Those that are complete stay, and rank 0 does, if it continues."""
    members = [*range(num_ranks * num_replicas)]
    while members:
        living = {*members} - data.draw(st.sets(st.sampled_from(members), min_size=1, max_size=2))
        found = arrange(sorted(living), num_ranks)
        replicas = [found[first : first + num_ranks] for first in range(0, len(found), num_ranks)]
        at_positions = [{member for member in living if member % num_ranks == each} for each in range(num_ranks)]
        assert len(replicas) == min(map(len, at_positions))
        assert all({*at} <= living for at in zip(*replicas, strict=True))
        assert all([member % num_ranks for member in each] == [*range(num_ranks)] for each in replicas)
        wholes = ([*range(first, first + num_ranks)] for first in range(0, num_ranks * num_replicas, num_ranks))
        assert all(whole in replicas for whole in wholes if living.issuperset(whole))
        assert members[0] not in found[1:]
        members = found


def test_a_rank_whose_pipeline_has_lost_another_one(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    """It is left over when all that continue have come. Before, one of them may die, so that it is needed."""

    def come(number: int, member: int) -> None:
        store.set(f"samestep/{name_generation(number)}/{member}", b"")

    def advance(rank: Membership, *meanwhile: Callable[[], None]) -> None:
        happens = iter(meanwhile)
        time = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: next(happens)())
        monkeypatch.setattr(membership, "time", time)
        rank.advance("a rank is gone")
        assert not [*happens]

    monkeypatch.setattr(membership, "_gone", [])
    name(store, 1, [0, 2, 3])
    needed = Membership(store, "secret", 0, 4, 2)
    advance(needed, partial(come, 1, 2), partial(name, store, 2, [0, 3]), partial(come, 2, 3))
    assert (needed.members, needed.generation) == ([0, 3], 2)
    name(store, 3, [0, 2, 3])
    with pytest.raises(LeftOver):
        advance(Membership(store, "secret", 0, 4, 2), partial(come, 3, 2), partial(come, 3, 3))


def test_all_ranks_with_a_stage_have_died(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    monkeypatch.setattr(membership, "_gone", [])
    name(store, 1, [0, 2])
    with pytest.raises(NotHealed, match="all ranks that held some of the stages have died"):
        Membership(store, "secret", 0, 4, 2).advance("a rank is gone")
