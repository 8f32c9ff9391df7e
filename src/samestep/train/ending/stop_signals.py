"""Signals that ask a run to stop, and the number of consecutive starts stopped before they saved anything new."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from samestep.launch.rank_process import kept_signals
from samestep.watch.records import read_rows
from samestep.world.environment import START_AGAIN, Environment, Outcome, find_exit_code

# Seconds in which a further signal counts as a repetition of the first one: a scheduler that signals every process of a
# job reaches a rank directly and also through its launcher. After a real second signal, samestep's launcher kills the
# ranks. A scheduler sends SIGKILL some time after the signal at a job's limit.
SAME_SIGNAL_S = {"python": 0.0, "torchrun": 2.0, "samestep": math.inf, "srun": math.inf}

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# Maximum number of consecutive starts that may be stopped by a signal before they have saved anything new, and still
# request another start. One or two happen on a busy cluster; more mean that the time limit is too short.
MAX_IDLE_STOPS = 3


def describe_stop(signum: int) -> str:
    """Return the reason of a stop, as in `status.json` and `restarts.jsonl`."""
    return f"stopped by {signal.Signals(signum).name}"


def count_idle_stops(history: Path) -> int:
    """Count the latest consecutive starts that a signal stopped before they saved anything new.

    Args:
        history: `restarts.jsonl`, with the line of the current start.
    """
    rows = []
    with suppress(OSError):
        rows = read_rows(history)
    again = {describe_stop(number) for number in STOP_SIGNALS if find_exit_code(Outcome.STOPPED, number) == START_AGAIN}
    began = [0, *(row["from_step"] for row in rows)]  # the first step of the start that ended with each line
    count = 0
    for row, step in reversed([*zip(rows, began, strict=False)]):
        if row["reason"] not in again or row["from_step"] != step:
            break
        count += 1
    return count


class StopSignals:
    """Treats SIGINT, SIGTERM and SIGUSR1 as requests to stop, on which all ranks vote at the end of a step.

    A second signal ends the process at once.

    Attributes:
        is_on: whether a signal is a request. False in a run without a directory, which a signal ends at once.
        heard: number of the first signal; 0 for none.
    """

    def __init__(self, environment: Environment, say: Callable[[str], None], *, is_on: bool) -> None:
        self.heard = 0
        self.is_on = is_on
        self._say = say
        self._launcher = environment.launcher
        self._same_for_s = SAME_SIGNAL_S[environment.launcher]
        self._heard_at_s = 0.0
        self._before: dict[int, Any] = {}
        self._is_released = False
        # Before the loop of a plain script there is nothing to save: Ctrl-C raises KeyboardInterrupt as usual.
        self._install([number for number in STOP_SIGNALS if number != signal.SIGINT or self._launcher != "python"])

    def take(self) -> None:
        """Install all handlers, possibly again after `restore`. Works in the main thread only."""
        self._install(STOP_SIGNALS)

    def _install(self, numbers: Sequence[signal.Signals]) -> None:
        if not self.is_on:
            return
        self._is_released = False
        if threading.current_thread() is threading.main_thread():
            missing = [number for number in numbers if number not in self._before]
            self._before |= {number: signal.signal(number, self._hear) for number in missing}
        if not self.heard:
            for number in kept_signals[:1]:
                self._hear(number, None)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._is_released:  # a later run's handler was on top of this one
            self._pass_on(number, frame)
            return
        now_s = time.monotonic()
        if self.heard and now_s - self._heard_at_s >= self._same_for_s:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self.heard:
            return
        hearer: Any = self
        while isinstance(hearer, StopSignals):  # this run's loop may be that of an earlier run, whose handler is below
            hearer = hearer.note(number, now_s)
        with suppress(RuntimeError, OSError):  # it interrupted a print, or the terminal is gone
            then = "" if self._launcher == "srun" else "; a second one ends at once"
            self._say(f"{signal.Signals(number).name}: the run stops and saves within a step{then}")

    def note(self, number: int, now_s: float) -> object:
        """Note that a signal has arrived. Returns the object whose method was the handler before this one's, if any."""
        self.heard = number
        self._heard_at_s = now_s
        return getattr(self._before.get(number), "__self__", None)

    @property
    def exit_code(self) -> int:
        """Return the exit code of a stopped run: not 0, so that a shell does not treat the run as complete.

        Under a launcher it is 0, so that the launcher does not treat a rank that stopped as requested as failed.
        """
        return find_exit_code(Outcome.STOPPED, self.heard) if self._launcher == "python" else 0

    def ignore_further(self) -> None:
        """Ignore further signals, after all ranks have voted to stop.

        The launcher, or a scheduler on another node, may deliver the same request later. It must not kill a rank that
        is already stopping.
        """
        if math.isinf(self._same_for_s):
            for number in self._before:
                signal.signal(number, signal.SIG_IGN)
            self._before = {}

    def restore(self) -> None:
        """Restore the previous handlers. Works in the main thread only; elsewhere, signals are passed on to them."""
        self._is_released = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in [*self._before.items()]:
            if signal.getsignal(number) == self._hear:
                signal.signal(number, handler)
                del self._before[number]

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
