"""What the ranks agree on after a death: a search of every state of the protocol, and the launcher's entries."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from samestep.errors import PeerFailed
from samestep.world import membership
from samestep.world.membership import (
    Membership,
    name_generation,
)
from samestep.world.rendezvous_store import SignedEntries

IS_CONFIRMED = True  # a rank continues when it knows that all have the result

# What a rank does: it takes part in a collective, in its confirmation, or in the comparison of positions; or it has
# left its group, waits for the other members of a later one, has done all collectives, or is dead.
COLLECTIVE, CONFIRMATION, COMPARISON = "collective", "confirmation", "comparison"
LEFT, WAITS, DONE, DEAD = "left", "waits", "done", "dead"

NUM_COLLECTIVES = 2


class Rank(NamedTuple):
    """A rank, which sends a message to all other members at the beginning of what it does, and receives one of each.

    Attributes:
        has_result: of the collective or confirmation.
        num_received: in its generation, of each of them.
    """

    doing: str = COLLECTIVE
    position: int = 0
    has_result: bool = False
    generation: int = 0
    num_received: int = 0


class Message(NamedTuple):
    doing: str
    position: int


class State(NamedTuple):
    """All ranks, what they have sent, and what the launcher knows.

    A message to all other members is one action. A rank that dies before it has sent to some of them is covered:
    whoever waits for a rank that has left may fail, although the message is there.

    Attributes:
        sent: the messages of each rank in each generation that has a member who may read them.
        named: the members of each generation from 1 on.
        ended: the ranks whose end the launcher has noticed. Each makes a new generation.
    """

    ranks: tuple[Rank, ...]
    sent: tuple[tuple[tuple[int, int], tuple[Message, ...]], ...] = ()
    named: tuple[tuple[int, ...], ...] = ()
    ended: frozenset[int] = frozenset()

    def get_members(self, generation: int) -> tuple[int, ...]:
        return self.named[generation - 1] if generation else tuple(range(len(self.ranks)))

    def name(self, members: Sequence[int]) -> "State":
        return self._replace(named=(*self.named, tuple(members)))


class Disagreement(AssertionError):
    pass


def send(state: State, r: int, rank: Rank) -> State:
    """Let rank r begin what it does as `rank`."""
    ranks = (*state.ranks[:r], rank, *state.ranks[r + 1 :])
    sent = dict(state.sent)
    if rank.doing in (COLLECTIVE, CONFIRMATION, COMPARISON):
        message = Message(rank.doing, rank.position)
        sent[rank.generation, r] = (*sent.get((rank.generation, r), ()), message)
    busy = [each.generation for each in ranks if each.doing not in (LEFT, DONE, DEAD)]
    kept = {key: messages for key, messages in sent.items() if key[0] >= min(busy, default=100)}
    return state._replace(ranks=ranks, sent=tuple(sorted(kept.items())))


def find_next(state: State, max_deaths: int) -> Iterator[State]:
    """Every state that one action of one rank, of the launcher or of fate leads to."""
    members = state.get_members(len(state.named))
    num_dead = sum(each.doing == DEAD for each in state.ranks)
    for r, rank in enumerate(state.ranks):
        if rank.doing in (DEAD, DONE):
            # `Healer.heal`: the end of a rank that is done matters only after a death.
            if r in members and r not in state.ended and (rank.doing == DEAD or state.ended):
                ended = state._replace(ended=state.ended | {r})
                yield ended.name([member for member in members if member != r])
            continue
        if num_dead < max_deaths:
            yield send(state, r, rank._replace(doing=DEAD))
        if rank.doing in (LEFT, WAITS):
            yield from wait(state, r)
        else:
            yield from take_part(state, r)


def wait(state: State, r: int) -> Iterator[State]:
    """`Membership.advance`: go to a newer generation, or join the present one if all have come to it."""
    rank = state.ranks[r]
    if rank.generation < len(state.named):
        yield send(state, r, rank._replace(doing=WAITS, generation=rank.generation + 1, num_received=0))
    elif rank.doing == WAITS:
        members = state.get_members(rank.generation)
        if all(state.ranks[member].generation == rank.generation for member in members):
            yield send(state, r, rank._replace(doing=COMPARISON))


def take_part(state: State, r: int) -> Iterator[State]:
    rank = state.ranks[r]
    members = state.get_members(rank.generation)
    others = [other for other in members if other != r]
    sent = dict(state.sent)
    boxes = [sent.get((rank.generation, other), ())[rank.num_received :] for other in others]
    if all(boxes):
        received = rank._replace(num_received=rank.num_received + 1)
        yield complete(state, r, received, [box[0] for box in boxes])
    if any(has_left(state, state.ranks[other], rank.generation) for other in others):
        yield send(state, r, rank._replace(doing=LEFT))


def has_left(state: State, other: Rank, generation: int) -> bool:
    if other.doing == DONE and not state.ended:
        return False  # its messages are there
    return other.doing in (DEAD, DONE, LEFT) or other.generation != generation


def complete(state: State, r: int, rank: Rank, received: Sequence[Message]) -> State:
    """`Group.complete`, `settle` and `heal`, once rank r has received all messages, as `rank`."""
    if {message.doing for message in received} - {rank.doing}:
        raise Disagreement("ranks have exchanged messages of different kinds")
    if rank.doing == COMPARISON:
        positions = [rank.position, *(message.position for message in received)]
        counts = membership.is_settled(rank.position, positions)
        if counts and not rank.has_result:
            raise Disagreement("a rank continues after a collective whose result it does not have")
        return apply(state, r, rank) if counts else begin(state, r, rank._replace(has_result=False))
    if {message.position for message in received} - {rank.position}:
        raise Disagreement("ranks have exchanged messages of different collectives")
    if rank.doing == COLLECTIVE:
        rank = rank._replace(has_result=True)
        if IS_CONFIRMED:
            return send(state, r, rank._replace(doing=CONFIRMATION))
    return apply(state, r, rank)


def apply(state: State, r: int, rank: Rank) -> State:
    """Continue after a collective that counts."""
    return begin(state, r, rank._replace(position=rank.position + 1, has_result=False))


def begin(state: State, r: int, rank: Rank) -> State:
    """Begin the collective at the rank's position."""
    return send(state, r, rank._replace(doing=DONE if rank.position == NUM_COLLECTIVES else COLLECTIVE))


def search(num_ranks: int, max_deaths: int) -> int:
    """Visit every state that can occur. Returns their number.

    Raises:
        Disagreement: two ranks disagree in one of them.
        AssertionError: nothing can happen in one, and a rank that lives is not done.
    """
    state = State((Rank(),) * num_ranks)
    for r in range(num_ranks):
        state = send(state, r, state.ranks[r])
    seen, frontier = {state}, [state]
    while frontier:
        state = frontier.pop()
        following = [*find_next(state, max_deaths)]
        assert following or all(rank.doing in (DONE, DEAD) for rank in state.ranks), f"waits for ever: {state}"
        frontier += [each for each in following if each not in seen]
        seen.update(following)
    return len(seen)


def test_no_state_has_ranks_that_disagree_or_wait_for_ever() -> None:
    """Deaths of up to two of three ranks, at every message of two collectives, and in every order of all actions."""
    assert search(3, 2) > 9_000


@pytest.mark.soak  # 30 s
def test_the_same_with_a_further_rank() -> None:
    assert search(4, 2) > 150_000


RULES: dict[str, Callable[[int, Sequence[int]], bool]] = {
    "always": lambda position, positions: True,
    "never": lambda position, positions: False,
    "unless it is ahead": lambda position, positions: position == min(positions),
}


@pytest.mark.parametrize("rule", [*RULES])
def test_the_search_finds_a_wrong_rule(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    monkeypatch.setattr(membership, "is_settled", RULES[rule])
    with pytest.raises(Disagreement):
        search(3, 2)


def test_the_search_finds_that_a_confirmation_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "IS_CONFIRMED", False)
    with pytest.raises(Disagreement):
        search(3, 2)


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


def test_a_rank_goes_to_the_newest_generation(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    """Although all members of an earlier one have come: one of them has died since."""
    monkeypatch.setattr(membership, "_gone", [])  # this process has lost no rank
    survivor = Membership(store, "secret", rank=0, members=range(3))
    name(store, 1, [0, 1])
    store.set(f"samestep/{name_generation(1)}/1", b"")
    name(store, 2, [0])
    survivor.advance("a rank is gone")
    assert (survivor.members, survivor.generation) == ([0], 2)


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
