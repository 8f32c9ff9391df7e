"""Where a run continues: chosen at each start, from the content of the copies of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.errors import Error
from samestep.snapshot.store import Snapshot


@dataclass(frozen=True)
class ResumePoint:
    """The point at which a run begins or continues, the same on all ranks.

    Attributes:
        step: number of completed steps.
        meta: the `meta` in the snapshot's manifest; None if the run begins.
        snapshot: for `Location.open`; None if the run begins.
        rewinds: the steps to which the run has gone back although there were later snapshots. If this start goes back,
            its step is the last of them.
        num_recorded: number of steps in the ledger before this start, in the copy that has most. Those after `step` are
            lost.
    """

    step: int = 0
    meta: Mapping[str, Any] | None = None
    snapshot: Snapshot | None = None
    rewinds: Sequence[int] = ()
    num_recorded: int = 0

    @property
    def is_beginning(self) -> bool:
        """Return whether the run begins, because nothing is saved. A snapshot can also be of step 0."""
        return self.meta is None

    @property
    def metrics_bytes(self) -> int:
        """Return how many bytes of the rows of metrics belong to the completed steps."""
        return 0 if self.meta is None else self.meta["metrics_bytes"]


@dataclass(frozen=True)
class CopyContent:
    """The content of one copy of a run at a start.

    Attributes:
        found: the snapshot from which the run would resume, of which every byte was checked; None if there is none.
        error: why there is none, although there are snapshots or one was requested; None if the run may begin.
        newest_step: the step of the newest snapshot, damaged or not; 0 if there is none.
        num_recorded: number of steps in the ledger.
    """

    found: Snapshot | None
    error: Error | None
    newest_step: int
    num_recorded: int


def choose(contents: Sequence[CopyContent], rewinds: Sequence[int]) -> tuple[int, ResumePoint]:
    """Choose the newest undamaged snapshot of all copies.

    Args:
        contents: of the copies.
        rewinds: as in `ResumePoint`, before this start.

    Returns:
        The index of the first copy that has the snapshot, and the point.

    Raises:
        Error: no copy has an undamaged snapshot, although one should exist.

    Example::

        >>> choose([CopyContent(None, None, 0, 0)], [])
        (0, ResumePoint(step=0, meta=None, snapshot=None, rewinds=[], num_recorded=0))
    """
    steps = [-1 if each.found is None else each.found.step for each in contents]
    source = steps.index(max(steps))
    found = contents[source].found
    num_recorded = max(each.num_recorded for each in contents)
    if found is None:
        for each in contents:
            if each.error is not None:
                raise each.error
        return source, ResumePoint(rewinds=rewinds, num_recorded=num_recorded)
    if any(each.newest_step > found.step for each in contents):
        rewinds = [*rewinds, found.step]
    return source, ResumePoint(found.step, found.manifest["meta"], found, rewinds, num_recorded)
