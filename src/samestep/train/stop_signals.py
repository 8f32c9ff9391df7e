"""Signals that ask a run to stop, and how often in a row a run was stopped before it saved anything new."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from samestep.launch.rank_process import kept_signals
from samestep.watch.records import read_rows
from samestep.world.environment import LEAVE, START_AGAIN, stop_code

# For how long a further signal is the first one once more: who signals every process of a job reaches a rank directly
# and by way of its launcher. Our launcher kills the ranks itself when a second one is meant.
# Slurm kills by itself, some time after the signal that it sends at a job's limit.
SAME_SIGNAL_S = {"python": 0.0, "torchrun": 2.0, "samestep": math.inf, "srun": math.inf}


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# How often in a row a run may be told to stop before it has saved anything new, and ask to be started again. Once or
# twice is bad luck on a busy cluster; then its time is too short, and would be again.
MOST_IDLE_STOPS = 3


def describe_stop(signum: int) -> str:
    """Why a run has stopped, as `status.json` and `restarts.jsonl` have it."""
    return f"stopped by {signal.Signals(signum).name}"


def count_idle_stops(history: Path) -> int:
    """How many starts in a row, up to the last one that has ended, were told to stop before they had saved anything
    new, and have asked to be started again.

    Args:
        history: `restarts.jsonl`, with the line of the present start.
    """
    rows = []
    with suppress(OSError):
        rows = read_rows(history)
    again = {describe_stop(number) for number in STOP_SIGNALS if stop_code(number) == START_AGAIN}
    count, began = 0, [0, *(row["from_step"] for row in rows)]  # where the start before each line began
    for row, step in reversed([*zip(rows, began, strict=False)]):
        if row["reason"] not in again or row["from_step"] != step:
            break
        count += 1
    return count


class StopSignals:
    """SIGINT, SIGTERM and SIGUSR1 as a wish to stop: heard at the end of a step by all ranks. A second one ends at
    once; so does the first, where our launcher says that another rank has failed: there is no one to vote with.

    Args:
        launcher: who started this rank, as in `Environment`.
        error_dir: where that launcher says so.

    Attributes:
        heard: the first signal's number, 0 when there was none.
    """

    def __init__(self, say: Callable[[str], None], launcher: str, error_dir: str | None) -> None:
        self.heard = 0
        self._leave = None if error_dir is None else Path(error_dir, LEAVE)
        self._say = say
        self._is_alone = launcher == "python"
        self._then = "" if launcher == "srun" else "; a second one ends at once"
        self._same_for_s = SAME_SIGNAL_S[launcher]
        self._heard_at_s = 0.0
        self._before: dict[int, Any] = {}
        self.take()

    def take(self) -> None:
        """Listens, again after `restore`. Only the main thread can."""
        if not self._before and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in STOP_SIGNALS}
        for number in kept_signals[:1]:
            self._hear(number, None)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        is_second = self.heard and now_s - self._heard_at_s >= self._same_for_s
        if is_second or (self._leave is not None and self._leave.exists()):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self.heard:
            return
        self.heard, self._heard_at_s = number, now_s
        with suppress(RuntimeError, OSError):  # it interrupted a stuck print, or nobody reads: it is heard all the same
            name = signal.Signals(number).name
            self._say(f"{name}: the run stops and saves within a step{self._then}")

    @property
    def exit_code(self) -> int:
        """Of a run that has stopped, as our launcher has it: what follows in a shell's list must not take it for whole.

        Under a launcher it is 0: that one must not take a rank that has done as it was told for one that has failed.
        """
        if not self._is_alone:
            return 0
        return stop_code(self.heard)

    def leave(self) -> None:
        """All ranks have voted to stop, and this process ends. What its launcher passes on only now, or Slurm sends to
        each node in its own time, is that same wish: it must not kill a rank that has done as it was told."""
        if math.isinf(self._same_for_s):
            for number in self._before:
                signal.signal(number, signal.SIG_IGN)
            self._before = {}

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
