"""Starts programs for tests. A Python program is a fork of this process, which has imported torch.

A fork finds what `python ARGUMENTS` would give it: arguments, environment, directory, files, signal handlers, search
path, standard streams, `__main__`, and its end: exit code, traceback, atexit handlers. Modules are imported already,
str hashes are those of this process, and the interpreter is not torn down at the end.
"""

import atexit
import builtins
import ctypes
import faulthandler
import gc
import importlib
import io
import logging
import multiprocessing.util
import os
import random
import re
import resource
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import psutil

from samestep.launch import forkserver, rank_process
from samestep.launch.rank_process import load_main
from samestep.processes import leave
from support.hosts import Host

TESTS = str(Path(__file__).parents[1])
TORCHRUN_STARTS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
# Variables that take effect when an interpreter starts: with other values than here, a program is not forked.
READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "MKL_", "OPENBLAS_", "GLIBC_")
HANDLED = ("PYTHONPATH", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
FLAGS = ("-P", "-u")  # of the interpreter; torchrun starts its ranks with -u
SPECIAL = "|&;<>()$`*?#\n"  # what a shell gives a meaning to
PROGRAMS = {
    "python": [sys.executable],
    "samestep": [sys.executable, "-m", "samestep"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
MAX_MARK = 800_000  # of the bytes that RLIMIT_MSGQUEUE allows by default
HUGE_BYTES = 1 << 21
MADV_COLLAPSE = 25  # since Linux 6.1; where it is unknown, nothing changes

_tests = 0  # the process that runs the tests
_base_path: list[str] = []


class Popen(subprocess.Popen[Any]):
    """A program. A Python program is a fork of this process, if possible.

    Args:
        real: start a new interpreter.
        host: on another host than this.
    """

    def __init__(
        self, args: Sequence[str | Path] | str, *more: Any, real: bool = False, host: Host | None = None, **options: Any
    ) -> None:
        words = args if isinstance(args, str) else [str(word) for word in args]
        then = options.pop("preexec_fn", None)
        self.mark = secrets.randbelow(MAX_MARK)
        if os.getpid() == _tests:
            then = partial(resource.setrlimit, resource.RLIMIT_MSGQUEUE, (self.mark, MAX_MARK))
        variables = dict(os.environ if options.get("env") is None else options["env"])
        if host is not None:
            words = [str(word) for word in host.wrap(words)]
        elif not real and is_forkable(words, variables, options.get("cwd") or ""):
            then = partial(_become, words, variables, options.get("pass_fds", ()), then)
        super().__init__(words, *more, preexec_fn=then, **options)

    def processes(self) -> list[psutil.Process]:
        """The program and its descendants that are alive, found by a limit that each inherits."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                is_zombie = process.status() == psutil.STATUS_ZOMBIE
                if not is_zombie and process.rlimit(psutil.RLIMIT_MSGQUEUE)[0] == self.mark:
                    found.append(process)
        return found

    def kill_all(self) -> None:
        """Kill the program and its descendants."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.wait()


def run(args: Sequence[str | Path] | str, **options: Any) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`, and with the further arguments of `Popen`."""
    with mock.patch.object(subprocess, "Popen", Popen):
        return subprocess.run(args, **options)


def run_line(line: str, *, env: Mapping[str, str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a line as bash does. What needs no shell is a fork of this process, if possible."""
    words = [] if {*line} & {*SPECIAL} else shlex.split(line)
    variables = dict(env)
    while words and re.match(r"\w+=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    if words[:1] and words[0] in PROGRAMS:
        return run([*PROGRAMS[words[0]], *words[1:]], env=variables, **options)
    return run(["bash", "-c", line], env=env, **options)


def is_forkable(words: Any, variables: Mapping[str, str], cwd: str | Path = "") -> bool:
    """Return whether a command is a Python program that can be a fork of this process. It starts in `cwd`.

    A process that has run a script has its modules: it can only start new interpreters.
    """
    main = getattr(sys.modules["__main__"].__spec__, "name", "")
    if not _tests or (os.getpid() != _tests and not main.startswith(("samestep.__main__", "torch.distributed.run"))):
        return False
    if not isinstance(words, list) or len(words) < 2 or words[0] != sys.executable:
        return False
    first = words[2] if words[1] in FLAGS and len(words) > 2 else words[1]
    if first not in ("-m", "-c") and (first.startswith("-") or not os.path.isfile(os.path.join(cwd, first))):
        return False
    return variables.get("PYTHONHASHSEED", "0") == "0" and _read_at_start(variables) == _read_at_start(os.environ)


def _read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    names = {name for name in variables if name.startswith(READ_AT_START)}
    return {name: variables[name] for name in names.difference(HANDLED)}


def prepare() -> None:
    """Import what programs import, once, in the process that runs the tests."""
    global _tests, _base_path
    own = (TESTS, os.path.dirname(sys.executable))  # of pytest
    _base_path = [entry for entry in sys.path if entry and not entry.startswith(own)]
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ["OMP_WAIT_POLICY"] = "passive"  # if the cores are busy, active waiting costs more
    forkserver.preload()
    forkserver._start_server = _fork_server
    importlib.import_module(TORCHRUN_STARTS).Popen = Popen
    import torch

    torch.set_num_threads(1)  # a fork does not copy threads
    _use_huge_pages()
    _tests = os.getpid()


def _fork_server(fd: int) -> int:
    """Fork this process in place of a new one that imports the same, as the server that forks ranks."""
    variables = dict(os.environ)
    if (pid := os.fork()) == 0:
        try:
            os.setsid()
            _leave_tests(variables, [fd])
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            _open_streams(is_unbuffered=False)
            forkserver.serve(Connection(fd))
        finally:
            os._exit(1)
    return pid


def _use_huge_pages() -> None:
    """Move this process's private memory to huge pages: a fork copies the page table, of 57,000 entries otherwise."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *_, name = (*line.split(maxsplit=5), "")[:6]
        if mode.startswith("rw-p") and not name.startswith(("/", "[stack", "[v")):
            begin, end = (int(address, 16) for address in span.split("-"))
            for address in range(-(-begin // HUGE_BYTES) * HUGE_BYTES, end - HUGE_BYTES + 1, HUGE_BYTES):
                madvise(address, HUGE_BYTES, MADV_COLLAPSE)


def _become(words: list[str], variables: Mapping[str, str], kept: Sequence[int], then: Callable[[], object]) -> None:
    """In the child: run the program in place of its interpreter, and end."""
    try:
        if then is not None:
            then()
        _leave_tests(variables, kept)
        _run(words)
    finally:
        os._exit(1)


def _leave_tests(variables: Mapping[str, str], kept: Sequence[int]) -> None:
    """Undo what the tests have changed, and what libraries read from the environment."""
    gc.freeze()
    gc.enable()
    faulthandler.disable()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in (0, 1, 2, null, *kept):  # objects of the tests may still close these numbers
            os.dup2(null, fd, inheritable=False)
    os.environ.clear()
    os.environ.update(variables)
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    subprocess.Popen = Popen  # type: ignore[misc]
    sys.excepthook = sys.__excepthook__
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # torch's would take 40 ms at exit
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = _show_warning
    logging.getLogger().handlers.clear()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")]
    tempfile.tempdir = None
    import numpy as np
    import torch

    np.random.seed()
    random.seed()
    torch.default_generator.seed()
    torch.set_num_threads(int(variables.get("OMP_NUM_THREADS", "1")))
    # What a run in the process of the tests has set:
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def _show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=sys.stderr)


def _open_streams(is_unbuffered: bool) -> None:
    """Open the standard streams as Python does when it starts."""
    assert sys.__stdout__ is not None
    usual = sys.__stdout__.errors
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        raw = open(number, mode + "b", buffering=0 if is_unbuffered and mode == "w" else -1, closefd=False)  # noqa: SIM115
        getattr(raw, "raw", raw).name = f"<{name}>"
        is_line_buffered = not is_unbuffered and (name == "stderr" or os.isatty(number))
        errors = "backslashreplace" if name == "stderr" else usual
        stream = io.TextIOWrapper(raw, "utf-8", errors, None, is_line_buffered, is_unbuffered)
        stream.mode = mode  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(words: list[str]) -> NoReturn:
    """Run the program, and end as Python does: print the last exception, wait for threads, run atexit handlers."""
    flag, *rest = words[1:] if words[1] in FLAGS else ["", *words[1:]]
    _open_streams(is_unbuffered=flag == "-u" or bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.orig_argv[:] = words
    given = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*given, *_base_path]
    if any(os.path.exists(os.path.join(entry, "sitecustomize.py")) for entry in given):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    if rest[:2] == ["-m", "samestep"]:
        os.environ.setdefault("PYTHONHASHSEED", "0")  # else it starts itself again, to have that
    code = 0
    try:
        if rest[0] == "-c":
            program, main = _load_text(*rest[1:])
        elif rest[0] == "-m":
            program, main = load_main("module", rest[1], rest[2:])
        else:
            program, main = load_main("script", rest[0], rest[1:])
        exec(program, main.__dict__)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = (error.code or 0) & 0xFF if isinstance(error.code, int | None) else 1
    except BaseException as error:
        code, frames = 1, error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, rank_process.__file__):
            frames = frames.tb_next
        sys.last_value = error
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        if isinstance(error, KeyboardInterrupt):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    leave(code, waits=True)


def _load_text(text: str, *arguments: str) -> tuple[types.CodeType, types.ModuleType]:
    sys.argv = ["-c", *arguments]
    sys.path.insert(0, "")
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins)
    return compile(text, "<string>", "exec", dont_inherit=True), main
