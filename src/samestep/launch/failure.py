"""How a rank failed: the report that the rank writes, and that its launcher reads."""

import json
import os
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from samestep.console import print_error
from samestep.decoding import decode
from samestep.errors import Error, NotHealed, PeerFailed, Stuck, WorkerDied, add_code, describe, is_out_of_memory
from samestep.files import replace_file
from samestep.world.workdir import make_private, read_private

MAX_REASON = 200  # characters
SOON_S = 300.0  # from a death until the others fail, if they cannot continue after it
# A RuntimeError or ConnectionError that is raised in these packages means that another rank was lost.
COMMUNICATION = ("torch.distributed", "samestep.engine", "samestep.world")
DISPATCH = ("torch._ops", "torch._library")  # torch calls its functional collectives through these


class RankFailure(Struct, frozen=True):
    """How a rank failed.

    Attributes:
        time_s: wall-clock time of the failure.
        code: exit code, or minus the signal that killed the rank.
        secondary: the rank has only lost the connection to another one.
        kind: "error" (a samestep.Error), "exception", "exit" (sys.exit), "stuck" (the message is a sentence; also for
            a killed DataLoader worker) or "died" (the rank left no report).
        message: the error, in one line.
        traceback: the traceback of an exception.
        log: the end of the rank's output, if the terminal has not shown it.
        error_code: the code of a samestep.Error.
    """

    rank: int
    time_s: float
    code: int
    secondary: bool
    kind: str
    message: str
    traceback: str = ""
    log: str = ""
    error_code: str = ""

    def __str__(self) -> str:
        return add_code(self._sentence, self.error_code)

    @property
    def _sentence(self) -> str:
        if self.kind == "stuck":
            return self.message
        verb = {"exit": "exited with ", "exception": "raised ", "error": "failed: "}.get(self.kind, "")
        return f"rank {self.rank} {verb}{self.message}"

    @property
    def is_death(self) -> bool:
        """Whether another rank could do what this one was to do: its script has not failed."""
        return self.kind in ("died", "stuck")

    @property
    def refusal(self) -> str:
        """The clause of a NotHealed, why the rank did not continue after the death of another one; "" if it is none."""
        name, _, clause = self.message.partition(": ")
        return clause if name == NotHealed.__name__ else ""

    @property
    def reason(self) -> str:
        """The failure in one short line."""
        return add_code(" ".join(self._sentence.split())[:MAX_REASON], self.error_code)


def find_first(failures: Sequence[RankFailure]) -> RankFailure | None:
    """Return the failure that caused the others: the earliest of a rank that did more than lose another one."""
    return min(failures, key=lambda failure: (failure.secondary, failure.time_s), default=None)


def write_failure(rank: int, directory: str, error: BaseException, code: int) -> None:
    """Write a rank's report for the launcher, `<rank>.json`."""
    traceback_text = ""
    if isinstance(error, SystemExit):
        kind = "exit"
        message = f"code {code}"
        if not isinstance(error.code, int):
            print_error(str(error.code))  # as Python does for sys.exit("some text")
    elif isinstance(error, (Stuck, WorkerDied)):
        kind = "stuck"
        message = str(error) if isinstance(error, Stuck) else f"rank {rank}'s {error}"
    elif isinstance(error, Error):
        kind = "error"
        message = str(error)
        traceback_text = format_error(error)
    else:
        kind = "exception"
        message = f"{type(error).__name__}: {error}"
        traceback_text = format_error(error)
    failure = RankFailure(
        rank,
        time.time(),
        code,
        is_secondary(error),
        kind,
        message,
        traceback_text,
        error_code=error.code if isinstance(error, Error) else "",
    )
    path = Path(directory) / f"{rank}.json"
    try:
        make_private(path.parent)
        replace_file(path, json.dumps(asdict(failure)).encode())
    except OSError:
        sentence = f"samestep: error: {describe(error)}" if isinstance(error, Error) else ""
        print_error(sentence or traceback_text or message)


def read_failure(rank: int, directory: str | Path) -> RankFailure | None:
    """Read the report of a rank; None if it has written none."""
    with suppress(OSError, ValueError):
        return decode(read_private(Path(directory) / f"{rank}.json"), RankFailure)
    return None


def describe_death(code: int) -> str:
    """Describe the end of a process that has left no report, from its exit code or minus its signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")


def format_error(error: BaseException) -> str:
    """Format the traceback as `python script.py` prints it, without the frames of this package."""
    frames = error.__traceback__
    while frames is not None and os.path.dirname(frames.tb_frame.f_code.co_filename) == os.path.dirname(__file__):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def is_secondary(error: BaseException) -> bool:
    """Return whether this rank has only lost another one.

    That is so if the first exception of the chain is a PeerFailed, one of torch's errors of communication, or a plain
    RuntimeError or a ConnectionError raised inside the packages that communicate with other ranks, unless it could not
    allocate memory. Other messages are not examined. If all failures of a launch look like this, the launcher reports
    the earliest.
    """
    root = error
    seen = {id(root)}
    while (before := root.__cause__ or root.__context__) is not None and id(before) not in seen:
        root = before
        seen.add(id(root))
    if isinstance(root, PeerFailed) or type(root).__module__.startswith("torch.distributed"):
        return True  # torch.distributed.DistError and its subclasses
    if is_out_of_memory(root):
        return False
    if type(root) is not RuntimeError and not isinstance(root, ConnectionError):
        return False
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(root.__traceback__)]
    while modules and modules[-1].startswith(DISPATCH):
        modules.pop()
    return bool(modules) and modules[-1].startswith(COMMUNICATION)
