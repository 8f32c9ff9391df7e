"""A process that imports torch once and forks every rank from there: 0.1 s for a set of ranks instead of two seconds.

`ForkServer` is the side of the process that wants ranks. The server itself (`serve`) has one thread and speaks
JSON lines over a Unix socket: it is sent `start` and `signal`, and tells when ranks have started and ended.
It ends, and kills every rank and their children, when the socket closes: when whoever started it dies.

This is not `multiprocessing`'s forkserver because that one imports the caller's main script again in every rank,
and because its ranks keep it alive when the caller is killed.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

from samestep.launch.output_recorder import DRAIN_S, Recording
from samestep.launch.rank_process import keep_signal, run_rank
from samestep.world.environment import child_variables

# What ranks will need. The first optimizer imports torch._dynamo, which takes as long as torch itself.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "torch.utils.data", "samestep.train.run")

PR_SET_PDEATHSIG = 1
RECEIVE_BYTES = 1 << 16
CLOSE_S = 5.0


class ForkServer:
    """A running fork server, for one launch at a time.

    It goes on importing while the caller does other things; what is asked of it meanwhile waits in the socket.

    Args:
        fork: fork this process instead of starting a new one, which saves importing again what is imported here.
            Only for a process that has a single thread and does not come back from the launch.
    """

    def __init__(self, *, fork: bool = False) -> None:
        self._socket, theirs = socket.socketpair()
        self._received = b""
        self._ended = self._lost = False
        with theirs:
            self._pid = self._fork(theirs) if fork else _start_server(theirs.fileno())
        _open_servers.add(self)

    def _fork(self, theirs: socket.socket) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                self._socket.close()
                os.setsid()
                with open(os.devnull) as nothing:
                    os.dup2(nothing.fileno(), 0)
                if sys.path[:1] == [_program_directory()]:
                    del sys.path[0]  # Ranks have their own script's there.
                serve(theirs.detach())
            finally:
                os._exit(1)
        return pid

    def start(self, ranks: list[dict[str, Any]], **common: Any) -> None:
        """Forks ranks (see `rank.run_rank` for the fields); their stdout and stderr are this process's."""
        message = (json.dumps({"start": ranks, "common": common}) + "\n").encode()
        with suppress(OSError):  # It is gone, as `receive` will find.
            sent = socket.send_fds(self._socket, [message], [1, 2])
            self._socket.sendall(message[sent:])

    def signal(self, signum: int) -> None:
        """Sends a signal to every rank that still runs; SIGKILL goes to their children, too."""
        with suppress(OSError):  # The server is gone, and so are its ranks.
            self._socket.sendall((json.dumps({"signal": int(signum)}) + "\n").encode())

    def receive(self, timeout_s: float) -> list[dict[str, Any]] | None:
        """What has happened, waiting for it for up to `timeout_s`; None when the server is gone."""
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        finally:
            self._socket.settimeout(None)
        if not data:
            self._lost = True
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]

    @property
    def usable(self) -> bool:
        """Whether it can be asked for ranks."""
        return not self._lost and self._is_alive()

    def _is_alive(self) -> bool:
        if not self._ended:
            self._ended = os.waitpid(self._pid, os.WNOHANG) != (0, 0)
        return not self._ended

    def close(self) -> None:
        """Ends the server, its ranks and their children, and waits for it."""
        self._socket.close()
        if self._is_alive():
            os.kill(self._pid, signal.SIGTERM)  # It heeds this only while it imports: nothing reads the socket then.
        deadline = time.monotonic() + CLOSE_S
        while self._is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        if self._is_alive():
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        _open_servers.discard(self)

    def forget(self) -> None:
        """In a forked child: lets go of the socket, which would keep the server alive beyond its owner."""
        self._socket.close()


_open_servers: WeakSet[ForkServer] = WeakSet()
_preloaded = False
_idle_servers: list[ForkServer] = []


def _program_directory() -> str:
    """What Python has put at the head of sys.path for this program."""
    if sys.modules["__main__"].__spec__ is not None:  # python -m
        return os.getcwd()
    return os.path.dirname(os.path.realpath(sys.argv[0]))


def _start_server(fd: int) -> int:
    """A server in a process of its own, which talks through `fd`. Returns its pid."""
    package_parent = str(Path(__file__).parents[2])
    # -P: a file of the current directory must not stand in for one that torch imports.
    code = f"import sys; sys.path.append({package_parent!r}); from samestep.launch.forkserver import serve; serve(3)"
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", "-c", code],
        child_variables(),
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, 3), (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
        setsid=True,  # A Ctrl-C in the terminal is for the launcher alone.
    )


def take_server() -> ForkServer:
    """An idle server that has imported everything, or a new one."""
    with suppress(IndexError):
        while True:
            server = _idle_servers.pop()
            if server.usable:
                return server
            server.close()
    return ForkServer()


def give_back_server(server: ForkServer) -> None:
    """Keeps a server that has no ranks for the next launch of this process."""
    _idle_servers.append(server)


@atexit.register
def _close_idle() -> None:
    while _idle_servers:
        _idle_servers.pop().close()


def _forget_all() -> None:
    _idle_servers.clear()
    for server in list(_open_servers):
        server.forget()
    _open_servers.clear()


os.register_at_fork(after_in_child=_forget_all)


def serve(client_fd: int) -> NoReturn:
    """The server process."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)  # It ends with its owner, not before.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # What does not survive a fork: threads that numpy starts when imported, and CUDA, which
    # torch.cuda.is_available() starts unless it is told not to.
    os.environ.update({"OMP_NUM_THREADS": "1", **child_variables(), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    preload()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _Server(socket.socket(fileno=client_fd)).run()
    os._exit(0)


def preload() -> None:
    """Imports what ranks need, without garbage collection: a quarter faster. What is imported is never swept, either,
    so that its pages stay shared after the fork.
    """
    global _preloaded
    gc.disable()
    for name in PRELOAD:
        # A module that cannot be imported fails in the rank that wants it, with a traceback.
        with suppress(Exception):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    _preloaded = True


def is_preloaded() -> bool:
    """Return whether this process, or the one that it is a fork of, has called `preload`."""
    return _preloaded


class _Server:
    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.received = b""
        self.fds: list[int] = []  # stdout and stderr of the next ranks
        self.ranks: dict[int, int] = {}  # pid -> rank
        self.ended: dict[int, dict[str, Any]] = {}  # rank -> what is told when all that it printed is taken down
        self.recording: Recording | None = None
        self.is_told = False  # to end, by a signal
        self.directory: str | None = None
        self.woken, self.waker = socket.socketpair()
        self.woken.setblocking(False)
        self.waker.setblocking(False)
        signal.set_wakeup_fd(self.waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.client, selectors.EVENT_READ)
        self.selector.register(self.woken, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the client is gone."""
        while True:
            # Whoever is told to end does so, though nobody may read the terminal that is to show its last words.
            is_limited = self.is_told and bool(self.ended)
            ready = [key.fileobj for key, _ in self.selector.select(DRAIN_S if is_limited else None)]
            if self.woken in ready:
                self.woken.recv(RECEIVE_BYTES)
                self.reap()
            if self.recording is not None and self.recording in ready:
                self.tell_ends(self.recording.receive())
            if is_limited and not ready:
                self.tell_ends(None)
            if self.client in ready and not self.read():
                break
        self.send_signal(signal.SIGKILL)
        for pid in self.ranks:
            os.waitpid(pid, 0)
        self.stop_recording()
        if self.directory is not None:  # It is still there when the client was killed.
            shutil.rmtree(self.directory, ignore_errors=True)

    def read(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self.client, RECEIVE_BYTES, 2)
        except ConnectionError:
            return False
        self.fds += fds
        *lines, self.received = (self.received + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "signal" in message:
                self.send_signal(message["signal"])
            else:
                self.start(message["start"], message["common"])
        return bool(data)

    def tell(self, event: dict[str, Any]) -> None:
        with suppress(ConnectionError):  # The next read finds out.
            self.client.sendall((json.dumps(event) + "\n").encode())

    def start(self, ranks: list[dict[str, Any]], common: dict[str, Any]) -> None:
        server_pid = os.getpid()
        self.directory = common["directory"]
        self.is_told = False
        shown = {fields["rank"]: fields.pop("is_shown") for fields in ranks}
        out, err = self.fds
        self.recording = Recording(shown, out, err, self.directory, (self.client, self.woken, self.waker))
        self.selector.register(self.recording, selectors.EVENT_READ)
        self.fds = []
        gate = os.pipe()
        for fields in ranks:
            pid = os.fork()
            if pid == 0:
                self.become_rank(server_pid, self.recording, gate, {**common, **fields})
            self.ranks[pid] = fields["rank"]
        self.recording.begin()
        self.tell({"started": list(self.ranks)})
        for fd in gate:  # which lets them go: not before it is told that they are there
            os.close(fd)

    def become_rank(
        self, server_pid: int, recording: Recording, gate: tuple[int, int], fields: dict[str, Any]
    ) -> NoReturn:
        """In the child: a process of its own, that does not outlive the server."""
        try:
            os.setsid()
            prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux alone has it.
            if prctl is not None:
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server_pid:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(signum, signal.SIG_DFL)
            signal.signal(signal.SIGUSR1, keep_signal)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for end in (self.client, self.woken, self.waker):
                end.close()
            fields["variables"] |= recording.enter(fields["rank"])
            waits, opens = gate
            os.close(opens)
            os.read(waits, 1)
            os.close(waits)
            run_rank(**fields)
        finally:
            os._exit(1)

    def reap(self) -> None:
        """Notes which ranks have ended, and kills what they have left behind."""
        while self.ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid not in self.ranks:  # the recorder, as its socket tells
                continue
            rank = self.ranks.pop(pid)
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(status)
            self.ended[rank] = {"rank": rank, "code": code, "time_s": time.time()}
            if self.recording is not None:
                self.recording.finish(rank)
            else:
                self.tell_ends([rank])

    def tell_ends(self, ranks: list[int] | None) -> None:
        """Tells how ranks have ended whose output is taken down. None: of all; no more of it will be."""
        ends = [self.ended.pop(rank) for rank in (list(self.ended) if ranks is None else ranks)]
        if ranks is None or not (self.ranks or self.ended):
            self.stop_recording()  # before it is told that all is over
        for end in ends:
            self.tell(end)

    def stop_recording(self) -> None:
        """Ends the recorder, which does what it has begun."""
        if self.recording is not None:
            self.selector.unregister(self.recording)
            self.recording.close()
            self.recording = None

    def send_signal(self, signum: int) -> None:
        self.is_told = True
        for pid in self.ranks:
            with suppress(OSError):  # It has just ended, or is not yet the leader of its group.
                if signum == signal.SIGKILL:
                    os.kill(pid, signum)
                    os.killpg(pid, signum)
                else:
                    os.kill(pid, signum)
