"""What a rank of samestep's launcher reports and prints.

Reports express what an exit code cannot. They are lines of JSON in a file in memory. The launcher creates it, and hands
it to the ranks through the server that forks them. No other process can open it.

The output of a rank is that of the launcher, or a log: a file of the launcher until the run begins, which has a
directory for it (docs/dev/logs.md).
"""

import fcntl
import io
import json
import os
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins

from samestep.console import say, set_terminal
from samestep.decoding import decode
from samestep.errors import Error, LeftOver, NotHealed, PeerFailed, Stuck, WorkerDied, add_code, is_out_of_memory
from samestep.files import open_regular
from samestep.world.environment import BegunRun, Outcome

SENTENCES = ("stuck", "worker died", "left over")  # kinds of failures whose message is a sentence
MAX_REASON = 200  # characters
SOON_S = 300.0  # from a death until the others fail, if they cannot continue after it
# A RuntimeError or ConnectionError that is raised in these packages means that another rank was lost.
COMMUNICATION = ("torch.distributed", "samestep.engine", "samestep.world")
DISPATCH = ("torch._ops", "torch._library")  # torch calls its functional collectives through these
READ_BYTES = 1 << 30  # at a time: Linux reads at most 2 GiB

# in a rank of samestep's launcher:
_file: int | None = None  # of the reports
_early: Path | None = None  # to which the rank writes before its run begins, if its output is not shown
_log: Path | None = None  # to which it then writes


class RankFailure(Struct, tag=True, frozen=True):
    """How a rank failed.

    Attributes:
        time_s: wall-clock time of the failure.
        code: exit code, or minus the signal that killed the rank.
        secondary: the rank has only lost the connection to another one.
        kind: "error" (a samestep.Error), "exception", "exit" (sys.exit), "died" (the rank left no report), or one of
            `SENTENCES`.
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
        if self.kind in SENTENCES:
            return self.message
        verb = {"exit": "exited with ", "exception": "raised ", "error": "failed: "}.get(self.kind, "")
        return f"rank {self.rank} {verb}{self.message}"

    @property
    def is_death(self) -> bool:
        """Whether another rank could do what this one was to do: its script has not failed."""
        return self.kind == "died" or self.kind in SENTENCES

    @property
    def refusal(self) -> str:
        """The clause of a NotHealed, why the rank did not continue after the death of another one; "" if it is none."""
        name, _, clause = self.message.partition(": ")
        return clause if name == NotHealed.__name__ else ""

    @property
    def reason(self) -> str:
        """The failure in one short line."""
        return add_code(" ".join(self._sentence.split())[:MAX_REASON], self.error_code)


class Result(Struct, tag=True, frozen=True):
    """What a function call has returned on rank 0, or raised on another one, pickled."""

    rank: int
    pickled: bytes


class Log(Struct, tag=True, frozen=True):
    """The log of a rank has begun, in the run's directory."""

    rank: int
    path: str


class LoopState(Struct, tag=True, frozen=True):
    """A loop has begun or ended.

    Attributes:
        outcome: how it has ended, if it has.
        run: None without a directory.
    """

    outcome: Outcome
    run: BegunRun | None


RankReport = RankFailure | Result | Log | LoopState


def set_reports(file: int) -> None:
    """In the process of a rank: report to this file."""
    global _file
    _file = file
    os.set_inheritable(file, False)


def has_launcher() -> bool:
    """Return whether samestep's launcher has started this process as a rank."""
    return _file is not None


def report(message: RankReport) -> None:
    """Report something to the launcher; without one, do nothing.

    All ranks of the machine append to the file.
    """
    if _file is not None:
        # A new line also before it: a rank may have been killed while it wrote.
        left = f"\n{json.dumps(to_builtins(message))}\n".encode()
        while left:
            left = left[os.write(_file, left) :]


def build_failure(rank: int, error: BaseException, code: int) -> RankFailure:
    """Describe the failure of a rank. `code`: its exit code."""
    match error:
        case SystemExit():
            kind, message = "exit", f"code {code}"
        case Stuck():
            kind, message = "stuck", str(error)
        case LeftOver():
            kind, message = "left over", str(error)
        case WorkerDied():
            kind, message = "worker died", f"rank {rank}'s {error}"
        case Error():
            kind, message = "error", str(error)
        case _:
            kind, message = "exception", f"{type(error).__name__}: {error}"
    traceback_text = format_error(error) if kind in ("error", "exception") else ""
    error_code = error.code if isinstance(error, Error) else ""
    return RankFailure(
        rank, time.time(), code, is_secondary(error), kind, message, traceback_text, error_code=error_code
    )


class Reports:
    """The reports of this machine's ranks, as their launcher reads them.

    Attributes:
        file: its descriptor.
        run: the run whose loop has begun last, also in an earlier start of the ranks.
        outcome: how the last loop of the present start has ended.
        failures, results, logs: of ranks of the present start.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("samestep-reports")
        fcntl.fcntl(self.file, fcntl.F_SETFL, os.O_APPEND)  # else writes of two ranks at once may overwrite each other
        self.run: BegunRun | None = None
        self._size = 0  # of what was read
        self.clear()

    def clear(self) -> None:
        """Forget what belongs to one start of the ranks."""
        self.outcome = Outcome.UNKNOWN
        self.failures: dict[int, RankFailure] = {}
        self.results: dict[int, bytes] = {}
        self.logs: dict[int, str] = {}

    def read(self) -> None:
        """Read what is new."""
        text = b""
        while more := os.pread(self.file, READ_BYTES, self._size + len(text)):
            text += more
        complete, end, _ = text.rpartition(b"\n")
        self._size += len(complete + end)
        for line in complete.split(b"\n"):
            with suppress(ValueError):  # it is empty, or the rank was killed while it wrote
                self._note(decode(line, RankReport))  # type: ignore[arg-type]  # a union is no type for mypy

    def _note(self, message: RankReport) -> None:
        match message:
            case RankFailure():
                self.failures[message.rank] = message
            case Result():
                self.results[message.rank] = message.pickled
            case Log():
                self.logs[message.rank] = message.path
            case LoopState():
                self.outcome = message.outcome
                self.run = message.run or self.run


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


# --- the output -------------------------------------------------------------------------------------------------------


class Output(io.FileIO):
    """A standard file that drops what cannot be written, as on a full disk or after `| head`: no run ends for that."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def redirect_output(early: Path, terminal: int, *, is_shown: bool) -> None:
    """In the process of a rank: let file descriptors 1 and 2, if not shown, write to `early`, a file of the launcher.

    `terminal`: the launcher's standard error.
    """
    global _early
    _early = early
    set_terminal(terminal)
    if not is_shown:
        with open(early, "xb", opener=open_regular) as file:
            _replace_output(file.fileno())


def start_log(rank: int, path: Path) -> None:
    """Write the past and future output of this rank to `path`, unless it is shown. Only under samestep's launcher."""
    global _log
    if _early is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_output(_log or _early):
            with open(path, "ab", opener=open_regular) as file:
                if _log is None:
                    with open(_early, "rb", opener=open_regular) as source:
                        shutil.copyfileobj(source, file)
                        file.flush()
                _replace_output(file.fileno())
        _log = path
        report(Log(rank, str(path.absolute())))
    except OSError as error:
        say(f"the log {path} of this rank cannot be written ({error.strerror})")


def open_streams() -> None:
    """Let Python write each line at once, and in one write (also with PYTHONUNBUFFERED).

    So a killed rank loses no line, and the lines of several ranks do not mix.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            buffer = io.BufferedWriter(Output(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True))


def _is_output(path: Path) -> bool:
    """Return whether this process writes to a file: it is not shown, and the script has not redirected its output."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(1))
    return False


def _replace_output(file: int) -> None:
    for standard in (1, 2):
        os.dup2(file, standard)
