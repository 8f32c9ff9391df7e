"""Checks the sizes of a run's steps, and describes how ranks share them."""

from collections.abc import Callable
from numbers import Integral

from samestep.errors import InvalidValue

Span = tuple[int, int]  # a start and a stop

MAX_MICRO_BATCHES = 1 << 20  # of a step; the plan of more would fill the memory
LEAST_SAMPLES = 64  # of a default micro-batch; fewer slow small models down (docs/dev/micro_batches.md)


def check_numbers(
    batch_size: int, micro_batch_size: int, world_size: int, advise: Callable[..., str] | None = None
) -> None:
    """Check that the numbers give a step that `world_size` ranks can share.

    Args:
        advise: formats options as the user would write them, for the message: batch_size=8 -> "--batch-size 8".

    Raises:
        InvalidValue: the numbers do not fit; the message names the nearest valid ones.
    """
    for name, value in (
        ("batch_size", batch_size),
        ("micro_batch_size", micro_batch_size),
        ("world_size", world_size),
    ):
        check_positive(name, value)
    if batch_size % micro_batch_size:
        below = batch_size - batch_size % micro_batch_size
        sizes = " or ".join(str(size) for size in (below, below + micro_batch_size) if size)
        raise InvalidValue(
            f"batch_size {batch_size} is not a multiple of micro_batch_size {micro_batch_size}: "
            f"use a batch_size of {sizes}, or a micro_batch_size that divides {batch_size}",
            code="SS108",
        )
    num_micro_batches = batch_size // micro_batch_size
    if num_micro_batches > MAX_MICRO_BATCHES:
        raise InvalidValue(
            f"batch_size {batch_size} is {num_micro_batches} micro-batches of {micro_batch_size}, more than the "
            f"{MAX_MICRO_BATCHES} of the largest step: use a smaller batch_size, or a larger micro_batch_size",
            code="SS108",
        )
    if world_size > num_micro_batches:
        ranks = "1 rank" if num_micro_batches == 1 else f"1 to {num_micro_batches} ranks"
        micro_batches = "1 micro-batch" if num_micro_batches == 1 else f"{num_micro_batches} micro-batches"
        given = find_sizes(batch_size, micro_batch_size, world_size)
        remedy = ", ".join(f"{name}={size}" for name, size in given.items())
        if advise is not None:
            remedy = f"{advise(**given)} (in the script, {remedy})"
        raise InvalidValue(
            f"{world_size} ranks cannot share a step of {micro_batches} (batch_size {batch_size}, micro_batch_size "
            f"{micro_batch_size}): start {ranks}, or give {remedy}",
            code="SS109",
        )


def find_sizes(batch_size: int, micro_batch_size: int, world_size: int) -> dict[str, int]:
    """Return arguments of a run whose step so many ranks can share: a smaller micro-batch, or else a larger batch."""
    if world_size > batch_size:
        return {"batch_size": world_size * micro_batch_size, "micro_batch_size": micro_batch_size}
    divisors = (size for size in range(batch_size // world_size, 0, -1) if batch_size % size == 0)
    return {"micro_batch_size": next(divisors)}


def default_micro_batch_size(batch_size: int) -> int:
    """Return the default of `micro_batch_size`.

    It divides `batch_size` into V micro-batches: the largest of 8, 4 and 2 that gives each at least `LEAST_SAMPLES`,
    else 1. V does not depend on the number of ranks, since the run's bits depend on V.
    """
    check_positive("batch_size", batch_size)
    fitting = (v for v in (8, 4, 2) if batch_size % v == 0 and batch_size // v >= LEAST_SAMPLES)
    return batch_size // next(fitting, 1)


def describe_division(n: int, world_size: int) -> str:
    """Describe how n micro-batches are divided among the ranks: `16 micro-batches on 3 ranks, which are 89 % busy`.

    "busy" is the mean share of a step's computing time in which a rank computes, if all micro-batches take equally
    long. For one rank, the text says how many ranks the run can have later.
    """
    micro_batches = f"{n} micro-batch{'es' if n != 1 else ''}"
    if world_size == 1:
        most = f"{n} rank{'s' if n != 1 else ''}"
        more = "for more, begin it with a larger batch_size or a smaller micro_batch_size"
        return f"{micro_batches} on 1 rank; at most {most} can share this run ({more})"
    busy = n / (world_size * -(-n // world_size))
    return f"{micro_batches} on {world_size} ranks, which are {busy * 100:.0f} % busy"


def check_positive(name: str, value: object) -> None:
    """Raise InvalidValue, with the number's name, if a value is not a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise InvalidValue(f"{name} must be a whole number above 0, found {value!r}", code="SS101")
