"""Starts ranks in the place of those that have died, for `samestep launch --heal --replace`."""

from collections.abc import Callable, Mapping

from samestep.launch.failure import RankEnds


class Replacements:
    """Decides which ranks are replaced, and when.

    A rank that died is replaced at once. One that had replaced another may have died for the same reason, so it is
    replaced after the next snapshot.

    Args:
        ends: how the ranks have ended so far.
        num_ranks: number of ranks at the start. Further ones have the next numbers.
    """

    def __init__(self, ends: RankEnds, num_ranks: int) -> None:
        self._ends = ends
        self._num_ranks = num_ranks
        self._next = num_ranks
        self._num_seen = 0  # of the outlived failures
        self._due: list[int] = []
        self._later: list[int] = []

    def note_saved(self) -> None:
        """Note that a snapshot was completed after the last death."""
        self._due += self._later
        self._later = []

    def note_lost(self, rank: int) -> None:
        """Note that a rank has ended which was to join the others, and had not."""
        self._later.append(rank)

    @property
    def are_due(self) -> bool:
        """Whether `take` has ranks to return, if their nodes are there."""
        outlived = self._ends.outlived
        for failure in outlived[self._num_seen :]:
            (self._due if failure.rank < self._num_ranks else self._later).append(failure.rank)
        self._num_seen = len(outlived)
        return bool(self._due)

    def take(self, is_here: Callable[[int], bool] = lambda _: True) -> Mapping[int, int]:
        """Return the ranks to start now, and the one that each of them replaces.

        Args:
            is_here: whether the node of a rank is still there. If not, the rank is not replaced.
        """
        due = [rank for rank in self._due if is_here(rank)] if self.are_due else []
        self._due = []
        return dict(zip(self.take_numbers(len(due)), due, strict=True))

    def take_numbers(self, count: int) -> list[int]:
        """Return numbers for ranks that join the others, which no rank has had."""
        self._next += count
        return [*range(self._next - count, self._next)]
