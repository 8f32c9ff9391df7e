"""How a run ends other than by finishing: an Error, or a signal."""

import json
import math
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from samestep.errors import Error, PeerFailed
from samestep.launch.rank import is_secondary, write_error
from samestep.world.environment import LEAVE
from samestep.world.group import is_first, is_left_by_rank_0

SAY_AFTER_S = 10.0


def report_errors(rank: int) -> None:
    """Lets an uncaught Error end the program with its one sentence and exit code 2, said by one rank.

    A rank that has only lost another one says so in a line: the other's error is what a person needs to see.
    """
    others = sys.excepthook
    if getattr(others, "is_samestep", False):
        return

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Error):
            _say_once(error, rank)
            raise SystemExit(Error.exit_code)
        if isinstance(error, PeerFailed) or is_secondary(error):
            reason = " ".join(str(error).split("\n")[0].split())
            print(f"samestep: rank {rank} has lost another rank ({reason})", file=sys.__stderr__, flush=True)
            raise SystemExit(1)
        others(kind, error, trace)

    report.is_samestep = True  # type: ignore[attr-defined]
    sys.excepthook = report


def _say_once(error: Error, rank: int) -> None:
    is_sayer = is_first("error")
    if is_sayer is None:
        # Of what is the same on all ranks, rank 0 speaks; it is gone soon after.
        is_sayer = rank == (error.rank or 0) or (error.rank is None and not is_left_by_rank_0(SAY_AFTER_S))
    if is_sayer:
        # Not sys.stderr: torch.distributed's own hook buffers that around this one, and SystemExit loses the buffer.
        print(f"samestep: error: {error}", file=sys.__stderr__, flush=True)


def find_failure(error_dir: str | None, rank: int) -> str:
    """Why this process is ending, where it is because of an exception; else nothing."""
    if error_dir is not None:
        with suppress(OSError, ValueError):
            record = json.loads((Path(error_dir) / f"{rank}.json").read_text())
            return _shorten(f"rank {rank}", record["message"], record["secondary"])
    error = getattr(sys, "last_value", None)
    if error is None:
        return ""
    return _shorten(f"rank {rank}", f"{type(error).__name__}: {error}", is_secondary(error))


def _shorten(who: str, message: str, is_secondary: bool) -> str:
    return f"{who} lost another rank" if is_secondary else f"{who}: {' '.join(message.split())[:200]}"


def end_with(error: Error, error_dir: str | None, rank: int) -> NoReturn:
    """Ends a process whose script is through as if the script had raised `error`."""
    if error_dir is None:
        _say_once(error, rank)
    else:
        write_error(rank, error_dir, error, Error.exit_code)
        (Path(error_dir) / f"{rank}.pickle").write_bytes(pickle.dumps(error))
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(Error.exit_code)


# For how long a further signal is the first one once more: who signals every process of a job reaches a rank directly
# and by way of its launcher. Our launcher kills the ranks itself when a second one is meant.
SAME_SIGNAL_S = {"python": 0.0, "torchrun": 2.0, "samestep": math.inf}


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


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
        self._same_for_s = SAME_SIGNAL_S[launcher]
        self._heard_at_s = 0.0
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in STOP_SIGNALS}

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
            self._say(f"{signal.Signals(number).name}: this step is finished and saved; a second one ends at once")

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
