"""The ranks that train together after some have died, and what they agree on (docs/dev/healing.md).

The launcher names the survivors of a death, in a generation. The survivors leave their process group, join a new one,
and compare how far they are.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from samestep.errors import LeftOver, NotHealed, PeerFailed
from samestep.processes import Held, hold
from samestep.world.signed import SignedEntries

STUCK = "heal/stuck"  # the entry that has ranks, as numbered at the start, which their launcher must end, and why
GENERATION_S = 15.0  # for the launcher to notice a death, and for the survivors to connect
POLL_S = 0.001
NOTICE_S = 0.5  # for a rank to notice a death itself, before its connections are broken

# Ranks that have died while this process continued. Later runs of the process lack them, too.
_gone: list[int] = []


def name_generation(number: int) -> str:
    """Return the entry with the members of a generation, from 1: ranks, as numbered at the start, in their order."""
    return f"heal/{number}"


def arrange(living: Sequence[int], ranks_per_replica: int) -> list[int]:
    """Return the ranks that continue, replica by replica, in their new order. They are numbered as at the start.

    Ranks at the same position in their replicas hold the same. So those of incomplete replicas can form a new one, and
    some may be left over. The lowest number at the first position that continues is rank 0: none becomes it while the
    one before lives.

    Returns:
        [] if no rank at some position lives.

    Example::

        >>> arrange([0, 2, 3, 4, 5], 2), arrange([0, 3], 2), arrange([0, 2], 2)
        ([2, 3, 4, 5], [0, 3], [])
    """
    num_left = Counter(member // ranks_per_replica for member in living)
    fullest_first = sorted(living, key=lambda member: (-num_left[member // ranks_per_replica], member))
    at_positions = [
        [member for member in fullest_first if member % ranks_per_replica == position]
        for position in range(ranks_per_replica)
    ]
    return [*chain.from_iterable(sorted(zip(*at_positions, strict=False)))]


def have_come(store: Any, number: int, members: Sequence[int]) -> bool:
    """Return whether ranks, as numbered at the start, have moved to a generation: to 0, when they can be healed."""
    return bool(store.check([_name_arrival(number, member) for member in members]))


def _name_arrival(number: int, member: int) -> str:
    return f"samestep/{name_generation(number)}/{member}"


def is_settled(position: int, positions: Sequence[int]) -> bool:
    """Return whether the collective that a death has interrupted counts. If not, this rank repeats it.

    A rank continues after a collective only when it knows that the collective is complete on all ranks. So the
    positions of two ranks differ by at most one, and the result that a rank ahead has used is complete on those behind.

    Args:
        position: the number of collectives that this rank knows to be complete on all ranks.
        positions: those of all survivors.

    Example::

        >>> is_settled(3, [3, 4, 3]), is_settled(4, [3, 4, 3]), is_settled(3, [3, 3, 3])
        (True, False, False)
    """
    return position < max(positions)


def check_ranks_unchanged() -> None:
    """Check that no rank has died while this process continued: a run begins with the launcher's ranks.

    Raises:
        NotHealed: one has. With --max-restarts, all ranks start again.
    """
    if _gone:
        raise NotHealed(f"a further samestep.Run begins without rank {_gone[0]}, which has ended")


@dataclass(frozen=True)
class Change:
    """A change of the members.

    Attributes:
        before, left: the ranks before and after it, in their order, as numbered at the start.
        began_s: `time.monotonic()` when this rank noticed it.
    """

    before: Sequence[int]
    left: Sequence[int]
    began_s: float

    @property
    def lost(self) -> list[int]:
        """The ranks that have died or are left over, as numbered at the start."""
        return [rank for rank in self.before if rank not in self.left]

    @property
    def has_lost_first(self) -> bool:
        """Whether another rank is rank 0 now."""
        return self.before[0] != self.left[0]


class Membership:
    """The members of this rank's group, and its position.

    Args:
        store: the launcher's store.
        secret: the ranks' secret.
        rank: this rank, as numbered at the start.
        world_size: the number of ranks at the start.
        ranks_per_replica: see `Transport.divide`.

    Attributes:
        own: this rank, as numbered at the start.
        members: the ranks of the current generation, in their order, as numbered at the start.
        generation: number of the current generation.
        position: the number of collectives that this rank knows to be complete on all ranks.
    """

    def __init__(self, store: Any, secret: str, rank: int, world_size: int, ranks_per_replica: int) -> None:
        self.members: Sequence[int] = range(world_size)
        self._ranks_per_replica = ranks_per_replica
        self.generation = 0
        self.position = 0
        self._named: Sequence[int] = self.members  # by the launcher for the newest generation
        self._is_connected = True
        self._is_broken = False
        self._connection = threading.Lock()  # locked while the process group is being left or broken
        self._store = store
        self._secret = secret
        self.own = rank

    @property
    def rank(self) -> int:
        """This rank's number in the current generation."""
        return self.members.index(self.own)

    def _read_newest(self, store: Any) -> tuple[int, Sequence[int]]:
        """Return the number of the newest generation, and the ranks that the launcher has named for it."""
        entries = SignedEntries(self._secret.encode(), store)
        newest, named = self.generation, self._named
        while (living := entries.get(name_generation(newest + 1), list[int])) is not None:
            newest, named = newest + 1, living
        return newest, named

    def complete(self) -> None:
        """Note that a collective is complete on all ranks."""
        self.position += 1

    def announce(self) -> None:
        """Announce that this rank has moved to its generation; to 0, when it can continue after another one's death."""
        self._store.set(_name_arrival(self.generation, self.own), b"")

    def leave(self, close: Callable[[], None]) -> None:
        """Leave the process group by calling `close`."""
        with self._connection:
            self._is_connected = False
            self._is_broken = False
            close()

    def break_late(self, store: Any, seen: int, break_connections: Callable[[], None]) -> int:
        """Break the connections if this rank is still in an older generation than the launcher had named at the last
        call. In any thread.

        Args:
            store: the launcher's store, in a connection of the calling thread.
            seen: the result of the last call.

        Returns:
            The number of the newest generation.
        """
        own = self.generation
        newest, self._named = self._read_newest(store)
        with self._connection:
            if self._is_connected and self.generation == own < seen:
                self._is_broken = True  # before the waits end
                break_connections()
        return newest

    def check_connected(self) -> None:
        """Check that `break_late` has not broken the connections of this generation.

        Raises:
            PeerFailed: it has.
        """
        if self._is_broken:
            raise PeerFailed("another rank has died")

    def is_lost(self, member: int) -> bool:
        """Return whether `member`, as numbered at the start, has died."""
        return member not in self._named

    def open_store(self) -> Any:  # PrefixStore
        """Return the store of the current generation's process group, which this rank now joins."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._is_connected = True
        return PrefixStore(f"samestep/{name_generation(self.generation)}/group", self._store)

    def advance(self, reason: str) -> None:
        """Move to the newest generation, and wait until all ranks that live have done so.

        This wait has no limit of its own: a rank may have a long step to complete. If it dies, is ended because it is
        stuck, or is left over, the launcher names a further generation.

        Args:
            reason: the message of the error.

        Raises:
            PeerFailed: the launcher ends the run, or names no further generation in time.
            NotHealed: no replica can be formed.
            LeftOver: the others continue without this rank.
        """
        began_s = time.monotonic()
        has_moved = False
        while True:
            newest, living = self._read_newest(self._store)
            if newest > self.generation:
                if self.own not in living:
                    raise PeerFailed(reason)
                self._move(newest, living)
                has_moved = True
                continue
            if has_moved and have_come(self._store, newest, living if self.own in self.members else self.members):
                break
            waited_s = time.monotonic() - began_s
            if not has_moved and waited_s > GENERATION_S:
                raise PeerFailed(reason)
            time.sleep(max(POLL_S, waited_s / 100))  # a rank that computes meanwhile may share the processor
        if self.own not in self.members:  # and those that are have come, so that it will not be one
            raise LeftOver(f"rank {self.own} ends, because its pipeline has lost a rank")

    def _move(self, generation: int, living: Sequence[int]) -> None:
        """Move to a generation. `living`: the ranks that the launcher has named.

        Raises:
            NotHealed: no replica can be formed.
        """
        members = arrange(living, self._ranks_per_replica)
        _gone.extend(rank for rank in self.members if rank not in members)
        if not members:
            raise NotHealed("all ranks that held some of the stages have died")
        self.generation = generation
        self.members = members
        self._named = living
        if self.own in members:
            self.announce()

    def check_newest(self) -> None:
        """Check that no member of the current generation has died.

        Raises:
            PeerFailed: the launcher has named a later generation.
        """
        newest, _ = self._read_newest(self._store)
        if newest > self.generation:
            raise PeerFailed("a further rank has died")


class LossWatch(threading.Thread, Held):
    """Ends this rank's wait for a dead rank whose connections stay open.

    They stay open if the dead rank's host has vanished from the network, or if a program that the dead rank has started
    has inherited gloo's connections.

    Args:
        open_store: opens a further connection to the launcher's store.
        break_connections: lets the process group's waits raise.
    """

    def __init__(
        self, membership: Membership, open_store: Callable[[], Any], break_connections: Callable[[], None]
    ) -> None:
        super().__init__(name="samestep membership", daemon=True)
        self._membership = membership
        self._open_store = open_store
        self._break_connections = break_connections
        self._is_closed = threading.Event()
        hold(self, alone=True)  # that of an earlier run must not break the connections of this one
        self.start()

    def run(self) -> None:
        seen = 0
        with suppress(RuntimeError):  # the store has closed: the launcher ends all ranks
            store = self._open_store()
            while not self._is_closed.wait(NOTICE_S):
                seen = self._membership.break_late(store, seen, self._break_connections)

    def close(self) -> None:
        """End the thread, unless it is blocked."""
        self._is_closed.set()
        self.join(NOTICE_S)
