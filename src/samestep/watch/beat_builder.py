"""Builds the beats of a rank: what it does now, and what it has spent its time on."""

import os
import threading
import time
from itertools import count

from msgspec.structs import asdict

from samestep.watch.phase_clock import PhaseClock
from samestep.watch.stall_diagnosis import Beat, ThreadState
from samestep.watch.thread_state import count_written, read_thread_state

WRITTEN_BYTES = 1 << 16  # written since the last beat: the snapshot makes progress
_numbers = count()  # of this process's beats, also of earlier loops


def number_beat() -> int:
    """Return the number of this process's next beat."""
    return next(_numbers)


class BeatBuilder:
    """Builds the beats of one loop. Observes the thread that creates it.

    Args:
        clock: the phases of this rank.
        rank, host: of this process.
        system: identity of the host, see `read_host_id`.
        interval_s: time between two beats.
        began_step: the first step of this start of the run.
    """

    def __init__(
        self, clock: PhaseClock, rank: int, host: str, system: str, *, interval_s: float, began_step: int
    ) -> None:
        self._clock = clock
        self._rank = rank
        self._host = host
        self._system = system
        self._interval_s = interval_s
        self._began_step = began_step
        self._ident = threading.get_ident()
        self._native_id = threading.get_native_id()
        spent_s = clock.spent_s()  # in earlier loops; before the first loop, only the start, which counts
        self._spent_before_s = spent_s if len(spent_s) > 1 else {}
        self._num_before = clock.tallies["loading"].num
        self._before: tuple[float, ThreadState] | None = None  # the previous state, and its time
        self._written = 0  # bytes
        self._moved_s = 0.0

    def build(self, published: int) -> Beat:
        """Return the next beat. `published`: bytes that this process has written apart from snapshots."""
        now_s = time.monotonic()
        phase, step, since_s = self._clock.now
        state = ThreadState()
        is_busy = False
        if now_s - since_s > self._interval_s:
            state = read_thread_state(self._ident, self._native_id)
            if self._before is not None and now_s > self._before[0] + self._interval_s / 2:
                before_s, before = self._before
                is_busy = state.cpu_s - before.cpu_s > (now_s - before_s) / 2
            if phase == "saving":
                written = count_written() - published
                if written > self._written + WRITTEN_BYTES:
                    self._moved_s = now_s
                self._written = written
            self._before = (now_s, state)
        else:
            self._before = None
        return Beat(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            number=number_beat(),
            step=step,
            phase=phase,
            for_s=now_s - max(since_s, self._moved_s),
            system=self._system,
            num_seen=self._clock.tallies[phase].num,
            longest_s=self._clock.tallies[phase].longest_s,
            is_busy=is_busy,
            spent_s={
                name: round(spent_s - self._spent_before_s.get(name, 0.0), 6)
                for name, spent_s in self._clock.spent_s().items()
            },
            num_steps=step - self._began_step,
            num_micro_batches=self._clock.tallies["loading"].num - self._num_before,
            **asdict(state),
        )
