"""The calls that a script must make on all ranks in the same order, and the check that it does."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from samestep.errors import UsageError
from samestep.hashing import hash_short
from samestep.world.announcements import announce, find_announced
from samestep.world.group import Group

EPOCH_END = 0
EPOCH_END_AFTER_STOP = 1
PREPARE, LOOP, ONCE, EVALUATE, RESTORE, NEW_RUN, UPDATE = range(2, 9)
NAMES = {
    PREPARE: "run.prepare",
    LOOP: "run.epochs or run.steps",
    ONCE: "run.once",
    EVALUATE: "run.evaluate",
    RESTORE: "run.restore",
    NEW_RUN: "samestep.Run",
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
OTHERS = (EPOCH_END, EPOCH_END_AFTER_STOP, *(call for call in NAMES if call not in (NEW_RUN, UPDATE)))


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
    nothing = _hash([])
    if call != NEW_RUN and group.world_size > 1:  # a rank that creates a Run may wait in another exchange
        is_end = call in (EPOCH_END, EPOCH_END_AFTER_STOP)  # of an epoch that can be short: without a round trip
        _check_pairs(group.rank, call, announce(group.rank, call, [] if is_end else [NEW_RUN]))
    marks = group.gather_number(_mark(call, names))
    if call == NEW_RUN:
        _check_in_call(marks, group.rank)
    calls = [mark & 0xFF for mark in marks]
    asked = [mark >> 8 for mark in marks]
    _check_same(calls, range(len(calls)))
    if len({*asked}) > 1:
        rank = next(rank for rank, each in enumerate(asked) if each != nothing)
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
    known = _list_marks()
    marks = group.gather_number(_mark(call))
    _check_same([mark & 0xFF if mark in known else EPOCH_END for mark in marks], range(len(marks)))


def announce_run(rank: int) -> None:
    """Raise UsageError if another rank waits in another call for this one, which creates a further Run."""
    _check_pairs(rank, NEW_RUN, announce(rank, NEW_RUN, OTHERS))


def check_run(rank: int) -> None:
    """As `announce_run`, for a rank that has announced its Run."""
    _check_pairs(rank, NEW_RUN, find_announced(OTHERS))


def _check_pairs(rank: int, call: int, found: Sequence[tuple[int, int]]) -> None:
    for other, others_call in found:
        calls = {rank: call, other: others_call}
        _check_same([calls[each] for each in sorted(calls)], sorted(calls))


def explain_in_loop(own: int, rank: int) -> str:
    """Return the error of rank `own`, which has called samestep.Run, while `rank` is in a step."""
    return (
        f"rank {own} has called samestep.Run inside the loop of another run, and rank {rank} continues with "
        "that loop: create the Run on every rank at the same place, or outside of the loop"
    )


def _check_in_call(marks: Sequence[int], own: int) -> None:
    """Raise UsageError if a rank is in the exchange of a step, whose message does not begin with the mark of a call."""
    known = _list_marks()
    for rank, mark in enumerate(marks):
        if mark not in known:
            raise UsageError(explain_in_loop(own, rank), code="SS501")


@cache
def _list_marks() -> set[int]:
    """Return the numbers that ranks gather in their calls. The message of a step's exchange begins with another one."""
    return {_mark(call) for call in (EPOCH_END, EPOCH_END_AFTER_STOP, *NAMES)}


def _mark(call: int, names: Sequence[str] = ()) -> int:
    """Return the number that stands for a call. `names`: as for `wait_for_call`."""
    return call + (_hash(names) << 8)


def _check_same(calls: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise UsageError if the calls of the ranks differ. `calls`: one for each of `ranks`."""
    name = NAMES.get(max(calls))
    if name is None or min(calls) == max(calls):
        return
    first = calls.index(max(calls))
    rank = ranks[first]
    call = calls[first]
    other, others_call = next(each for each in zip(ranks, calls, strict=True) if each[1] != call)
    does = f"has called {NAMES[others_call]}" if others_call in NAMES else "has not"
    advice = ADVICE.get(call, OTHER_ADVICE)
    raise UsageError(f"rank {rank} has called {name}, and rank {other} {does}: {advice}", code="SS501")


def _hash(names: Sequence[str]) -> int:
    return hash_short(repr([*names]).encode()) >> 32
