"""Announces the call of a rank to ranks that wait in another exchange. Otherwise, neither exchange would end."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist

from samestep.waiting import wait_until
from samestep.world.group import POLL_S, Group
from samestep.world.group_opening import PATIENCE_S
from samestep.world.rendezvous_store import SignedEntries


class _Announcements:
    """The announcements of one process group. The key of its first run separates them from other starts."""

    def __init__(self, entries: SignedEntries, num_calls: int = 0) -> None:
        self._process_group = weakref.ref(dist.group.WORLD)
        self.entries = entries
        self.num_calls = num_calls  # the same on all ranks

    def is_valid(self) -> bool:
        """Return whether the process group exists, and the script has not replaced it."""
        process_group = self._process_group()
        return process_group is not None and process_group is dist.group.WORLD


_current: list[_Announcements] = []  # at most one


def open_announcements(group: Group) -> None:
    """Begin to announce calls, with the first group of this process group. Call on all ranks."""
    if _current and _current[0].is_valid():
        return
    if (entries := group.open_entries()) is not None:
        _current[:] = [_Announcements(entries)]


def move_announcements(group: Group) -> None:
    """Continue in the group's new process group. With one rank there is none, and the count is kept for later ones."""
    if _current and (entries := group.open_entries()) is not None:
        _current[:] = [_Announcements(entries, _current[0].num_calls)]


def announce(rank: int, call: int, others: Sequence[int]) -> list[tuple[int, int]]:
    """Announce this rank's next call. If two ranks announce calls at the same time, at least one finds the other's.

    Args:
        call: a number that stands for the call.
        others: as for `find_announced`, like the result. The look-up takes a round trip to the store.
    """
    if not (_current and _current[0].is_valid()):
        return []
    _current[0].num_calls += 1
    with suppress(RuntimeError):  # the store has closed
        _current[0].entries.put(f"call/{call}", f"{_current[0].num_calls} {rank}")
    return find_announced(others)


def find_announced(others: Sequence[int]) -> list[tuple[int, int]]:
    """Return (rank, call) of ranks that have announced one of `others` as the call that this rank makes now."""
    if not (_current and _current[0].is_valid()):
        return []
    entries = _current[0].entries
    number = _current[0].num_calls
    found = list[tuple[int, int]]()
    with suppress(RuntimeError):
        for other in others:
            for text in entries.read([f"call/{other}"]) or ():  # also waits until the own entry is in the store
                its_number, its_rank = map(int, text.split())
                if its_number == number:
                    found.append((its_rank, other))
    return found


def wait_for_all(rank: int, num_ranks: int, check: Callable[[], None]) -> None:
    """Wait until all ranks have called this after the same call, at most PATIENCE_S.

    Args:
        check: called again and again meanwhile; may raise.
    """
    if not (_current and _current[0].is_valid()):
        return
    entries = _current[0].entries
    number = _current[0].num_calls
    with suppress(RuntimeError):
        entries.put(f"waits/{rank}", str(number))

    def have_come() -> bool:
        check()
        with suppress(RuntimeError):
            numbers = entries.read([f"waits/{each}" for each in range(num_ranks)])
            return numbers is not None and min(map(int, numbers)) >= number
        return True  # the store has closed: the next exchange fails

    wait_until(have_come, PATIENCE_S, every_s=POLL_S)
