"""Names the ranks that continue after the death of others, for `samestep launch --heal` (docs/dev/healing.md)."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from samestep.console import say
from samestep.errors import PeerFailed
from samestep.launch.failure import RankEnds
from samestep.world.membership import (
    GENERATION_S,
    READY,
    have_come,
    read_refusal,
    read_stuck,
    write_generation,
)


class LateEnds:
    """Decides when ranks must no longer wait for one that has exited after a signal to stop.

    Without a signal, it is not needed: the launcher then names a generation without the rank that has exited.

    Args:
        ends: how the ranks have ended so far.
    """

    def __init__(self, ends: RankEnds) -> None:
        self._ends = ends
        self._due_s = math.inf
        self._has_begun = False

    def are_due(self) -> bool:
        """Return True once, if a rank ended without a failure `GENERATION_S` ago. Call it repeatedly."""
        if not self._has_begun and not self._ends.have_all_failed:
            self._has_begun = True
            self._due_s = time.monotonic() + GENERATION_S
        if time.monotonic() < self._due_s:
            return False
        self._due_s = math.inf
        return True


class Healer:
    """Names the ranks that continue after the death of others. Each such list is a generation.

    Args:
        store: the store of the ranks.
        secret: the ranks' secret.
        num_ranks: number of ranks at the start.
        ends: how they have ended so far, on all machines.
        locate: returns a clause that names the node of a rank, for messages about its death.
    """

    def __init__(
        self,
        store: Any,  # TCPStore
        secret: str,
        num_ranks: int,
        ends: RankEnds,
        locate: Callable[[int], str] = lambda _: "",
    ) -> None:
        self._store = store
        self._secret = secret
        self._num_ranks = num_ranks
        self._ends = ends
        self._locate = locate
        self._members = [*range(num_ranks)]
        self._number = 0
        self._late = LateEnds(ends)

    @property
    def are_ready(self) -> bool:
        """Whether all ranks have begun their first loop, so that others can continue if one dies."""
        return int(self._store.add(READY, 0)) >= self._num_ranks

    def heal(self, received: Sequence[int]) -> None:
        """After a death, let the other ranks continue if they can. If not, the failures remain those of the launch.

        Args:
            received: the signals that the launcher has received. After one, ranks save and end, and those that remain
                may need one that has ended.
        """
        ends = self._ends
        if received and self._late.are_due():
            self.refuse()
        if len(received) > 1 or (received and not ends.have_all_failed):
            return
        left = [rank for rank in self._members if rank not in ends.codes]
        if not left or left == self._members:
            return
        # A rank that has ended its script counts as gone if another has failed, or if the others wait for it to come.
        if not (ends.failures or self._are_meeting()) or not self._can_continue():
            return
        self._members = left
        self._write(left)
        for failure in ends.outlive([failure.rank for failure in ends.failures]):
            if failure.kind != "stuck":  # the reason to end such a rank was printed before
                say(f"{failure.reason}{self._locate(failure.rank)}")

    def find_stuck(self) -> tuple[Sequence[int], str]:
        """Return ranks that do not respond, which their launchers must end, and the reason."""
        ranks, reason = read_stuck(self._store, self._secret)
        return [rank for rank in ranks if rank in self._members and rank not in self._ends.codes], reason

    def refuse(self) -> None:
        """End the waiting of ranks that have lost another one."""
        self._write([])

    def report(self, *, is_end: bool, could_restart: bool = False) -> None:
        """When all ranks have ended, print why the others have not continued after a death, if one has died.

        Args:
            is_end: whether the launch ends, too.
            could_restart: whether it would have started again with --max-restarts.
        """
        if why := self._explain():
            how = "--max-restarts N starts again" if could_restart else "the same command resumes"
            advice = f": {how} from the newest snapshot" if is_end else ""
            say(f"the other ranks do not continue, because {why}{advice}")

    def _explain(self) -> str:
        failures = self._ends.failures
        dead = {failure.rank for failure in (*self._ends.outlived, *failures) if failure.is_death}
        if self._num_ranks == 1 or not dead or any(failure.kind == "error" for failure in failures):
            return ""
        if refusal := read_refusal(self._store, self._secret):
            return refusal
        for failure in failures:
            if failure.refusal:
                return failure.refusal
        if not self.are_ready:
            return "not all had begun their first loop"
        for failure in failures:
            if failure.secondary and failure.call and not failure.message.startswith(PeerFailed.__name__):
                return f"rank {failure.rank} was in a collective of the script, {failure.call}, which is not repeated"
        for failure in failures:
            if not (failure.is_death or failure.secondary):
                return f"rank {failure.rank} has failed, too"
        if dead.issuperset(self._members):
            return "none is left"
        for rank, code in self._ends.codes.items():
            if code == 0:
                return f"rank {rank} had already ended its script"
        return f"they have not formed a new group within {GENERATION_S:g} s"

    def _can_continue(self) -> bool:
        # An exception would occur again, in the rank that gets these micro-batches.
        return self.are_ready and all(failure.is_death for failure in self._ends.failures)

    def _are_meeting(self) -> bool:
        """Whether ranks of the newest generation may wait for others of it to come."""
        return self._number > 0 and not have_come(self._store, self._number, self._members)

    def _write(self, members: list[int]) -> None:
        self._number += 1
        write_generation(self._store, self._secret, self._number, members)
