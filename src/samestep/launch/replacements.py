"""Starts ranks in the place of those that have died, for `samestep launch --heal --replace`."""

from collections.abc import Callable, Mapping, Sequence

from samestep.console import say
from samestep.launch.failure import RankEnds, RankFailure
from samestep.launch.healer import Healer

MAX_FAILED = 3  # new ranks whose script may fail; a further one would probably fail, too


class Replacements:
    """Decides which ranks are replaced, and when.

    A rank that died is replaced at once. One that had replaced another may have died for the same reason, so it is
    replaced after the next snapshot. None is replaced after the script has failed in `MAX_FAILED` new ranks.

    Args:
        healer: lets the new ranks join the others.
        ends: how the ranks have ended so far.
        num_ranks: number of ranks at the start. Further ones have the next numbers.
    """

    def __init__(self, healer: Healer, ends: RankEnds, num_ranks: int) -> None:
        self._healer = healer
        self._ends = ends
        self._num_ranks = num_ranks
        self._next = num_ranks
        self._num_seen = 0  # of the outlived failures
        self._due: list[int] = []
        self._later: list[int] = []
        self._num_failed = 0  # new ranks whose script has failed

    def note_saved(self) -> None:
        """Note that a snapshot was completed after the last death."""
        self._due += self._later
        self._later = []

    def forget(self, failure: RankFailure, received: Sequence[int]) -> bool:
        """As `Healer.forget`. A rank that had not joined is replaced after the next snapshot."""
        had_not_joined = self._healer.forget(failure, received)
        if had_not_joined:
            self._delay(failure)
        return had_not_joined

    def take(self, is_here: Callable[[int], bool] = lambda _: True) -> Mapping[int, int]:
        """Return the ranks that must be started now, and the one that each of them replaces.

        Args:
            is_here: whether the node of a rank is still there. If not, the rank is not replaced.
        """
        outlived = self._ends.outlived
        for failure in outlived[self._num_seen :]:
            if failure.rank < self._num_ranks:
                self._due.append(failure.rank)
            else:
                self._delay(failure)
        self._num_seen = len(outlived)
        if not self._due or self._num_failed >= MAX_FAILED or not self._healer.can_join:
            return {}
        due = [rank for rank in self._due if is_here(rank)]
        self._due = []
        return dict(zip(self.add(len(due)), due, strict=True))

    def add(self, count: int) -> Sequence[int]:
        """Return numbers for ranks that must be started now and join the others. No rank has had them."""
        numbers = range(self._next, self._next + count)
        self._next += count
        self._healer.expect(numbers)
        return numbers

    def _delay(self, failure: RankFailure) -> None:
        """Replace a new rank after the next snapshot."""
        self._later.append(failure.rank)
        if not (failure.is_death or failure.secondary):
            self._num_failed += 1
            if self._num_failed == MAX_FAILED:
                say(f"{MAX_FAILED} new ranks have failed: ranks that have died are not replaced any more")
