"""The ranks that train together after some have died, and what they agree on (docs/dev/healing.md).

The launcher names the survivors of a death, in a generation. The survivors leave their process group, join a new one,
and compare how far they are.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from samestep.errors import NotHealed, PeerFailed
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
        raise NotHealed(f"a further samestep.Run begins without rank {_gone[0]}, which has died")


@dataclass(frozen=True)
class Change:
    """A change of the members.

    Attributes:
        lost, left: the ranks that have died, and the others, as numbered at the start.
        began_s: `time.monotonic()` when this rank noticed it.
    """

    lost: Sequence[int]
    left: Sequence[int]
    began_s: float

    @property
    def has_lost_first(self) -> bool:
        """Whether the rank that was rank 0 has died."""
        return min(self.lost) < min(self.left)


class Membership:
    """The members of this rank's group, and its position.

    Args:
        store: the launcher's store.
        secret: the ranks' secret.
        rank: this rank, as numbered at the start.
        members: as below.

    Attributes:
        own: this rank, as numbered at the start.
        members: the ranks of the current generation, as numbered at the start.
        generation: number of the current generation.
        position: the number of collectives that this rank knows to be complete on all ranks.
    """

    def __init__(self, store: Any, secret: str, rank: int, members: Sequence[int]) -> None:
        self.members = members
        self.generation = 0
        self.position = 0
        self._named: Sequence[int] = self.members  # of the newest generation that `break_late` has found
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

    def _read_generation(self, store: Any, number: int) -> list[int] | None:
        return SignedEntries(self._secret.encode(), store).get(name_generation(number), list[int])

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
        own = newest = self.generation
        while (members := self._read_generation(store, newest + 1)) is not None:
            newest += 1
            self._named = members
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
        """Return whether `member`, as numbered at the start, is missing from the current or the newest generation."""
        return member not in self.members or member not in self._named

    def open_store(self) -> Any:  # PrefixStore
        """Return the store of the current generation's process group, which this rank now joins."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._is_connected = True
        return PrefixStore(f"samestep/{name_generation(self.generation)}/group", self._store)

    def advance(self, reason: str) -> None:
        """Move to the newest generation, and wait until all of its members have done so.

        This wait has no limit of its own: a member may have a long step to complete. If it dies, or is ended because
        it is stuck, the launcher names a further generation.

        Args:
            reason: the message of the error.

        Raises:
            PeerFailed: the launcher ends the run, or names no further generation in time.
        """
        began_s = time.monotonic()
        has_moved = False
        while True:
            if (members := self._read_generation(self._store, self.generation + 1)) is not None:
                if self.own not in members:
                    raise PeerFailed(reason)
                _gone.extend(rank for rank in self.members if rank not in members)
                self.generation += 1
                self.members = self._named = members
                has_moved = True
                self.announce()
                continue
            if has_moved and have_come(self._store, self.generation, self.members):
                return
            waited_s = time.monotonic() - began_s
            if not has_moved and waited_s > GENERATION_S:
                raise PeerFailed(reason)
            time.sleep(max(POLL_S, waited_s / 100))  # a rank that computes meanwhile may share the processor

    def check_newest(self) -> None:
        """Check that no member of the current generation has died.

        Raises:
            PeerFailed: the launcher has named a later generation.
        """
        if self._read_generation(self._store, self.generation + 1) is not None:
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
