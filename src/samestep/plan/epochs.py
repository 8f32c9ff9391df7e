"""Maps the steps of a loop to epochs. A sampler may give epochs different lengths."""

from bisect import bisect_right
from dataclasses import dataclass

from samestep.plan.schedule import EndlessSchedule, Schedule, Span

Piece = tuple[int, int, int]  # an epoch, and the positions start..stop-1 in its order


@dataclass(frozen=True)
class _Regime:
    """Epochs of equal length. `start`: the place of the first one. `width`: places of each."""

    epoch: int
    start: int
    schedule: Schedule
    width: int


class Epochs:
    """The epochs of one loop. Steps and epochs are numbered over all loops of the run.

    A place is a step of the run. If the loop is endless, so that a step may cross the end of an epoch, it is a position
    in the loop instead.

    Args:
        length: samples of every epoch. None: `add` gives the length of one epoch after the other.

    Attributes:
        next_epoch, end: the first epoch whose length is not known, and its place; both only if `add` gives the lengths.

    Raises:
        InvalidValue: as `Schedule`.
    """

    def __init__(
        self,
        batch_size: int,
        micro_batch_size: int,
        *,
        drop_last: bool,
        is_endless: bool,
        first_step: int,
        first_epoch: int,
        length: int | None,
    ) -> None:
        self.is_endless = is_endless
        self._sizes = (batch_size, micro_batch_size)
        self._drop_last = drop_last and not is_endless
        self._first_step = first_step
        self._endless = EndlessSchedule(1, batch_size, micro_batch_size)
        self._regimes: list[_Regime] = []
        self._starts: list[int] = []
        self.begin(first_epoch, 0 if is_endless else first_step)
        if length is not None:
            self._begin_regime(length)

    def begin(self, epoch: int, place: int) -> None:
        """Begin with an epoch at a place, where a run resumes."""
        self.next_epoch = epoch
        self.end = place

    @property
    def has_lengths(self) -> bool:
        """Whether the length of an epoch is known."""
        return bool(self._regimes)

    def add(self, length: int) -> None:
        """Set the length of epoch `next_epoch`."""
        if not self._regimes or self._regimes[-1].schedule.length != length:
            self._begin_regime(length)
        self.next_epoch += 1
        self.end += self._regimes[-1].width

    def _begin_regime(self, length: int) -> None:
        schedule = Schedule(length, *self._sizes, self._drop_last)
        width = length if self.is_endless else schedule.num_steps
        self._regimes.append(_Regime(self.next_epoch, self.end, schedule, width))
        self._starts.append(self.end)

    def place_of(self, step: int) -> int:
        """Return the place where step `step` begins."""
        return self._endless.span(step - self._first_step)[0] if self.is_endless else step

    def step_at(self, place: int) -> int:
        """Return the number of steps of the run that are complete at a place."""
        return self._first_step + place // self._sizes[0] if self.is_endless else place

    def epoch_at(self, place: int) -> int:
        """Return the epoch at a place; where its length is not known, as if it were that of the last known epoch."""
        if not self._regimes:
            return self.next_epoch
        regime = self._at(place)
        return regime.epoch + (place - regime.start) // regime.width

    def start_of(self, epoch: int) -> int:
        """Return the place of an epoch, with the same extrapolation as `epoch_at`."""
        if not self._regimes:
            return self.end
        regime = next((each for each in reversed(self._regimes) if each.epoch <= epoch), self._regimes[0])
        return regime.start + (epoch - regime.epoch) * regime.width

    def epochs_of(self, step: int) -> range:
        """Return the epochs that have a sample in step `step`."""
        return range(self.epoch_at(self.place_of(step)), self.epoch_at(self.place_of(step + 1) - 1) + 1)

    def micro_batches(self, step: int) -> tuple[Span, ...]:
        """Return the micro-batches of step `step`: positions of its epoch, or of the loop if it is endless."""
        if self.is_endless:
            return self._endless.micro_batches(step - self._first_step)
        regime = self._at(step)
        return regime.schedule.micro_batches((step - regime.start) % regime.width)

    def pieces(self, step: int, span: Span) -> list[Piece]:
        """Return the parts of a span of `micro_batches(step)`, one per epoch."""
        start, stop = span
        if not self.is_endless:
            return [(self.epoch_at(step), start, stop)]
        pieces = []
        while start < stop:
            regime = self._at(start)
            later, offset = divmod(start - regime.start, regime.width)
            end = min(offset + stop - start, regime.width)
            pieces.append((regime.epoch + later, offset, end))
            start += end - offset
        return pieces

    def _at(self, place: int) -> _Regime:
        return self._regimes[bisect_right(self._starts, place) - 1]
