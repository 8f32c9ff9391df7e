"""The end of a process that has runs: with the errors of runs that have not ended correctly, or by an error."""

import io
import os
import pickle
import signal
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from samestep.console import print_error
from samestep.errors import Error, PeerFailed, WorkerDied, describe, recognize
from samestep.files import replace_file
from samestep.launch.failure import is_secondary, write_failure
from samestep.launch.rank_process import leave
from samestep.lifetime import Held
from samestep.world.environment import Environment, Outcome, allow_all_characters, find_exit_code
from samestep.world.process_group import close_group, has_group
from samestep.world.rendezvous_store import is_first


class Shared(Held):
    """What the runs of a process share. It is closed after all of them.

    That is the process group, of which torch has one, and the errors of runs that have not ended correctly. The process
    ends with the first of them.
    """

    def __init__(self) -> None:
        self._errors: list[tuple[Error, Environment]] = []

    def add_error(self, error: Error, environment: Environment) -> None:
        """Add the error of a run."""
        self._errors.append((error, environment))

    def close(self) -> None:
        for each in self._errors:
            end_with(*each)
        close_group()

    def forget(self) -> None:
        self._errors.clear()


shared = Shared()


def report_errors(rank: int) -> None:
    """Make an uncaught Error end the program with its sentence and exit code 2.

    A rank that only lost another rank prints one line, because the other rank's error is the cause.
    """
    allow_all_characters()
    previous = sys.excepthook
    pid = os.getpid()
    if getattr(previous, "is_samestep", False):
        return

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != pid:
            previous(kind, error, trace)
            return
        error = recognize(error) or error
        if isinstance(error, Error):
            _say_once(error)
            _leave(Error.exit_code)
        if isinstance(error, WorkerDied):
            print_error(f"samestep: rank {rank}'s {error}", original=True)
            _leave(1)
        if isinstance(error, PeerFailed) or is_secondary(error):
            reason = " ".join(str(error).split("\n")[0].split())
            print_error(f"samestep: rank {rank} has lost another rank ({reason})", original=True)
            _leave(1)
        previous(kind, error, trace)
        if issubclass(kind, KeyboardInterrupt) and not _is_at_prompt():
            # Python would end with 1 if an atexit function, such as one of torch, creates a namedtuple.
            leave(find_exit_code(Outcome.STOPPED, signal.SIGINT), waits=True)
        if issubclass(kind, Exception) and has_group():
            if isinstance(sys.stderr, io.StringIO):  # torch.distributed's hook would print it after this one
                text = textwrap.indent(sys.stderr.getvalue(), f"[rank{rank}]: ")
                print_error(text.removesuffix("\n"), original=True)
            _leave(1)

    report.is_samestep = True  # type: ignore[attr-defined]
    sys.excepthook = report


def _leave(code: int) -> NoReturn:
    """End the process with this code, without the destructors of torch's threads, which may abort it instead.

    At a prompt, or with `python -i`, only the statement ends.
    """
    if _is_at_prompt():
        raise SystemExit(code)
    leave(code)


def _is_at_prompt() -> bool:
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def _say_once(error: Error) -> None:
    if is_first("error"):
        # Not sys.stderr: torch.distributed's hook buffers sys.stderr around this one, and SystemExit loses the buffer.
        print_error(f"samestep: error: {describe(error)}", original=True)


def describe_failure(error: BaseException, rank: int) -> str:
    """Describe the error that ends a rank, for `status.json`."""
    if is_secondary(error):
        return f"rank {rank} lost another rank"
    return f"rank {rank}: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"


def end_with(error: Error, environment: Environment) -> NoReturn:
    """End the process of a finished script as if the script had raised `error`."""
    error_dir, rank = environment.error_dir, environment.rank
    if error_dir is None:
        _say_once(error)
    else:
        write_failure(rank, error_dir, error, Error.exit_code)
        with suppress(OSError):  # the disk is full: `write_failure` has printed the error
            replace_file(Path(error_dir) / f"{rank}.pickle", pickle.dumps(error))
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(Error.exit_code)
