"""The calls that a script must make on all ranks in the same order, and the check that it does."""

from collections.abc import Sequence
from typing import Any

from samestep.errors import UsageError
from samestep.hashing import hash_short
from samestep.world.group import Group

EPOCH_END = 0
EPOCH_END_AFTER_STOP = 1
PREPARE, LOOP, ONCE, EVALUATE, RESTORE, UPDATE = range(2, 8)
NAMES = {
    PREPARE: "run.prepare",
    LOOP: "run.epochs or run.steps",
    ONCE: "run.once",
    EVALUATE: "run.evaluate",
    RESTORE: "run.restore",
    UPDATE: "optimizer.step",
}
ADVICE = {
    EVALUATE: "call it on every rank, since they divide the data set, and print or save the result on rank 0",
    UPDATE: "base the decision to update on values that are the same on all ranks, such as step.loss",
}
OTHER_ADVICE = (
    "make the same calls in the same order on every rank, and check what ranks can see differently, such as whether a "
    "file exists, in the function that run.once calls"
)


def wait_for_call(group: Group, call: int, names: Sequence[str] = ()) -> list[int]:
    """Wait until all ranks have made a call, and check that it is the same one.

    Args:
        call: one of the constants of this module.
        names: at the end of an epoch, the named snapshots that this rank has asked for.

    Returns:
        The calls of all ranks, which can differ at the end of an epoch only.

    Raises:
        UsageError: another rank made a different call, or asked for different snapshots.
    """
    marks = group.gather_number(call + (_hash(names) << 8))
    calls = [_read_call(mark) for mark in marks]
    asked = [mark >> 8 for mark in marks]
    _check_same(calls)
    if len({*asked}) > 1:
        rank = next(rank for rank, each in enumerate(asked) if each != _hash([]))
        other = next(other for other, each in enumerate(asked) if each != asked[rank])
        raise UsageError(
            f"rank {rank} asked for a snapshot at the end of this epoch, and rank {other} did not ask for the same: "
            "call run.snapshot on every rank; one of them writes it",
            code="SS501",
        )
    return calls


def wait_for_update(group: Group) -> None:
    """Wait until all ranks have called the step of an optimizer that is divided among them. Errors: `wait_for_call`."""
    wait_for_call(group, UPDATE)


def gather_after_step(group: Group, value: Any) -> list[Any]:
    """Gather a value of each rank between two steps, as `Group.gather`.

    Raises:
        UsageError: another rank has made a call.
    """
    wait_for_call(group, EPOCH_END)
    return group.gather(value)


def _read_call(mark: int) -> int:
    """Return the call of a rank. One that is in the exchange of a step sends another number, and has made no call."""
    call = mark & 0xFF
    return call if call == EPOCH_END_AFTER_STOP or (call in NAMES and mark >> 8 == _hash([])) else EPOCH_END


def _check_same(calls: Sequence[int]) -> None:
    """Raise UsageError if the calls of the ranks differ."""
    call = max(calls)
    if call not in NAMES or min(calls) == call:
        return
    rank = calls.index(call)
    other = next(other for other, others_call in enumerate(calls) if others_call != call)
    does = f"has called {NAMES[calls[other]]}" if calls[other] in NAMES else "has not"
    advice = ADVICE.get(call, OTHER_ADVICE)
    raise UsageError(f"rank {rank} has called {NAMES[call]}, and rank {other} {does}: {advice}", code="SS501")


def _hash(names: Sequence[str]) -> int:
    return hash_short(repr([*names]).encode()) >> 32
