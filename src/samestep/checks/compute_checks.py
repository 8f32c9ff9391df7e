"""Which micro-batches of a step are computed twice, by two ranks, to find ranks that compute wrong results."""

from typing import NamedTuple

from samestep.plan.tree import build_layout


class ComputeCheck(NamedTuple):
    """One micro-batch that two ranks compute.

    Attributes:
        v: the micro-batch.
        owner: the rank that holds it.
        checker: the rank that computes it, too.
        judge: the rank that computes it if these two disagree; None with two ranks.
    """

    v: int
    owner: int
    checker: int
    judge: int | None


def find_checks(n: int, world_size: int, step: int, every: int) -> tuple[ComputeCheck, ...]:
    """Return the checks of a step of n micro-batches; () if the step is not checked.

    Args:
        every: number of steps between those that are checked.
    """
    if (step + 1) % every:
        return ()
    return plan_checks(n, world_size, step // every)


def plan_checks(n: int, world_size: int, number: int) -> tuple[ComputeCheck, ...]:
    """Return the checks of a step of n micro-batches: one for each rank that holds any; () with one rank.

    Idle ranks check first, and no rank checks more than one. With m ranks that check one another, every pair
    (owner, checker) occurs once in m - 1 checked steps.

    Args:
        number: how many checked steps precede this one.
    """
    if world_size == 1:
        return ()
    ranges = build_layout(n, world_size).ranges
    owners = [rank for rank, held in enumerate(ranges) if held]
    idle = [rank for rank, held in enumerate(ranges) if not held]
    turn = number % len(owners)
    owners = owners[turn:] + owners[:turn]
    ring = owners[len(idle) :]
    distance = 1 + number % (len(ring) - 1) if len(ring) > 1 else 0
    checkers = idle[: len(owners)] + [
        ring[(k + distance) % len(ring)] if distance else owners[0] for k in range(len(ring))
    ]
    checks = []
    for owner, checker in zip(owners, checkers, strict=True):
        held = ranges[owner]
        judge = next((rank for rank in (*idle, *owners) if rank not in (owner, checker)), None)
        checks.append(ComputeCheck(held[number // (world_size - 1) % len(held)], owner, checker, judge))
    return tuple(checks)
