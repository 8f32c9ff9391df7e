"""A process that imports torch once and forks every rank: a set of ranks starts in 0.1 s instead of two seconds.

`ForkServer` is the client side. The server process (`serve`) has one thread. It receives requests to start and to
signal ranks over a Unix socket, and sends an event when ranks have started and when one has ended. When the socket
closes because the client has ended, the server kills every rank and their children, and ends.
docs/dev/forkserver.md explains why the server of multiprocessing is not used.
"""

import gc
import importlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, NoReturn

from samestep.console import print_error
from samestep.errors import Error
from samestep.launch.rank_process import FORWARDED_SIGNALS, keep_signal, run_rank
from samestep.launch.rank_reports import redirect_output
from samestep.processes import Held, die_with_parent, hold, kill_group, wait_until
from samestep.world.environment import child_variables

# What ranks import. The first optimizer imports torch._dynamo, which takes as long as torch itself.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "torch.utils.data", "samestep.train.run")

CLOSE_S = 5.0


class ForkServer(Held):
    """A running fork server, for one launch at a time.

    The constructor returns while the server still imports; requests wait in the socket.

    Args:
        fork: fork this process instead of starting a new one, so that both import torch once. Only for a process with
            a single thread that exits after the launch.

    Raises:
        Error: no further process can be started.
    """

    def __init__(self, *, fork: bool = False) -> None:
        self._connection, theirs = Pipe()
        self._has_ended = False
        with theirs:
            try:
                self._pid = self._fork(theirs) if fork else _start_server(theirs.fileno())
            except OSError as error:
                raise _explain_fork(error) from None
        hold(self)

    def _fork(self, theirs: "Connection[Any, Any]") -> int:
        gc.disable()  # as in `preload`
        import torch  # noqa: F401

        pid = os.fork()
        if pid == 0:
            try:
                self._connection.close()
                os.setsid()
                with open(os.devnull) as null:
                    os.dup2(null.fileno(), 0)
                if not sys.flags.safe_path and sys.path[:1] == [_program_directory()]:
                    del sys.path[0]  # ranks insert the directory of their own script
                serve(theirs)
            finally:
                os._exit(1)
        gc.enable()
        return pid

    def start(self, ranks: list[dict[str, Any]], *, reports: int, **common: Any) -> None:
        """Fork ranks, after the end of earlier ones. They inherit this process's stdout and stderr.

        For `reports` and the other fields see `rank_process.run_rank`.
        """
        with suppress(OSError):  # `receive` reports that the server has ended
            self._connection.send({"start": ranks, "common": common})
            for file in (1, 2, reports):
                send_handle(self._connection, file, self._pid)

    def signal(self, signum: int, spared: Sequence[int] = ()) -> None:
        """Send a signal to every running rank but those in `spared`; SIGKILL also goes to their children."""
        with suppress(OSError):  # the server has ended, and its ranks with it
            self._connection.send({"signal": int(signum), "spared": [*spared]})

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next event, waiting up to `timeout_s` for it; None if there is none.

        Raises EOFError or OSError if the server has ended.
        """
        return self._connection.recv() if self._connection.poll(timeout_s) else None

    def is_alive(self) -> bool:
        """Return whether the server still runs."""
        if not self._has_ended:
            self._has_ended = os.waitpid(self._pid, os.WNOHANG) != (0, 0)
        return not self._has_ended

    def close(self) -> None:
        """End the server, its ranks and their children, and wait for it."""
        self._connection.close()
        if self.is_alive():
            os.kill(self._pid, signal.SIGTERM)  # ends it while it imports and does not read the socket; ignored later
            with suppress(ChildProcessError):  # something else has waited for it
                if not wait_until(lambda: not self.is_alive(), CLOSE_S, every_s=0.001):
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
            self._has_ended = True

    def forget(self) -> None:
        self._connection.close()  # it would keep the server alive after the client's end
        self._has_ended = True


def _program_directory() -> str:
    """Return the entry that Python has inserted into sys.path for this program."""
    if sys.modules["__main__"].__spec__ is not None:  # python -m
        return os.getcwd()
    return os.path.dirname(os.path.realpath(sys.argv[0]))


def _start_server(fd: int) -> int:
    """Start a server in a new process, connected through `fd`. Returns its pid."""
    # -P: a file in the working directory must not shadow a module that torch imports.
    code = (
        f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); "
        "from multiprocessing.connection import Connection; "
        "from samestep.launch.forkserver import serve; serve(Connection(3))"
    )
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", "-c", code],
        child_variables(),
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, 3), (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
        setsid=True,  # only the launcher receives Ctrl-C from the terminal
    )


def serve(client: "Connection[Any, Any]") -> NoReturn:
    """Run the server."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)  # the server ends with its client, not before
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A fork does not copy the threads that numpy starts on import, nor CUDA, which torch.cuda.is_available() starts
    # without the last of these variables.
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # noqa: TID251
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # noqa: TID251
    preload()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = _Server(client)
    try:
        server.run()
    except BaseException as error:  # it ends all ranks, too
        if isinstance(error, Error):
            server.send({"error": str(error)})
        else:
            server.send({"error": f"the process that starts the ranks has failed ({type(error).__name__}: {error})"})
            print_error("".join(traceback.format_exception(error)))
        os._exit(1)
    os._exit(0)


def _explain_fork(error: OSError) -> Error:
    """Explain why a process could not be started."""
    return Error(
        f"this machine starts no further process for a rank ({error.strerror}): raise the limit on processes "
        "(ulimit -u, or pids.max of the container) or on memory, or start fewer ranks",
        code="SS513",
    )


def preload() -> None:
    """Import what ranks need.

    The garbage collector is off, which saves a quarter of the time. It never visits the imported objects later, so that
    their pages stay shared after the fork.
    """
    gc.disable()
    for name in PRELOAD:
        # A module that cannot be imported fails in the rank that imports it, with a traceback.
        with suppress(Exception):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


class _Server:
    def __init__(self, client: "Connection[Any, Any]") -> None:
        self.client = client
        self.ranks: dict[int, tuple[int, int]] = {}  # pid -> rank, and a file descriptor that is readable at its end
        self.signals: list[int] = []  # which the ranks were sent
        self.directory = ""  # of the client, for temporary files

    def run(self) -> None:
        """Serve until the client closes the connection."""
        while True:
            ready = wait([self.client, *(file for _, file in self.ranks.values())])
            self.reap()
            if self.client not in ready:
                continue
            try:
                request = self.client.recv()
                files = [recv_handle(self.client) for _ in range(3)] if "start" in request else []
            except (EOFError, OSError):
                break
            if files:
                self.start(request["start"], request["common"], *files)
            else:
                self.send_signal(request["signal"], request["spared"])
        self.send_signal(signal.SIGKILL)
        for pid in self.ranks:
            os.waitpid(pid, 0)
        shutil.rmtree(self.directory, ignore_errors=True)  # a client that was killed has not removed it

    def send(self, event: dict[str, Any]) -> None:
        with suppress(OSError):  # `run` notices that the client has ended
            self.client.send(event)

    def start(self, ranks: list[dict[str, Any]], common: dict[str, Any], out: int, err: int, reports: int) -> None:
        self.directory = common["directory"]
        self.signals = []
        pids = {}
        # This process ignores them, and a rank would lose one until it has its handlers: `run_rank` unblocks them.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
        for fields in ranks:
            pid = self.fork(out, err, {**common, **fields, "reports": reports})
            self.ranks[pid] = fields["rank"], os.pidfd_open(pid)
            pids[fields["rank"]] = pid
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
        self.send({"started": pids})
        for file in (out, err, reports):
            os.close(file)

    def fork(self, out: int, err: int, fields: dict[str, Any]) -> int:
        """Fork a rank. Returns its pid. Raises Error if there can be no further process."""
        server_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            raise _explain_fork(error) from None
        if pid == 0:
            try:
                self.client.close()
                become_rank(server_pid, out, err, fields)
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(1)
        return pid

    def reap(self) -> None:
        """Reap the ranks that have ended, and kill the remaining processes of their groups."""
        for pid in [*self.ranks]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            rank, file = self.ranks.pop(pid)
            os.close(file)
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            self.send(
                {
                    "rank": rank,
                    "code": os.waitstatus_to_exitcode(status),
                    "time_s": time.time(),
                    "signals": [*self.signals],
                }
            )

    def send_signal(self, signum: int, spared: Sequence[int] = ()) -> None:
        self.reap()  # a rank that has ended before has not ended by this signal
        self.signals.append(signum)
        for pid, (rank, _) in self.ranks.items():
            if rank in spared:
                continue
            if signum == signal.SIGKILL:
                kill_group(pid)
            else:
                with suppress(OSError):  # it has just ended
                    os.kill(pid, signum)


def become_rank(server_pid: int, out: int, err: int, fields: dict[str, Any]) -> NoReturn:
    """In a child of the server: become the leader of a session that ends with the server, and run the rank."""
    os.setsid()
    die_with_parent()
    if os.getppid() != server_pid:
        os._exit(1)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, keep_signal)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    redirect_output(Path(fields["directory"], f"rank{fields['rank']}.log"), err, is_shown=fields.pop("is_shown"))
    run_rank(**fields)
