"""Starts programs for tests. Python programs run as forks of a process that has already imported torch.

`Popen` and `run` have the interface of those in `subprocess`; see `command_server` for the differences.
`find_programs` returns a directory with `python`, `samestep` and `torchrun`, which run on the server too: for shells,
ssh and Slurm, which start programs themselves.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from support import command_server
from support.command_server import HASH_SEEDS
from support.hosts import Host

# Variables that take effect when a program starts: if their values differ from the server's, it is not forked.
READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "MKL_", "KMP_", "OPENBLAS_", "GLIBC_")
UTF8 = (None, "C", "POSIX", "C.UTF-8", "en_US.UTF-8")  # locales that are equivalent for Python
HANDLED = ("PYTHONPATH", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
# scikit-learn sets these when it is imported. Torch does not use the OpenMP runtime that reads them.
IGNORED = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
FLAGS = ("-P", "-u")  # of the interpreter; torchrun starts its ranks with -u
NAMESPACES = ("net", "uts", "mnt")
WORKER = "worker"  # the program `python` of a worker of pytest-xdist
# Its first argument is its own path, beside which it finds the server.
CLIENT = """\
#!{python} -IS
import os, sys
sys.path.insert(0, {tests!r})
from support import commands
sys.exit(commands.run_as_client(sys.argv))
"""


class Popen(subprocess.Popen[Any]):
    """A program. A Python program is a fork of this process's command server, if possible.

    Args:
        real: start a new interpreter.
        host: on another host than this.
        is_bound: the program is killed when this process ends.
        is_worker: the program has servers of its own, as forks of itself.
    """

    def __init__(
        self,
        args: Sequence[str | Path] | str,
        *more: Any,
        real: bool = False,
        host: Host | None = None,
        is_bound: bool = False,
        is_worker: bool = False,
        **options: Any,
    ) -> None:
        self._real, self._host, self._is_bound, self._is_worker = real, host, is_bound, is_worker
        self._connection: socket.socket | None = None
        super().__init__(args if isinstance(args, str) else [str(word) for word in args], *more, **options)

    def _execute_child(  # type: ignore[override]
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Sequence[int], cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: bool, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, restore_signals: bool, gid: Any, gids: Any, uid: Any, umask: int,
        start_new_session: bool, process_group: int,
    ) -> None:  # fmt: skip
        if getattr(preexec_fn, "__module__", "") == "samestep.processes":  # It binds the launcher to its parent.
            self._is_bound = True
            rest = (executable, None, gid, gids, uid, shell or None)
        else:
            rest = (executable, preexec_fn, gid, gids, uid, shell or None)
        place = os.path.abspath(cwd) if cwd is not None else os.getcwd()
        variables = {os.fsdecode(n): os.fsdecode(v) for n, v in (os.environ if env is None else env).items()}
        if self._real or rest != (None,) * 6 or not os.path.isdir(place) or not is_forkable(args, variables, place):
            if self._host is not None:
                args = [str(word) for word in self._host.wrap(args)]
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                start_new_session, process_group,
            )  # fmt: skip
            return
        if self._host is not None:
            variables |= self._host.variables
        files = [0 if p2cread == -1 else p2cread, 1 if c2pwrite == -1 else c2pwrite, 2 if errwrite == -1 else errwrite]
        request = {
            "words": list(args), "cwd": place, "variables": variables, "fds": [0, 1, 2, *pass_fds], "umask": umask,
            "session": start_new_session, "group": process_group, "is_bound": self._is_bound,
            "is_worker": self._is_worker,
            "host": self._host and (self._host.namespace, self._host.name),
        }  # fmt: skip
        namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(_find_server(choose_hash_seed(variables)))
        command_server.send(connection, request, [*namespaces, *files, *pass_fds])
        for file in namespaces:
            os.close(file)
        started, _ = command_server.receive(connection)
        self.pid, self._connection = started["pid"], connection
        if started["status"] is not None:
            raise RuntimeError(f"{args} could not be started on the command server")
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        if wait_flags & os.WNOHANG and not select.select([self._connection], [], [], 0)[0]:
            return 0, 0
        ended, _ = command_server.receive(self._connection)
        self._connection.close()
        return self.pid, signal.SIGKILL if ended is None else ended["status"]

    def _internal_poll(self, _deadstate: int | None = None, *_: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(_deadstate)  # type: ignore[misc,no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def run(
    args: Sequence[str | Path] | str,
    *,
    input: str | bytes | None = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`, and with the further arguments of `Popen`."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def is_forkable(words: Any, variables: Mapping[str, str], cwd: str = "") -> bool:
    """Return whether a command is a Python program that a fork of the server can run. It starts in `cwd`."""
    if not isinstance(words, list | tuple) or len(words) < 2 or str(words[0]) not in (sys.executable, _python):
        return False
    first = words[2] if words[1] in FLAGS and len(words) > 2 else words[1]
    if first not in ("-m", "-c") and (str(first).startswith("-") or not os.path.isfile(os.path.join(cwd, first))):
        return False
    if choose_hash_seed(variables) not in HASH_SEEDS:
        return False
    names = {name for name in (*variables, *_variables) if name.startswith(READ_AT_START)}
    for name in names.difference(HANDLED, IGNORED):
        given, known = variables.get(name), _variables.get(name)
        is_locale = name.startswith(("LC_", "LANG"))
        if given != known and not (is_locale and given in UTF8 and known in UTF8):
            return False
    return True


def choose_hash_seed(variables: Mapping[str, str]) -> str:
    """Return the hash seed of a program: PYTHONHASHSEED, by default 0. With `random`, ranks 0 and 1 have different
    ones.
    """
    seed = variables.get("PYTHONHASHSEED", HASH_SEEDS[0])
    return HASH_SEEDS[int(variables.get("RANK", 0)) % 2] if seed == "random" else seed


_variables: Mapping[str, str] = dict(os.environ)  # of the server
_address = ""  # of the server
_python = sys.executable  # the program `python` of `find_programs`, if there is one


def open_server(start: Callable[[socket.socket, socket.socket], int]) -> None:
    """Start a server for this process by `start`, which has the interface of `command_server.start`."""
    global _address, _variables
    _address = os.path.join(tempfile.mkdtemp(prefix="commands-", dir="/tmp"), "socket")
    life, theirs = socket.socketpair()
    with theirs, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(_address)
        listener.listen(64)
        _variables = dict(os.environ)
        pid = start(theirs, listener)
    _write_programs(Path(_address).with_name("bin"))
    atexit.register(_end_server, os.getpid(), pid, life)


def _find_server(hash_seed: str = HASH_SEEDS[0]) -> str:
    """Return the address of the server with a PYTHONHASHSEED. It is started on first use."""
    if not _address:
        open_server(partial(command_server.start, hash_seed=HASH_SEEDS[0]))
    if hash_seed == HASH_SEEDS[0]:
        return _address
    address = f"{_address}-{hash_seed}"
    if not os.path.exists(address):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(_address)
            command_server.send(connection, {"hash_seed": hash_seed, "address": address})
            command_server.receive(connection)
    return address


def _end_server(client: int, pid: int, life: socket.socket) -> None:
    if os.getpid() == client:  # and not a fork of it
        life.close()
        os.waitpid(pid, 0)


def use_server(address: str) -> None:
    """In a program on the server: run the Python programs that it starts on the server, too."""
    global _address, _python
    _address, _python = address, os.path.join(os.path.dirname(address), "bin", "python")
    subprocess.Popen = Popen  # type: ignore[misc]


def find_programs() -> Path:
    """Return a directory for PATH."""
    return Path(_find_server()).with_name("bin")


def _write_programs(directory: Path) -> None:
    directory.mkdir()
    (directory / "server.json").write_text(json.dumps({"python": sys.executable, "variables": dict(_variables)}))
    for name in ("python", "samestep", "torchrun", WORKER):
        path = directory / name
        path.write_text(CLIENT.format(python=sys.executable, tests=str(Path(__file__).parents[1])))
        path.chmod(0o755)


def run_as_client(words: list[str]) -> int:
    """Run a program of `find_programs` on the server: pass signals on to it, and end with its exit code."""
    global _variables
    program = Path(words[0])
    server = json.loads(program.with_name("server.json").read_text())
    sys.executable, _variables = server["python"], server["variables"]
    use_server(str(program.parents[1] / "socket"))
    is_worker = program.name == WORKER
    if is_worker:
        command = [sys.executable, *words[1:]]
    elif program.name == "python":
        command = [str(program), *words[1:]]
    else:
        command = [sys.executable, str(Path(sys.executable).with_name(program.name)), *words[1:]]
    if not is_forkable(command, os.environ):
        os.execv(sys.executable, [sys.executable, *command[1:]])
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCONT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until there is a process to pass them on to
    process = Popen(command, is_bound=True, is_worker=is_worker)
    for signum in signals:
        signal.signal(signum, lambda number, _: process.send_signal(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    code = process.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code
