"""A process that has imported torch and samestep once, and runs Python programs as forks of itself.

A program costs about 0.05 s of CPU here; a new interpreter costs 4 s. In its process a program finds what
`python ARGUMENTS` would give it: arguments, environment, current directory, files, signal handlers, search path,
standard streams, `__main__`, and its end: exit code, traceback, atexit handlers. /proc shows its own arguments and
environment, too. Three things differ: modules are imported already, str hashes are those of PYTHONHASHSEED=0 where it
is not set (and of 0 or 1, by the rank, where it is `random`), and the interpreter is not torn down at the end.
"""

import atexit
import builtins
import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import io
import json
import os
import pkgutil
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

HASH_SEEDS = ("0", "1")  # of a server, and of another one that it starts on demand
TORCHRUN_STARTS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
PRELOAD = ("torch.distributed.run", TORCHRUN_STARTS, "psutil", "numpy")
ON_DEMAND = {"digits": "sklearn.datasets"}  # if a program has this argument; otherwise 2 s of CPU in each rank
PROGRAMS = ("samestep.__main__", "samestep.recipes.")
LENGTH = struct.Struct("!I")
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
ARGUMENTS_START = 47  # of /proc/self/stat's fields, followed by the arguments' end, the environment's start and end
SPACE = "SPACE_FOR_ENVIRONMENT"  # a variable whose value reserves space for what /proc shows


def start(life: socket.socket, listener: socket.socket, hash_seed: str) -> int:
    """Start a server that takes requests from `listener` until `life` is closed. Returns its pid."""
    package = str(Path(__file__).parents[1])
    code = (
        f"import sys; base = sys.path[1:]; sys.path.insert(1, {package!r})\n"
        f"from support.command_server import serve; serve({life.fileno()}, {listener.fileno()}, base)"
    )
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    variables["OMP_WAIT_POLICY"] = "passive"  # of the forks' threads: if the cores are busy, active waiting costs more
    variables[SPACE] = " " * 100_000
    # The long argument reserves space for the arguments of programs.
    process = subprocess.Popen(
        [sys.executable, "-c", code, "support.command_server", " " * 20_000],
        env=variables,
        stdin=subprocess.DEVNULL,
        pass_fds=[life.fileno(), listener.fileno()],
    )
    process.returncode = 0  # It ends when this process does; there is nothing to warn about.
    return process.pid


def send(connection: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    data = LENGTH.pack(len(data)) + data
    num_sent = socket.send_fds(connection, [data], list(fds))
    if num_sent < len(data):  # The other side may have answered and closed the connection.
        connection.sendall(data[num_sent:])


def receive(connection: socket.socket, max_fds: int = 0) -> tuple[Any, list[int]]:
    """Receive a message and its descriptors; None if the other side has ended, perhaps while it sent the message."""
    head, fds, _, _ = socket.recv_fds(connection, LENGTH.size, max_fds)
    head += _receive_bytes(connection, LENGTH.size - len(head))
    data = b""
    if len(head) == LENGTH.size:
        (num_bytes,) = LENGTH.unpack(head)
        data = _receive_bytes(connection, num_bytes)
        if len(data) == num_bytes:
            return json.loads(data), fds
    for fd in fds:
        os.close(fd)
    return None, []


def _receive_bytes(connection: socket.socket, num_bytes: int) -> bytes:
    """Receive so many bytes; fewer if the other side has ended."""
    data = b""
    while len(data) < num_bytes and (piece := connection.recv(num_bytes - len(data))):
        data += piece
    return data


def serve(life_fd: int, listener_fd: int, base_path: list[str]) -> None:
    """The server process."""
    _ignore_signals()
    import samestep
    from samestep.launch.forkserver import preload
    from support import commands  # noqa: F401  which keeps the current environment
    from support.preloaded import import_for_tests, make_forks_cheap

    gc.disable()
    import_for_tests()
    preload()
    own = (module.name for module in pkgutil.walk_packages(samestep.__path__, "samestep."))
    for name in (*PRELOAD, *(name for name in own if not name.startswith(PROGRAMS))):
        with suppress(samestep.Error, ImportError):  # an extra is not installed
            importlib.import_module(name)
    sys.excepthook = sys.__excepthook__  # a module without its extra has replaced it, for the process that imports it
    gc.collect()
    gc.freeze()
    gc.enable()
    make_forks_cheap()
    _Server(socket.socket(fileno=life_fd), socket.socket(fileno=listener_fd), base_path).run()


class _Server:
    def __init__(self, life: socket.socket, listener: socket.socket, base_path: list[str]) -> None:
        self.life, self.listener, self.base_path = life, listener, base_path
        self.programs: dict[int, socket.socket] = {}  # by pid
        self.lives: list[socket.socket] = []  # of the servers that this one has started
        self.woken, self.waker = socket.socketpair()
        for end in (self.woken, self.waker):
            end.setblocking(False)
        signal.set_wakeup_fd(self.waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector = selectors.DefaultSelector()
        for file in (self.life, self.listener, self.woken):
            self.selector.register(file, selectors.EVENT_READ)

    def run(self) -> NoReturn:
        while True:
            keys = [key for key, _ in self.selector.select()]
            ready = [key.fileobj for key in keys]
            for key in keys:
                if key.data is not None:
                    self.selector.unregister(key.fileobj)
                    key.data()
            if self.woken in ready:
                self.woken.recv(1 << 12)
                self.reap()
            if self.life in ready:
                break
            if self.listener in ready:
                client, _ = self.listener.accept()
                self.selector.register(client, selectors.EVENT_READ, partial(self.start, client))
        for pid in self.programs:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(os.path.dirname(self.listener.getsockname()), ignore_errors=True)
        os._exit(0)

    def start(self, client: socket.socket) -> None:
        request, fds = receive(client, 64)
        if request is None:
            client.close()
            return
        if "hash_seed" in request:
            self.start_server(request["address"], request["hash_seed"])
            send(client, None)
            client.close()
            return
        for word in ON_DEMAND if request["is_worker"] else ON_DEMAND.keys() & {*request["words"]}:
            with suppress(ImportError):
                importlib.import_module(ON_DEMAND[word])
        namespaces, fds = fds[:3], fds[3:]
        if (pid := os.fork()) == 0:
            code = 1
            try:
                code = self.become(client, request, namespaces, fds)
            finally:
                os._exit(code)
        for fd in (*namespaces, *fds):
            os.close(fd)
        self.programs[pid] = client
        if request["is_bound"]:  # The client sends nothing more until it ends.
            self.selector.register(client, selectors.EVENT_READ, partial(os.kill, pid, signal.SIGKILL))

    def start_server(self, address: str, hash_seed: str) -> None:
        if os.path.exists(address):
            return
        life, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{address}.new")
            listener.listen(64)
            os.rename(f"{address}.new", address)
            start(theirs, listener, hash_seed)
        self.lives.append(life)

    def reap(self) -> None:
        while self.programs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if (client := self.programs.pop(pid, None)) is not None:
                with suppress(OSError):  # its client has ended
                    send(client, {"pid": pid, "status": status})
                if client in self.selector.get_map():
                    self.selector.unregister(client)
                client.close()

    def become(self, client: socket.socket, request: dict[str, Any], namespaces: list[int], fds: list[int]) -> int:
        """In the child: run the program. Returns its exit code."""
        from support import commands
        from support.preloaded import fork_server

        address = os.path.join(os.path.dirname(self.listener.getsockname()), "socket")
        for file in namespaces:
            _enter(file)
        if request["host"]:
            _enter_host(*request["host"])
        answer = _take_files([*fds, client.fileno()], request["fds"])
        _reset_signals()
        if request["session"]:
            os.setsid()
        if request["group"] >= 0:
            os.setpgid(0, request["group"])
        if request["umask"] >= 0:
            os.umask(request["umask"])
        os.environ.clear()
        show("environment", [f"{name}={value}" for name, value in request["variables"].items()])
        show("arguments", request["words"])
        os.environ.update(request["variables"])
        os.chdir(request["cwd"])
        with socket.socket(fileno=answer) as started:
            send(started, {"pid": os.getpid(), "status": None})
        flag, words = "", request["words"][1:]
        if words[0] in commands.FLAGS:
            flag, *words = words
        _open_streams(is_unbuffered=flag == "-u" or bool(os.environ.get("PYTHONUNBUFFERED")))
        sys.executable = request["words"][0]
        sys.orig_argv[:] = request["words"]
        given = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        sys.path[:] = [*given, *self.base_path]
        if any(os.path.exists(os.path.join(directory, "sitecustomize.py")) for directory in given):
            sys.modules.pop("sitecustomize", None)
            importlib.import_module("sitecustomize")
        if request["is_worker"]:
            commands.open_server(self.fork)
            fork_server()
        else:
            commands.use_server(address)
            importlib.import_module(TORCHRUN_STARTS).Popen = commands.Popen
            if os.path.isfile(words[0]) and b"samestep.spawn(" in Path(words[0]).read_bytes():
                fork_server()
        is_samestep = words[:2] == ["-m", "samestep"] or os.path.basename(words[0]) == "samestep"
        is_launch = is_samestep and bool({"launch", "train"} & {*words[1:3]})
        _refresh(has_one_thread=is_launch or request["is_worker"])
        if is_samestep:
            os.environ.setdefault("PYTHONHASHSEED", HASH_SEEDS[0])  # Else it starts itself again, to have that.
        return _run_main(_find_program(words, is_safe=flag == "-P"))

    def fork(self, life: socket.socket, listener: socket.socket) -> int:
        """As `start`, but the new server is a fork of this process, which has one thread."""
        pid = os.fork()
        if pid == 0:
            try:
                keep_files(life.fileno(), listener.fileno())
                show("arguments", [sys.executable, "support.command_server"])
                _ignore_signals()
                _Server(life, listener, self.base_path).run()
            finally:
                os._exit(1)
        return pid


def _take_files(fds: list[int], numbers: list[int]) -> int:
    """Give this process the descriptors `fds` as `numbers`, and close all others except the last, which is returned."""
    *high, last = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(128, *numbers) + 1) for fd in fds]
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (*numbers, last):
            with suppress(OSError):  # the one that listed them
                os.close(int(name))
    return last


def keep_files(*fds: int) -> None:
    """Close all files except these and stderr. Stdin becomes empty, and stdout becomes stderr."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (1, 2, *fds):
            with suppress(OSError):  # the one that listed them
                os.close(int(name))
    os.open(os.devnull, os.O_RDONLY)
    os.dup2(2, 1)


def _ignore_signals() -> None:
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def show(what: str, words: Sequence[str]) -> None:
    """Make /proc show these arguments or this environment, by overwriting those that this process was started with."""
    first, last = (0, 1) if what == "arguments" else (2, 3)
    addresses = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[ARGUMENTS_START - 2 :]
    begin, end = int(addresses[first]), int(addresses[last])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))


def _enter(file: int) -> None:
    """Enter a namespace, unless this process is in it."""
    if not any(os.path.samestat(os.fstat(file), os.stat(f"/proc/self/ns/{name}")) for name in ("net", "uts", "mnt")):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), "cannot enter a namespace")


def _enter_host(namespace: str, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(file, CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(file)
    socket.sethostname(name)


def _open_streams(is_unbuffered: bool) -> None:
    """Open the standard streams as Python does when it starts."""
    assert sys.__stdout__ is not None
    encoding, errors = sys.__stdout__.encoding, sys.__stdout__.errors
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        raw = open(number, mode + "b", buffering=0 if is_unbuffered and mode == "w" else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            raw,
            encoding=encoding,
            errors="backslashreplace" if name == "stderr" else errors,
            line_buffering=not is_unbuffered and (name == "stderr" or os.isatty(number)),
            write_through=is_unbuffered,
        )
        raw_file = getattr(raw, "raw", raw)
        raw_file.name = f"<{name}>"
        stream.mode = mode  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _refresh(has_one_thread: bool) -> None:
    """Reset what differs in a new process, and what libraries read from the environment when they were imported. A
    worker has one thread: tests compute so little that a second one costs more than it saves.
    """
    import numpy as np
    import torch

    np.random.seed()
    torch.default_generator.seed()
    tempfile.tempdir = None
    given = os.environ.get("OMP_NUM_THREADS", "")
    num_threads = int(given) if given.isdecimal() else len(os.sched_getaffinity(0))
    if num_threads != torch.get_num_threads() and not has_one_thread:  # It starts threads.
        torch.set_num_threads(num_threads)


def _find_program(words: list[str], is_safe: bool) -> Callable[[], object]:
    """Find what `python WORDS` runs: a module, a command or a script. Sets sys.argv and the first entry of sys.path."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    if words[0] == "-m":
        sys.modules.pop(words[1], None)  # Else runpy warns that it has been imported.
        sys.argv = ["-m", *words[2:]]
        if not is_safe:
            sys.path.insert(0, os.getcwd())
        return lambda: runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        if not is_safe:
            sys.path.insert(0, "")
        main.__dict__.update(__loader__=importlib.machinery.BuiltinImporter)
        return lambda: exec(compile(words[1], "<string>", "exec", dont_inherit=True), main.__dict__)
    path = os.path.abspath(words[0])
    sys.argv = list(words)
    if not is_safe:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __loader__=loader, __cached__=None)

    def run() -> None:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)

    return run


def _run_main(run: Callable[[], object]) -> int:
    """Run it, and end as Python does: print the last exception, wait for threads, run atexit handlers."""
    code, is_interrupted = 0, False
    try:
        run()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = (error.code or 0) & 0xFF
        else:
            code = 1
            print(error.code, file=sys.stderr)
    except BaseException as error:
        code, is_interrupted = 1, isinstance(error, KeyboardInterrupt)
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        sys.last_value = error
        sys.excepthook(type(error), error.with_traceback(frames), frames)
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            code = 120
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code
