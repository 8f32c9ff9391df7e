"""The calls that a script must make on all ranks in the same order, and the check that it does."""

from collections.abc import Sequence
from typing import Any

from samestep.errors import UsageError
from samestep.hashing import hash_short
from samestep.world.group import Group

EPOCH_END, EPOCH_END_AFTER_STOP, PREPARE, LOOP, ONCE, EVALUATE, RESTORE, UPDATE, BARRIER = range(9)
NAMES = {
    PREPARE: "run.prepare",
    LOOP: "run.epochs or run.steps",
    ONCE: "run.once",
    EVALUATE: "run.evaluate",
    RESTORE: "run.restore",
    UPDATE: "optimizer.step",
    BARRIER: "run.barrier",
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
    """Wait until all ranks have made a call. Without this, ranks at different calls would wait for each other forever.

    Args:
        call: one of the constants of this module.
        names: at the end of an epoch, the named snapshots that this rank has asked for.

    Returns:
        The calls of all ranks, which can differ at the end of an epoch only.

    Raises:
        UsageError: another rank made a different call, or asked for different snapshots.
    """
    marks = group.gather_number(_mark(call, names))
    calls = [mark & 0xFF for mark in marks]
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
    """Wait until all ranks have called the step of an optimizer that is divided among them.

    Raises:
        UsageError: another rank has made another call, or continues with the next step.
    """
    _wait_between_steps(group, UPDATE)


def gather_after_step(group: Group, value: Any) -> list[Any]:
    """Gather a value of each rank between two steps, as `Group.gather`.

    Raises:
        UsageError: another rank waits in the step of a divided optimizer.
    """
    _wait_between_steps(group, EPOCH_END)
    return group.gather(value)


def _wait_between_steps(group: Group, call: int) -> None:
    known = {_mark(each) for each in (EPOCH_END, EPOCH_END_AFTER_STOP, *NAMES)}
    marks = group.gather_number(_mark(call))
    # The message of a step's exchange begins with another number.
    _check_same([mark & 0xFF if mark in known else EPOCH_END for mark in marks])


def _mark(call: int, names: Sequence[str] = ()) -> int:
    """Return the number that stands for a call. `names`: as for `wait_for_call`."""
    return call + (_hash(names) << 8)


def _check_same(calls: Sequence[int]) -> None:
    """Raise UsageError if the calls of the ranks differ, unless they are ends of epochs."""
    call = max(calls)
    if call not in NAMES or min(calls) == call:
        return
    rank = calls.index(call)
    other, others_call = next(each for each in enumerate(calls) if each[1] != call)
    does = f"has called {NAMES[others_call]}" if others_call in NAMES else "has not"
    advice = ADVICE.get(call, OTHER_ADVICE)
    raise UsageError(f"rank {rank} has called {NAMES[call]}, and rank {other} {does}: {advice}", code="SS501")


def _hash(names: Sequence[str]) -> int:
    return hash_short(repr([*names]).encode()) >> 32
