"""Ranks on this machine: a set of them as one thing to start, watch and stop, and `spawn`, which runs a function."""

import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from samestep.config import PREFIX
from samestep.errors import Error
from samestep.launch.forkserver import ForkServer, give_back_server, take_server
from samestep.launch.places import HOST, Place, build_variables
from samestep.world.environment import FINISHED, LEAVE, STOPPED
from samestep.world.private import make_private, read_private
from samestep.world.workdir import WorkDir

T = TypeVar("T")

MOST_LOCAL_RANKS = 1 << 12  # beyond all machines, so a slip of the finger
POLL_S = 0.1
FOLLOW_S = 0.5  # for the ranks to fail by themselves when one has: alike, or because they lost it
LEAVE_S = 1.0  # for the others to leave when they are told to
START_S = 10.0  # for ranks to exist that are told to stop before it was heard that they do
KILL_S = 30.0  # for the system to kill them: in a driver, say, it waits
TAIL_LINES = 20
MAX_REASON = 200  # characters
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL)


@dataclass(frozen=True)
class Target:
    """What ranks run: a "script" (file), a "module", a "recipe" (a module of ours) or a "call" (its pickle)."""

    kind: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def to_command(self) -> tuple[str, list[str]]:
        """The command of samestep that starts it, and the words after the command's options: none for a call."""
        if self.kind == "recipe":
            return "train", [self.name.rpartition(".")[2], *self.arguments]
        return "launch", [*(["-m"] if self.kind == "module" else []), self.name, *self.arguments]


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    Attributes:
        code: its exit code, or minus the signal that killed it.
        secondary: it is well and has only lost another rank.
        kind: "error" (an Error), "exception", "exit" (sys.exit), "stuck" (or a loader worker was killed: the message
            is a sentence) or "died" (nothing was left to say why).
        message: the error as one line.
        traceback: its traceback, where there was an exception.
        log: the end of its output, where that was not shown.
    """

    rank: int
    time_s: float
    code: int
    secondary: bool
    kind: str
    message: str
    traceback: str = ""
    log: str = ""

    def __str__(self) -> str:
        if self.kind == "stuck":  # a whole sentence
            return self.message
        what = {"exit": "exited with ", "exception": "raised ", "error": "raised "}.get(self.kind, "")
        return f"rank {self.rank} {what}{self.message}"

    @property
    def reason(self) -> str:
        """As one short line."""
        return " ".join(str(self).split())[:MAX_REASON]

    @property
    def exit_code(self) -> int:
        """As a shell counts: 128 + signal for a rank that was killed."""
        return self.code if self.code >= 0 else 128 - self.code


def open_store() -> Any:  # TCPStore
    """A store for the ranks to meet in, on a port of the system's choice that only this machine can reach."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server((HOST, 0), backlog=1024)
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=300)
    return TCPStore(HOST, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def parse_shown(text: str, num_ranks: int) -> frozenset[int]:
    """The ranks whose output goes to the terminal: "all", or numbers as in "0,2". Raises Error otherwise."""
    if text == "all":
        return frozenset(range(num_ranks))
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise Error(f"--show-ranks takes all, or ranks such as 0,2, not {text!r}")
    shown = frozenset(int(part) for part in parts)
    if max(shown) >= num_ranks:
        raise Error(f"--show-ranks names rank {max(shown)}, but the ranks are 0 to {num_ranks - 1}")
    return shown


class Ranks:
    """A set of ranks on this machine, forked by one server. When all have ended, they can be started again.

    Attributes:
        directory: a temporary one, for what ranks say about themselves; removed by `close`.
        shown: the ranks whose output goes to the terminal.
        num_ranks: how many, once they are asked for.
        world_size: how many there are with those of other machines.
        started: whether they exist.
        lost: nothing more is heard of some of them: they cannot be started again.
        codes: rank -> exit code (or minus the signal) of those that have ended.
        failures: those of them that have failed; not those that were told to stop, and did.
        told_to_stop: whether they were.
    """

    def __init__(self, server: ForkServer, shown: frozenset[int] = frozenset({0})) -> None:
        self._home = WorkDir()
        self.directory = self._home.path
        self.shown = shown
        self.num_ranks = self.world_size = 0
        self.started = self.lost = False
        self.codes: dict[int, int] = {}
        self.failures: list[Failure] = []
        self.told_to_stop = False
        self._told_s = math.inf
        self._server = server
        self._first_rank = 0
        self._well: dict[int, float] = {}  # rank -> when it ended by itself with exit code 0
        self._pids: list[int] = []

    def start(
        self, target: Target, variables: list[dict[str, str]], *, first_rank: int = 0, world_size: int | None = None
    ) -> None:
        """Asks for one rank per element of `variables`, its whole environment. Returns before they exist."""
        self.num_ranks, self._first_rank = len(variables), first_rank
        self.world_size = world_size or first_rank + len(variables)
        if self.started:
            self.started, self.told_to_stop, self._told_s = False, False, math.inf
            self.codes, self.failures, self._well = {}, [], {}
            try:
                make_private(self.directory)
            except PermissionError as error:
                raise Error(str(error)) from None
            for said in self.directory.iterdir():
                if said.name in (STOPPED, FINISHED, LEAVE) or said.suffix in (".json", ".log"):
                    said.unlink()
        marks = {PREFIX + "LAUNCHER": target.kind, PREFIX + "ERROR_DIR": str(self.directory)}
        self._server.start(
            [
                {"rank": rank, "variables": {**own, **marks}, "is_shown": rank in self.shown}
                for rank, own in enumerate(variables, start=first_rank)
            ],
            target=asdict(target),
            cwd=os.getcwd(),
            directory=str(self.directory),
        )

    @property
    def done(self) -> bool:
        """Whether every rank has ended."""
        return len(self.codes) == self.num_ranks

    def poll(self, timeout_s: float = POLL_S) -> None:
        """Notes what has happened, waiting for up to `timeout_s` where nothing has.

        Raises:
            Error: the ranks could not be started.
        """
        events = self._server.receive(timeout_s)
        if events is None:
            if not self.started:
                raise Error(
                    "the process that was to start the ranks has died, or was killed (out of memory?): look into the "
                    "system's log, and start again"
                )
            self._give_up()
            return
        for event in events:
            if "started" in event:
                self.started, self._pids = True, event["started"]
            else:
                self._end(event["rank"], event["code"], event["time_s"])

    def tell_to_stop(self, signum: int = signal.SIGTERM) -> None:
        """Sends a signal to the ranks: a run ends its step, saves and leaves; anything else dies of it."""
        self._note_told()
        self._server.signal(signum)

    def stop(self) -> None:
        """Some rank has failed: ends the others within seconds, also those that wait for it in a collective."""
        if self.started:
            self._poll_for(FOLLOW_S)
            if not self.done:
                with suppress(OSError):
                    (self.directory / LEAVE).touch()
                self.tell_to_stop()
                self._poll_for(LEAVE_S)
            self.kill()

    def kill(self) -> None:
        """Kills the ranks that still run, and their children, and waits for their end."""
        self._note_told()
        if self.started and not self.done:
            self._server.signal(signal.SIGKILL)
            self._poll_for(KILL_S)
            self._give_up()

    def _note_told(self) -> None:
        self.told_to_stop = True
        self._told_s = min(self._told_s, time.time())

    def _poll_for(self, timeout_s: float) -> None:
        """Until all have ended, or for that long."""
        deadline = time.monotonic() + timeout_s
        while not self.done and (left_s := deadline - time.monotonic()) > 0:
            self.poll(min(left_s, POLL_S))

    def first_failure(self) -> Failure | None:
        """The failure that the others follow from; where several ranks failed alike, that of a rank that is shown."""
        first = min(self.failures, key=lambda failure: (failure.secondary, failure.time_s), default=None)
        if first is not None and first.secondary and (early := self._find_early()) is not None:
            return early
        alike = [f for f in self.failures if first and (f.kind, f.message) == (first.kind, first.message)]
        return min(alike, key=lambda failure: (failure.rank not in self.shown, failure.rank), default=None)

    def _find_early(self) -> Failure | None:
        """Where a rank has only lost another one: that other one, where it has just left its run without an error."""
        if any((self.directory / name).exists() for name in (FINISHED, STOPPED)):
            return None
        if not self._well:
            return None
        rank, time_s = min(self._well.items(), key=lambda end: end[1])
        what = "ended before its run did, with exit code 0: let every rank come to the end of the loop"
        return Failure(rank, time_s, 1, False, "died", what)

    def close(self) -> None:
        """Removes the directory."""
        self._home.close()

    def find_log(self, rank: int) -> str:
        """Where all is that a rank has printed; "" where its run has not begun, or has no directory."""
        try:
            return os.readlink(self.directory / f"rank{rank}.log")
        except OSError:
            return ""

    def _end(self, rank: int, code: int, time_s: float) -> None:
        self.codes[rank] = code
        if not code and not self.told_to_stop:
            self._well[rank] = time_s
        # What was told to stop has not failed by being stopped. (Of an earlier end, the news may come later.)
        if code and not (time_s >= self._told_s and -code in STOP_SIGNALS):
            self.failures.append(self._read_failure(rank, code, time_s))

    def _read_failure(self, rank: int, code: int, time_s: float) -> Failure:
        tail = "" if rank in self.shown else _read_tail(self.directory / f"rank{rank}.log")
        try:
            record = json.loads(read_private(self.directory / f"{rank}.json"))
        except (OSError, ValueError):
            return Failure(rank, time_s, code, False, "died", _describe_death(code), log=tail)
        names = ("time_s", "secondary", "kind", "message", "traceback")
        return Failure(rank, code=record["exit_code"], log=tail, **{name: record[name] for name in names})

    def _give_up(self) -> None:
        """Nothing more will be heard of the ranks that still run: the server is gone, or cannot kill them."""
        for pid in self._pids:
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        for rank in set(range(self._first_rank, self._first_rank + self.num_ranks)) - set(self.codes):
            self.lost = True
            self._end(rank, -signal.SIGKILL, time.time())


def _read_tail(log: Path) -> str:
    """The last lines, less our own frames in what faulthandler prints."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    own = f'  File "{Path(__file__).parent}'
    return "\n".join([line for line in lines if not line.startswith(own)][-TAIL_LINES:])


def _describe_death(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")


def spawn(
    fn: Callable[..., T],
    nprocs: int = 1,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | None = None,
    env: Mapping[str, str] | None = None,
    show_ranks: str = "0",
) -> T:
    """Calls `fn(*args, **kwargs)` on each of `nprocs` ranks and returns what it returned on rank 0.

    The function may be a lambda, a closure, or one of a notebook or of `__main__`; scripts need no
    `if __name__ == "__main__"`. It, its arguments and the value travel by cloudpickle, tensors by value.
    The first call takes as long as importing torch, later ones about 0.1 s.

    Args:
        fn: what every rank calls.
        nprocs: number of ranks.
        args, kwargs: its arguments, the same on every rank.
        device: "cpu" or "cuda"; default: cuda when there is one.
        env: further variables for the ranks. Those that torch reads when it is imported come too late.
        show_ranks: whose output is shown: "all", or ranks such as "0,2".

    Raises:
        Error: `nprocs` is not a positive number.
        Exception: the one that the first failing rank raised, with that rank's traceback as a note.
        RuntimeError: a rank died, exited with a code, or raised what cannot be pickled.
        KeyboardInterrupt: after the ranks, told to stop, have ended; a second one kills them.
    """
    if not isinstance(nprocs, int) or nprocs < 1:
        raise Error(f"spawn needs nprocs of at least 1, not {nprocs!r}")
    shown = parse_shown(show_ranks, nprocs)
    call = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
    server = take_server()
    ranks = Ranks(server, shown)
    try:
        (ranks.directory / "call.pickle").write_bytes(call)
        (ranks.directory / "path.json").write_text(json.dumps([str(entry) for entry in sys.path]))
        store = open_store()
        variables = build_variables(nprocs, Place(store.port), {"device": device})
        ranks.start(Target("call", str(ranks.directory / "call.pickle")), [{**v, **(env or {})} for v in variables])
        _wait(ranks)
        failure = ranks.first_failure()
        if failure is not None:
            raise _rebuild_exception(failure, ranks.directory)
        return _read_value(ranks.directory)  # type: ignore[no-any-return]
    finally:
        if ranks.done:
            give_back_server(server)
        else:
            server.close()
        ranks.close()


def _read_value(directory: Path) -> Any:
    try:
        return cloudpickle.loads(read_private(directory / "value.pickle"))
    except FileNotFoundError:
        return None  # it has called sys.exit()
    except PermissionError as error:
        raise Error(str(error)) from None


def _wait(ranks: Ranks) -> None:
    try:
        while not ranks.done and not ranks.failures:
            ranks.poll()
        if ranks.failures:
            ranks.stop()
    except KeyboardInterrupt:
        # As a launcher does: ranks that can end their step and save; all others die of it.
        ranks.tell_to_stop()
        deadline = time.monotonic() + START_S
        while not ranks.done and (ranks.started or time.monotonic() < deadline):
            ranks.poll()
        raise


def _rebuild_exception(failure: Failure, directory: Path) -> BaseException:
    error: BaseException
    try:
        error = cloudpickle.loads(read_private(directory / f"{failure.rank}.pickle"))
    except Exception:
        error = RuntimeError(str(failure))
    if failure.traceback:
        error.add_note(f"rank {failure.rank} raised this:\n{failure.traceback}")
    elif failure.log:
        error.add_note(f"rank {failure.rank} printed at the end:\n{failure.log}")
    return error
