"""The calls that a script must make on all ranks in the same order, and the check that it does."""

from collections.abc import Sequence
from typing import Any

from samestep.errors import UsageError
from samestep.hashing import hash_short
from samestep.world.group import Group

EPOCH_END, STOP, PREPARE, LOOP, ONCE, EVALUATE, RESTORE, UPDATE, BARRIER = range(9)
NAMES = {
    STOP: "run.stop",
    PREPARE: "run.prepare",
    LOOP: "run.epochs or run.steps",
    ONCE: "run.once",
    EVALUATE: "run.evaluate",
    RESTORE: "run.restore",
    UPDATE: "optimizer.step",
    BARRIER: "run.barrier",
}
ADVICE = {
    STOP: "base the decision to stop on values that are the same on all ranks, such as step.loss",
    EVALUATE: "call it on every rank, since they divide the data set, and print or save the result on rank 0",
    UPDATE: "base the decision to update on values that are the same on all ranks, such as step.loss",
}
OTHER_ADVICE = (
    "make the same calls in the same order on every rank, and check what ranks can see differently, such as whether a "
    "file exists, in the function that run.once calls"
)
SIGN = 0x5A3E51  # the highest bits of a call's number


def wait_for_call(group: Group, call: int, names: Sequence[str] = ()) -> None:
    """Wait until all ranks have made a call. Without this, ranks at different calls would wait for each other forever.

    Args:
        call: one of the constants of this module.
        names: at the end of an epoch, the named snapshots that this rank has asked for.

    Raises:
        UsageError: another rank made a different call, continues with the next step, or asked for different snapshots.
    """
    asked = hash_short(repr([*names]).encode()) >> 32
    marks = group.gather_number(SIGN << 40 | asked << 8 | call)
    # The message of a step's exchange begins with another number.
    calls = [mark & 0xFF if mark >> 40 == SIGN else EPOCH_END for mark in marks]
    if len({*calls}) > 1:
        named = max(calls)
        rank = calls.index(named)
        other, others_call = next(each for each in enumerate(calls) if each[1] != named)
        does = f"has called {NAMES[others_call]}" if others_call in NAMES else "has not"
        advice = ADVICE.get(named, OTHER_ADVICE)
        raise UsageError(f"rank {rank} has called {NAMES[named]}, and rank {other} {does}: {advice}", code="SS501")
    if len({*marks}) > 1:
        other = next(rank for rank, mark in enumerate(marks) if mark != marks[0])
        raise UsageError(
            f"rank 0 and rank {other} did not ask for the same snapshots in this epoch: call run.snapshot on every "
            "rank; one of them writes it",
            code="SS501",
        )


def gather_after_step(group: Group, value: Any) -> list[Any]:
    """Gather a value of each rank between two steps, as `Group.gather`.

    Raises:
        UsageError: another rank waits in the step of a divided optimizer.
    """
    wait_for_call(group, EPOCH_END)
    return group.gather(value)
