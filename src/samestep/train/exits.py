"""How a run ends other than by finishing: an Error, or a signal."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType

from samestep.errors import Error, PeerFailed


def report_errors(rank: int) -> None:
    """Lets an uncaught Error end the program with its one sentence and exit code 2, said by one rank."""
    others = sys.excepthook
    if getattr(others, "is_samestep", False):
        return

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, Error | PeerFailed):
            others(kind, error, trace)
            return
        said_by = getattr(error, "rank", None)
        if isinstance(error, Error) and rank == (said_by or 0):
            print(f"samestep: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(Error.exit_code if isinstance(error, Error) else 1)

    report.is_samestep = True  # type: ignore[attr-defined]
    sys.excepthook = report


# For how long a further signal is the first one once more: who signals every process of a job reaches a rank directly
# and by way of its launcher. Our launcher kills the ranks itself when a second one is meant.
SAME_SIGNAL_S = {"python": 0.0, "torchrun": 2.0, "samestep": math.inf}


class StopSignals:
    """SIGINT and SIGTERM as a wish to stop: heard at the end of a step by all ranks. A second one ends at once.

    Args:
        launcher: who started this rank, as in `Environment`.

    Attributes:
        heard: the first signal's number, 0 when there was none.
    """

    def __init__(self, say: Callable[[str], None], launcher: str) -> None:
        self.heard = 0
        self._say = say
        self._same_for_s = SAME_SIGNAL_S[launcher]
        self._heard_at_s = 0.0
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.heard:
            if now_s - self._heard_at_s >= self._same_for_s:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.heard, self._heard_at_s = number, now_s
        with suppress(RuntimeError, OSError):  # it interrupted a stuck print, or nobody reads: it is heard all the same
            self._say(f"{signal.Signals(number).name}: this step is finished and saved; a second one ends at once")

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
