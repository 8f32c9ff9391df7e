"""What happens inside a rank: it runs a script as `python script.py` would, and says why it failed."""

import atexit
import builtins
import faulthandler
import importlib
import importlib.machinery
import importlib.util
import io
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import cloudpickle

from samestep.errors import Error, PeerFailed, Stuck, WorkerDied, recognize
from samestep.world.environment import HOOK
from samestep.world.private import make_private, read_private

LEAVE_S = 30  # for what is registered with atexit, in a rank that has failed

# What torch.distributed says where another rank has gone. Its exception types are not always specific.
T = TypeVar("T")

PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was closed",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "socketpoll",
    "recv failed",
    "send failed",
    "recvvalue failed",
    "sendbytes failed",
    "recvbytes failed",
    "timed out waiting for",
    "nccl communicator was aborted",
    "ncclremoteerror",
)
BETWEEN_RANKS = ("/torch/distributed/", "/samestep/engine/", "/samestep/world/")


kept_signals: list[int] = []


def keep_signal(signum: int, frame: types.FrameType | None) -> None:
    """Keeps a SIGUSR1 that comes before the script has made its Run, as it does where a job's time is short. The Run
    takes it, and leaves before its first step: the rank must not die of it, or the job would not be queued again.
    """
    kept_signals.append(signum)


def run_rank(*, rank: int, variables: dict[str, str], cwd: str, target: dict[str, Any], directory: str) -> NoReturn:
    """Runs the target and ends the process.

    Args:
        rank: this rank.
        variables: its whole environment.
        cwd: its current directory.
        target: fields of a `Target`.
        directory: takes `<rank>.json` when the rank fails, and what a called function returned or raised.
    """
    pid = os.getpid()

    def note(error: BaseException, code: int) -> None:
        """Leaves the error for the launcher; in a process that the target has forked, shows it."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a DataLoader worker has died
        if os.getpid() == pid:
            write_error(rank, directory, error, code)
        elif not isinstance(error, SystemExit):
            print(_format(error), end="", file=sys.stderr)
        elif not isinstance(error.code, int):
            print(error.code, file=sys.stderr)

    os.environ.clear()
    os.environ.update(variables)
    try:
        _set_up_streams()
        os.chdir(cwd)
        _refresh(variables)
        # What multiprocessing keeps for its workers goes with the directory, also when this rank is killed.
        multiprocessing.current_process()._config["tempdir"] = directory  # type: ignore[attr-defined]
        if HOOK in variables:
            module, options = json.loads(variables[HOOK])
            importlib.import_module(module).begin(options)
        _run_target(rank, directory, **target)
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
        if code:
            note(error, code)
    except KeyboardInterrupt as error:
        if os.getpid() != pid:
            note(error, 1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # as Python does; the launcher, which has sent it, says nothing of that
        code = 1
    except BaseException as error:
        code = error.exit_code if isinstance(error, Error) else 1
        note(error, code)
    leave(code)


def leave(code: int) -> NoReturn:
    """Ends this process as Python would, less the teardown of modules: that takes torch 0.3 s."""
    if code:
        # The other ranks wait for this one, and cannot know why: it must not stay for long.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LEAVE_S)
    with suppress(BaseException):
        if code == 0:
            threading._shutdown()  # type: ignore[attr-defined]  # Waits for threads that are not daemons.
    with suppress(BaseException):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a late Ctrl-C has nothing to stop, and would print a traceback
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def load_main(kind: str, name: str, arguments: list[str]) -> tuple[types.CodeType, types.ModuleType]:
    """A script or module as the program: its code, and a fresh `__main__` for it. Sets sys.argv and sys.path[0].

    Args:
        kind: "script": `name` is a file; "module": `name` is a module, as in `python -m`; "recipe": one of samestep's.
        name: the script or module.
        arguments: sys.argv[1:].

    Raises:
        Error: there is no such module.
    """
    main = types.ModuleType("__main__")
    if kind == "script":
        path = os.path.abspath(name)
        sys.argv = [name, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.realpath(path) if os.path.islink(path) else path))
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        loader: Any = importlib.machinery.SourceFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __loader__=loader, __cached__=None, __builtins__=builtins)
    else:
        if kind == "module":
            sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        loader = spec and spec.loader
        found = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
        if spec is None or found is None:
            raise Error(f"there is no module {name} that can be run")
        code = found
        main.__dict__.update(__file__=spec.origin, __loader__=loader, __cached__=spec.cached, __builtins__=builtins)
        main.__spec__, main.__package__ = spec, spec.parent
        program = f"samestep train {name.rpartition('.')[2]}" if kind == "recipe" else str(spec.origin)
        sys.argv = [program, *arguments]
    sys.modules["__main__"] = main
    return code, main


def _run_target(rank: int, directory: str, kind: str, name: str, arguments: list[str]) -> None:
    if kind == "call":
        _call(rank, Path(directory), Path(name))
    else:
        code, main = load_main(kind, name, arguments)
        _run(lambda: exec(code, main.__dict__))


def _run(target: Callable[[], T]) -> T:
    try:
        return target()
    except Exception as error:
        known = recognize(error)
        if known is None:
            raise
        raise known from error


def _call(rank: int, directory: Path, pickle: Path) -> None:
    """Calls the pickled function; leaves rank 0's value in `value.pickle`, an exception in `<rank>.pickle`."""
    sys.path[:] = json.loads(read_private(directory / "path.json"))
    try:
        fn, args, kwargs = cloudpickle.loads(read_private(pickle))
        if getattr(fn, "__module__", None) == "__main__":  # where plain pickle will look for its classes
            sys.modules["__main__"].__dict__.update(getattr(fn, "__globals__", {}))
        value = _run(lambda: fn(*args, **kwargs))
        if rank == 0:
            (directory / "value.pickle").write_bytes(cloudpickle.dumps(value))
    except Exception as error:
        with suppress(Exception):  # What cannot be pickled is told by its traceback.
            (directory / f"{rank}.pickle").write_bytes(cloudpickle.dumps(error))
        raise


def _set_up_streams() -> None:
    # Lines appear, or are in the log, when they are printed, whatever becomes of the rank; and each in one
    # piece (even where PYTHONUNBUFFERED is set), so that those of several ranks do not mix.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    with suppress(Exception):
        faulthandler.enable()


def _refresh(variables: dict[str, str]) -> None:
    """Gives a rank of its own what all ranks of a fork server would share."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    num_threads = variables.get("OMP_NUM_THREADS", "")
    if torch is not None and num_threads.isdecimal() and int(num_threads) > 0:
        torch.set_num_threads(int(num_threads))


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def write_error(rank: int, directory: str, error: BaseException, code: int) -> None:
    if isinstance(error, SystemExit):
        kind, message, text = "exit", f"code {code}", ""
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)  # as Python does with sys.exit("some text")
    elif isinstance(error, (Stuck, WorkerDied)):
        kind, message, text = "stuck", f"{error}" if isinstance(error, Stuck) else f"rank {rank}'s {error}", ""
    elif isinstance(error, Error):
        kind, message, text = "error", str(error), _format(error)
    else:
        kind, message, text = "exception", f"{type(error).__name__}: {error}", _format(error)
    record = {
        "rank": rank,
        "time_s": time.time(),
        "exit_code": code,
        "kind": kind,
        "message": message,
        "traceback": text,
        "secondary": is_secondary(error),
    }
    path = Path(directory) / f"{rank}.json"
    partial = path.with_suffix(".partial")
    try:
        make_private(path.parent)
        partial.write_text(json.dumps(record))
        partial.rename(path)
    except OSError:
        print(text or message, file=sys.stderr)


def _format(error: BaseException) -> str:
    """The traceback as `python script.py` shows it: without the frames that led to the script."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def is_secondary(error: BaseException) -> bool:
    """Whether the rank is well and has only lost another: what went wrong first was a message between ranks."""
    root = error
    seen = {id(root)}
    while (before := root.__cause__ or root.__context__) is not None and id(before) not in seen:
        root = before
        seen.add(id(root))
    if isinstance(root, PeerFailed):
        return True
    if isinstance(root, ConnectionError):
        return _is_between_ranks(root)
    from_torch = isinstance(root, RuntimeError) or type(root).__module__.startswith("torch.distributed")
    return from_torch and any(sign in str(root).lower() for sign in PEER_LOST)


def _is_between_ranks(error: BaseException) -> bool:
    """Whether it comes from what ranks say to each other, not from a data loader's worker or the script's own wires."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(place in frame.f_code.co_filename for frame, _ in frames for place in BETWEEN_RANKS)
