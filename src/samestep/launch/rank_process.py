"""The process of one rank: runs the target as `python script.py` would, and reports how it failed."""

import builtins
import faulthandler
import io
import json
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module, machinery, util
from typing import Any, NoReturn

import cloudpickle

from samestep.console import print_error
from samestep.errors import Error, recognize
from samestep.launch.rank_reports import Result, build_failure, format_error, open_streams, report, set_reports
from samestep.processes import leave
from samestep.world.environment import HOOK, Outcome, find_exit_code

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # from the launcher to its ranks
INTERRUPTED = find_exit_code(Outcome.STOPPED, signal.SIGINT)  # exit code of a rank that a KeyboardInterrupt ends

kept_signals: list[int] = []  # of the process, as signals are: before the script creates a Run


def keep_signal(signum: int, frame: types.FrameType | None) -> None:
    """Record a SIGUSR1 that arrives before the script creates its Run, as with a short time limit of a job.

    The Run handles it before its first step. The rank must survive it, or the job would not be requeued.
    """
    kept_signals.append(signum)


def run_rank(
    *, rank: int, variables: dict[str, str], cwd: str, target: dict[str, Any], directory: str, reports: int
) -> NoReturn:
    """Run the target and end the process.

    Args:
        variables: the whole environment.
        target: the fields of a `Target`.
        directory: for temporary files.
        reports: the file of the ranks' reports.
    """
    pid = os.getpid()
    code = 0
    set_reports(reports)
    os.environ.clear()  # noqa: TID251 that of the fork server
    os.environ.update(variables)  # noqa: TID251 that of the rank
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
        open_streams()
        with suppress(Exception):
            faulthandler.enable()
        os.chdir(cwd)
        _separate_from_server(variables)
        # The temporary files of multiprocessing are then removed with the directory, also after a SIGKILL.
        multiprocessing.current_process()._config["tempdir"] = directory  # type: ignore[attr-defined]  # noqa: SLF001
        if HOOK in variables:
            module, options = json.loads(variables[HOOK])  # noqa: TID251 a variable of the environment
            import_module(module).begin(options)
        _run_target(rank, **target)
    except BaseException as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises after the death of a DataLoader worker
        code = _find_code(error)
        if code:
            sys.last_value = error  # as in Python, for the status of the run
            if os.getpid() == pid:
                if isinstance(error, SystemExit) and not isinstance(error.code, int):
                    print_error(str(error.code))  # as Python does for sys.exit("some text")
                report(build_failure(rank, error, code))
            else:  # a process that the target has forked
                print(format_error(error), end="", file=sys.stderr)
    leave(code)


def load_main(kind: str, name: str, arguments: list[str]) -> tuple[types.CodeType, types.ModuleType]:
    """Load a script or module as the main program. Sets sys.argv, sys.path[0] and sys.modules["__main__"].

    Returns its code, and the new `__main__` to execute it in. Raises Error if there is no such module. For the kinds
    see `Target`.
    """
    main = types.ModuleType("__main__")
    if kind == "script":
        path = os.path.abspath(name)
        sys.argv = [name, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.realpath(path) if os.path.islink(path) else path))
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        loader: Any = machinery.SourceFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __loader__=loader, __cached__=None, __builtins__=builtins)
    else:
        if kind == "module" and name != "samestep":  # as python -m; the ranks of a command are its own
            sys.path.insert(0, os.getcwd())
        spec = util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = util.find_spec(f"{name}.__main__")
        loader = spec and spec.loader
        found = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
        if spec is None or found is None:
            raise Error(f"there is no module {name} that can be run", code="SS110")
        code = found
        main.__dict__.update(__file__=spec.origin, __loader__=loader, __cached__=spec.cached, __builtins__=builtins)
        main.__spec__ = spec
        main.__package__ = spec.parent
        program = f"samestep train {name.rpartition('.')[2]}" if kind == "recipe" else str(spec.origin)
        sys.argv = [program, *arguments]
    sys.modules["__main__"] = main
    return code, main


def _run_target(rank: int, kind: str, name: str, arguments: list[str], call: bytes) -> None:
    try:
        if kind == "call":
            sys.path[:] = arguments
            _call(rank, call)
        else:
            code, main = load_main(kind, name, arguments)
            exec(code, main.__dict__)
    except Exception as error:
        if (known := recognize(error)) is None:
            raise
        raise known from error


def _call(rank: int, call: bytes) -> None:
    """Call the pickled function. Report rank 0's result, or an exception."""
    try:
        fn, args, kwargs = cloudpickle.loads(call)
        if getattr(fn, "__module__", None) == "__main__":  # where plain pickle looks up its classes
            sys.modules["__main__"].__dict__.update(getattr(fn, "__globals__", {}))
        value = fn(*args, **kwargs)
        if rank == 0:
            report(Result(rank, cloudpickle.dumps(value)))
    except Exception as error:
        with suppress(Exception):  # the traceback describes an exception that cannot be pickled
            report(Result(rank, cloudpickle.dumps(recognize(error) or error)))
        raise


def build_code(file: str, build: Callable[..., types.CodeType], arguments: tuple[Any, ...]) -> types.CodeType:
    """Return the code of a pickled function, of this file. Here, because a rank would have to import `spawn` first."""
    return build(*arguments).replace(co_filename=file)


def _separate_from_server(variables: dict[str, str]) -> None:
    """Reset the state that all ranks of a fork server would share."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    num_threads = variables.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and num_threads.isdecimal() and int(num_threads) > 0:
        sys.modules["torch"].set_num_threads(int(num_threads))


def _find_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        code = error.code or 0
        return code & 0xFF if isinstance(code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return error.exit_code if isinstance(error, Error) else 1
