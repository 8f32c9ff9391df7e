"""Names the ranks that continue after the death of others, for `samestep launch --heal` (docs/decisions/healing.md)."""

from typing import Any

from samestep.console import say
from samestep.launch.local_ranks import Ranks
from samestep.world.membership import READY, write_generation


class Healer:
    """Names the ranks that continue after the death of others. Each such list is a generation.

    Args:
        store: the store of the ranks.
        secret: the ranks' secret.
        num_ranks: number of ranks at the start.
    """

    def __init__(self, store: Any, secret: str, num_ranks: int) -> None:  # TCPStore
        self._store = store
        self._secret = secret
        self._num_ranks = num_ranks
        self._members = [*range(num_ranks)]
        self._number = 0

    def heal(self, ranks: Ranks) -> None:
        """After a death, let the other ranks continue if they can. If not, the failures remain those of the launch."""
        left = [rank for rank in self._members if rank not in ranks.codes]
        has_died = ranks.failures or ranks.outlived  # until then, a rank that ends lets the others fail: they wait
        if not has_died or not left or left == self._members or not self._can_continue(ranks):
            return
        self._members = left
        self._write(left)
        for failure in ranks.outlive():
            if failure.kind == "died":  # another rank has reported one that was stuck
                say(failure.reason)

    def refuse(self) -> None:
        """End the waiting of ranks that have lost another one."""
        self._write([])

    def _can_continue(self, ranks: Ranks) -> bool:
        # An exception would occur again, in the rank that gets these micro-batches.
        have_died = all(failure.kind in ("died", "stuck") for failure in ranks.failures)
        return have_died and int(self._store.add(READY, 0)) >= self._num_ranks

    def _write(self, members: list[int]) -> None:
        self._number += 1
        write_generation(self._store, self._secret, self._number, members)
