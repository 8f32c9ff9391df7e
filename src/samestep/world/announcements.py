"""Calls of ranks, announced to ranks that wait in another exchange: neither of the two exchanges would end."""

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist

from samestep.world.group import PATIENCE_S, POLL_S, Group
from samestep.world.rendezvous_store import SignedEntries


class _Announcements:
    """Those of one process group. Signed with the key of its first run, so that no earlier start's are read."""

    def __init__(self, entries: SignedEntries) -> None:
        self._process_group = weakref.ref(dist.group.WORLD)
        self.entries = entries
        self.num_calls = 0  # the same on all ranks

    def is_valid(self) -> bool:
        """Return whether the script has not replaced the process group."""
        return self._process_group() is dist.group.WORLD


_current: list[_Announcements] = []  # at most one


def open_announcements(group: Group) -> None:
    """Begin to announce calls, with the first group of this process group. Call on all ranks."""
    if not (_current and _current[0].is_valid()) and (entries := group.open_entries()) is not None:
        _current[:] = [_Announcements(entries)]


def announce(rank: int, call: int, others: Sequence[int]) -> list[tuple[int, int]]:
    """Announce this rank's next call. Of two ranks that announce different calls, at least one finds the other.

    Args:
        call: a number that stands for the call.
        others: the calls to look for.

    Returns:
        (rank, call) of ranks whose call of the same number is one of `others`.
    """
    if not (_current and _current[0].is_valid()):
        return []
    _current[0].num_calls += 1
    entries, number, found = _current[0].entries, _current[0].num_calls, list[tuple[int, int]]()
    with suppress(RuntimeError):  # the store has closed
        entries.put(f"call/{call}", f"{number} {rank}")
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
    entries, number, deadline_s = _current[0].entries, _current[0].num_calls, time.monotonic() + PATIENCE_S
    with suppress(RuntimeError):
        entries.put(f"waits/{rank}", str(number))
    while not _have_come(entries, num_ranks, number) and time.monotonic() < deadline_s:
        check()
        time.sleep(POLL_S)


def _have_come(entries: SignedEntries, num_ranks: int, number: int) -> bool:
    with suppress(RuntimeError):
        numbers = entries.read([f"waits/{rank}" for rank in range(num_ranks)])
        return numbers is not None and min(map(int, numbers)) >= number
    return True  # the store has closed: the next exchange fails
