"""Times the phases of a rank."""

import time
from dataclasses import dataclass

from samestep.watch.stall_diagnosis import PHASES, WARM_UP


@dataclass(slots=True)
class PhaseTally:
    """How often a phase has ended, its total duration, and its longest duration without the first `WARM_UP`."""

    num: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0


class PhaseClock:
    """Measures the phases of the main thread. `enter` is called 4 times per micro-batch and takes 0.4 us.

    Attributes:
        now: (phase, step, time of the last change on the monotonic clock). Replaced as a whole, for other threads.
        tallies: by phase.
    """

    def __init__(self) -> None:
        self.now: tuple[str, int, float] = ("starting", 0, time.monotonic())
        self.tallies = {phase: PhaseTally() for phase in PHASES}

    def enter(self, phase: str, step: int) -> None:
        """Start `phase` of step `step`."""
        now_s = time.monotonic()
        before, _, since_s = self.now
        tally = self.tallies[before]
        took_s = now_s - since_s
        tally.num += 1
        tally.total_s += took_s
        if took_s > tally.longest_s and tally.num > WARM_UP:
            tally.longest_s = took_s
        self.now = (phase, step, now_s)

    def move(self, before: str, after: str, seconds: float) -> None:
        """Reassign some seconds from the phase `before` to `after`."""
        self.tallies[before].total_s -= seconds
        self.tallies[after].total_s += seconds

    def spent_s(self) -> dict[str, float]:
        """Return the total seconds of each phase, without the current one."""
        return {phase: tally.total_s for phase, tally in self.tallies.items() if tally.num}
