"""Maps positions of a loop to epochs, steps and micro-batches.

Everything here is a function of a few integers, so the position in a run's data is one integer: the step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from numbers import Integral

from samestep.errors import InvalidValue
from samestep.plan.tree import build_layout

Span = tuple[int, int]

MAX_SAMPLES = 1 << 40  # of a step; larger values are typing errors
MAX_MICRO_BATCHES = 1 << 20  # of a step; the plan of more would fill the memory
LEAST_SAMPLES = 64  # of a default micro-batch; fewer slow small models down (docs/dev/micro_batches.md)


@dataclass(frozen=True)
class Schedule:
    """The steps of a loop over epochs of `length` samples; all sizes are in samples. Steps and epochs count from 0.

    Position p of the loop is position `p % length` of epoch `p // length`. The last step of an epoch is short if
    `batch_size` does not divide `length`: it has fewer micro-batches, and the last one may be smaller.

    Args:
        drop_last: omit the short step.
        is_endless: every step is full, and a step that crosses the end of an epoch continues in the next one (or in
            several, if the data set is tiny). `drop_last` has no effect.

    Raises:
        InvalidValue: a number is not an integer above 0, `micro_batch_size` does not divide `batch_size`, the data
            set is empty, or `drop_last` leaves no step.
    """

    length: int
    batch_size: int
    micro_batch_size: int
    drop_last: bool = False
    is_endless: bool = False

    def __post_init__(self) -> None:
        _check_length(self.length)
        check_numbers(self.batch_size, self.micro_batch_size, 1)
        if self.num_dropped == self.length:
            raise InvalidValue(
                f"drop_last leaves no step of {_samples(self.length)} with batch_size {self.batch_size}: "
                f"lower batch_size to at most {self.length}, or remove drop_last",
                code="SS108",
            )

    @property
    def num_dropped(self) -> int:
        """Samples of each epoch that no step uses."""
        return self.length % self.batch_size if self.drop_last and not self.is_endless else 0

    @property
    def num_steps(self) -> int:
        """Steps of one epoch. Not for endless loops."""
        return -(-(self.length - self.num_dropped) // self.batch_size)

    @property
    def num_micro_batches(self) -> int:
        """V, the number of micro-batches of a full step."""
        return self.batch_size // self.micro_batch_size

    def span(self, step: int) -> Span:
        """Return (start, stop) of the positions of a step."""
        if step < 0:
            raise IndexError(f"step {step} is below 0")
        if self.is_endless:
            return step * self.batch_size, (step + 1) * self.batch_size
        epoch, step_of_epoch = divmod(step, self.num_steps)
        start = epoch * self.length + step_of_epoch * self.batch_size
        return start, min(start + self.batch_size, (epoch + 1) * self.length)

    def micro_batches(self, step: int) -> tuple[Span, ...]:
        """Return (start, stop) positions of each micro-batch of a step. Only the last of an epoch may be smaller."""
        start, stop = self.span(step)
        size = self.micro_batch_size
        return tuple((at, min(at + size, stop)) for at in range(start, stop, size))

    def epochs_of(self, step: int) -> range:
        """Return the epochs that have a sample in a step."""
        start, stop = self.span(step)
        return range(start // self.length, (stop - 1) // self.length + 1)

    def pieces(self, span: Span) -> list[tuple[int, Span]]:
        """Return the parts of a span, one per epoch: the epoch, and positions in it."""
        start, stop = span
        pieces = []
        while start < stop:
            epoch, offset = divmod(start, self.length)
            end = min(offset + stop - start, self.length)
            pieces.append((epoch, (offset, end)))
            start += end - offset
        return pieces

    def count_within(self, num_epochs: int) -> int:
        """Return the number of steps that need no sample after the first epochs."""
        return num_epochs * self.length // self.batch_size if self.is_endless else num_epochs * self.num_steps

    def count_until(self, num_epochs: int) -> int:
        """Return the number of steps after which all samples of the first epochs are used."""
        return -(-num_epochs * self.length // self.batch_size) if self.is_endless else num_epochs * self.num_steps


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
    if batch_size > MAX_SAMPLES:
        raise InvalidValue(f"batch_size must be at most {MAX_SAMPLES}, not {batch_size}", code="SS108")
    if batch_size % micro_batch_size:
        below = batch_size - batch_size % micro_batch_size
        sizes = [size for size in (below, below + micro_batch_size) if size]
        # The nearest four: a round batch_size can have dozens of divisors.
        divisors = sorted(_divisors(batch_size), key=lambda size: (abs(size - micro_batch_size), size))[:4]
        raise InvalidValue(
            f"batch_size {batch_size} is not a multiple of micro_batch_size {micro_batch_size}: "
            f"use a batch_size of {_either(sizes)}, or a micro_batch_size of {_either(sorted(divisors))}",
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
    return {"micro_batch_size": max(size for size in _divisors(batch_size) if batch_size // size >= world_size)}


def default_micro_batch_size(batch_size: int) -> int:
    """Return the default of `micro_batch_size`.

    It divides `batch_size` into V micro-batches: the largest of 8, 4 and 2 that gives each at least `LEAST_SAMPLES`,
    else 1. V does not depend on the number of ranks, since the run's bits depend on V.
    """
    check_positive("batch_size", batch_size)
    fitting = (v for v in (8, 4, 2) if batch_size % v == 0 and batch_size // v >= LEAST_SAMPLES)
    return batch_size // next(fitting, 1)


def describe_division(n: int, world_size: int, micro_batch_size: int | None = None) -> str:
    """Describe how n micro-batches are divided among the ranks: `16 micro-batches on 3 ranks: 6+5+5, 89 % busy`.

    "busy" is the mean share of a step's computing time in which a rank computes, if all micro-batches take equally
    long. Above 8 ranks, the shares are abbreviated.

    Args:
        micro_batch_size: of a run that begins on one rank. The text says how many ranks it can have later, and advises
            against a size below `LEAST_SAMPLES`, which slows small models down.
    """
    shares = [*map(len, build_layout(n, world_size).ranges)]
    micro_batches = f"{n} micro-batch{'es' if n != 1 else ''}"
    if world_size == 1:
        if micro_batch_size is None:
            return f"{micro_batches} on 1 rank"
        room = "no more ranks can share this run" if n == 1 else f"up to {n} ranks can share this run"
        way = "larger batch_size" if micro_batch_size == 1 else "smaller micro_batch_size"
        small = n > 1 and micro_batch_size < LEAST_SAMPLES
        advice = "; if a sample takes little time, a larger micro_batch_size is faster" if small else ""
        size = _samples(micro_batch_size)
        return f"{micro_batches} of {size} on 1 rank; {room} (for more, begin it with a {way}{advice})"
    if world_size <= 8:
        listed = "+".join(map(str, shares))
    elif min(shares) == max(shares):
        listed = f"{shares[0]} each"
    else:
        listed = f"{min(shares)} or {max(shares)} each"
    busy = n / (world_size * max(shares))
    return f"{micro_batches} on {world_size} ranks: {listed}, {busy * 100:.0f} % busy"


def check_positive(name: str, value: object) -> None:
    """Raise InvalidValue, with the number's name, if a value is not a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise InvalidValue(f"{name} must be a whole number above 0, found {value!r}", code="SS101")


def _check_length(length: object) -> None:
    if isinstance(length, Integral) and length == 0:
        raise InvalidValue("the data set is empty: a run needs at least 1 sample", code="SS303")
    check_positive("the length of the data set", length)


def _samples(count: int) -> str:
    return f"{count} sample{'s' if count != 1 else ''}"


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _either(values: list[int]) -> str:
    """`1`, `1 or 2`, `1, 2 or 5`."""
    *head, last = map(str, values)
    return f"{', '.join(head)} or {last}" if head else last
