"""How a run ends: with its loop, with its process (not one forked from it), by an Error, or by a signal."""

import atexit
import gc
import io
import json
import os
import pickle
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakSet

from samestep.console import escape
from samestep.errors import Error, PeerFailed, WorkerDied, recognize
from samestep.launch.rank_process import is_secondary, leave, write_error
from samestep.world.environment import FINISHED, ready_standard_files
from samestep.world.group import close_group, has_group
from samestep.world.notes import is_first, is_left_by_rank_0

if TYPE_CHECKING:
    from samestep.train.run import Run

SAY_AFTER_S = 10.0

_open: "list[Run]" = []  # of this process; the end of the process has something to say of them
_ended: "WeakSet[Run]" = WeakSet()  # their loop is over: they last as long as somebody has them


def open_run(run: "Run") -> None:
    """A run begins. It is closed at the end of the process; one whose loop has ended may be so before."""
    if _ended:
        gc.collect()  # those that nobody has any more are closed: they are cycles, which may stay for long
    else:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _open.append(run)
    run._is_open = True


def let_go(run: "Run") -> None:
    """Its loop has ended as it should: when nobody has the run any more, it is closed."""
    if run._is_open:
        _open.remove(run)
        _ended.add(run)


def take_back(run: "Run") -> None:
    """A further loop of the run begins: takes back what the end of the last one gave up."""
    if run in _ended:
        _ended.remove(run)
        _open.append(run)
    if run._error_dir is not None:
        Path(run._error_dir, FINISHED).unlink(missing_ok=True)
    run._group.forget_stops()
    if run._signals is not None:
        run._signals.take()


def close_run(run: "Run", failure: str = "") -> Error | None:
    """Gives up what a run holds. A second call does nothing, nor does one in a process forked from the run's.

    Args:
        failure: why the process ends; "" where it ends well, or does not end.

    Returns:
        What is to be said of the run's end, where that was not as it should be.
    """
    if not run._is_open:
        return None
    run._is_open = False
    run._progress.close()
    run._pools.close()
    if failure and run._snapshotter.directory is not None:
        run._snapshotter.directory.write_status("failed", failure)
    was_open = run._snapshotter.close()
    run._group.close()
    if failure or not was_open or run._loop is None:
        return None
    return run._loop.left_error() or run._loop.failure


def _close_all() -> None:
    """At the end of the process."""
    runs = [*reversed(_open), *_ended]
    ends = [(run, close_run(run, find_failure(run._error_dir, run.rank))) for run in runs]
    for run, error in ends:
        if error is not None:
            end_with(error, run._error_dir, run.rank)
    close_group()


def _forget_all() -> None:
    """In a forked child: the runs are its parent's, with all that they hold."""
    for run in [*_open, *_ended]:
        run._is_open = False
        run._group.close()
        if run._signals is not None:
            run._signals.restore()
    _open.clear()
    _ended.clear()
    atexit.unregister(_close_all)


os.register_at_fork(after_in_child=_forget_all)


def report_errors(rank: int) -> None:
    """Lets an uncaught Error end the program with its one sentence and exit code 2, said by one rank.

    A rank that has only lost another one says so in a line: the other's error is what a person needs to see.
    """
    ready_standard_files()
    others, pid = sys.excepthook, os.getpid()
    if getattr(others, "is_samestep", False):
        return

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != pid:
            others(kind, error, trace)
            return
        error = recognize(error) or error
        if isinstance(error, Error):
            _say_once(error, rank)
            _leave(Error.exit_code)
        if isinstance(error, WorkerDied):
            print(f"samestep: rank {rank}'s {escape(str(error))}", file=sys.__stderr__, flush=True)
            _leave(1)
        if isinstance(error, PeerFailed) or is_secondary(error):
            reason = " ".join(str(error).split("\n")[0].split())
            print(f"samestep: rank {rank} has lost another rank ({escape(reason)})", file=sys.__stderr__, flush=True)
            _leave(1)
        others(kind, error, trace)
        if issubclass(kind, Exception) and has_group():
            if isinstance(sys.stderr, io.StringIO):  # torch.distributed's hook would print it after this one
                text = textwrap.indent(sys.stderr.getvalue(), f"[rank{rank}]: ")
                print(text, end="", file=sys.__stderr__, flush=True)
            _leave(1)

    report.is_samestep = True  # type: ignore[attr-defined]
    sys.excepthook = report


def _leave(code: int) -> NoReturn:
    """Ends the process with this code, without the destructors of torch's threads: they may abort it instead.

    From a prompt, or with `python -i`, only what was typed ends.
    """
    if sys.flags.interactive or hasattr(sys, "ps1"):
        raise SystemExit(code)
    leave(code)


def _say_once(error: Error, rank: int) -> None:
    is_sayer = is_first("error")
    if is_sayer is None:
        # Of what is the same on all ranks, rank 0 speaks; it is gone soon after.
        is_sayer = rank == (error.rank or 0) or (error.rank is None and not is_left_by_rank_0(SAY_AFTER_S))
    if is_sayer:
        # Not sys.stderr: torch.distributed's own hook buffers that around this one, and SystemExit loses the buffer.
        print(f"samestep: error: {escape(str(error))}", file=sys.__stderr__, flush=True)


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
