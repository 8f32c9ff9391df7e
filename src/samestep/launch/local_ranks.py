"""The ranks of one launch on this machine: starts, watches and stops them, and reads why one failed."""

import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from samestep.config import PREFIX, Overrides, to_variables
from samestep.console import describe_ranks, print_error
from samestep.errors import Error, InvalidValue, Stuck, add_code
from samestep.files import open_regular, read_tail, read_text, replace_file
from samestep.launch.failure import RankEnds, RankFailure, describe_death, read_failure, write_failure
from samestep.launch.forkserver import ForkServer
from samestep.launch.target import Target
from samestep.processes import kill_group
from samestep.world.environment import (
    FAILURE,
    HEAL,
    LEAVE,
    OUTCOME,
    SECRET,
    Outcome,
    Restart,
    child_variables,
)
from samestep.world.workdir import WorkDir, make_private

HOST = "127.0.0.1"
MAX_LOCAL_RANKS = 1 << 12  # more than any machine runs, so a larger number is a typing error
POLL_S = 0.1
FOLLOW_S = 0.5  # after the first failure: time for other ranks to fail, with the same error or because they lost it
LEAVE_S = 1.0  # for the other ranks to end after SIGTERM
KILL_S = 30.0  # for killed ranks to end; a rank inside a driver call can take long
TAIL_LINES = 20
OTHER_SIZES = (
    " (by gloo, since a message had another size than it waited for): let all ranks make the same calls in the same "
    "order, and use the same parts of a sharded model in each micro-batch"
)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL)


@dataclass(frozen=True)
class Placement:
    """The position of one node's ranks among all ranks, and the rendezvous store.

    Attributes:
        host, port: address of the store.
        interface: the network interface to the other ranks; "" if unknown.
        num_restarts, restart: how often the ranks were restarted, and why the last time.
        secret: shared by all ranks of all nodes.
    """

    port: int
    host: str = HOST
    interface: str = "lo" if sys.platform == "linux" else ""  # else gloo resolves the host's name
    node: int = 0
    num_nodes: int = 1
    first_rank: int = 0
    world_size: int = 0
    num_restarts: int = 0
    restart: Restart | None = None
    secret: str = field(default_factory=secrets.token_hex)


def build_variables(
    num_ranks: int, place: Placement, overrides: Overrides, *, heals: bool = False
) -> list[dict[str, str]]:
    """Build the environment of each of the `num_ranks` ranks on this machine.

    Args:
        heals: whether the others continue if a rank dies.
    """
    backends = ("GLOO", "NCCL") if place.num_nodes > 1 else ("GLOO",)
    common = {
        "OMP_NUM_THREADS": str(overrides.get("num_threads") or 1),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for determinism; read when CUDA starts
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0" if heals else "1",  # 1 ends a rank if NCCL finds that another has died
        **({f"{backend}_SOCKET_IFNAME": place.interface for backend in backends} if place.interface else {}),
        **child_variables(),
        **to_variables(overrides),
        **(place.restart.to_variables() if place.restart is not None else {}),
        SECRET: place.secret,
        **({HEAL: "1"} if heals else {}),
        "WORLD_SIZE": str(place.world_size or num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(place.port),
        # Makes init_process_group connect to the existing store instead of opening one in rank 0.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(place.num_restarts),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": str(place.port),
    }
    return [{**common, "RANK": str(place.first_rank + i), "LOCAL_RANK": str(i)} for i in range(num_ranks)]


def open_store(listener: socket.socket | None = None, address: str = HOST) -> Any:  # TCPStore
    """Open a rendezvous store at `address`.

    It takes over the listening socket; None: a free port that only this machine can reach.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = listener or socket.create_server((HOST, 0), backlog=1024)
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=300)
    return TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def parse_shown(text: str, num_ranks: int) -> frozenset[int]:
    """Parse `--show-ranks`: "all", or numbers such as "0,2". Raises InvalidValue otherwise."""
    if text == "all":
        return frozenset(range(num_ranks))
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise InvalidValue(f"--show-ranks takes all, or ranks such as 0,2, not {text!r}", code="SS101")
    shown = frozenset(int(part) for part in parts)
    if max(shown) >= num_ranks:
        raise InvalidValue(
            f"--show-ranks names rank {max(shown)}, but the ranks are 0 to {num_ranks - 1}", code="SS101"
        )
    return shown


class Ranks:
    """The ranks on this machine, forked by one server. When all have ended, `start` can start them again.

    Attributes:
        directory: temporary; the ranks write reports into it. `close` removes it.
        shown: the ranks whose output goes to the terminal.
        num_ranks, world_size: of the last `start`; on this machine and on all machines.
        started: whether the processes exist.
        is_stopping: whether they were sent a signal to stop.
        lost: the server has ended, or could not kill a rank: the ranks cannot be started again.
        ends: how they have ended since the last `start`.
    """

    def __init__(self, server: ForkServer, shown: frozenset[int] = frozenset({0})) -> None:
        self._workdir = WorkDir()
        self.directory = self._workdir.path
        self.shown = shown
        self.num_ranks = self.world_size = 0
        self.started = self.lost = False
        self.ends = RankEnds()
        self.is_stopping = False
        self._server = server
        self._succeeded: dict[int, float] = {}  # rank -> time of its end with exit code 0, without a signal
        self._pids: dict[int, int] = {}
        self._is_killing = False
        self._failed_before: set[int] = set()  # ranks that had reported a failure when the ranks were sent a signal

    def start(self, target: Target, variables: list[dict[str, str]]) -> None:
        """Request one rank per element of `variables`, its whole environment. Returns before the processes exist."""
        if self.started:
            self.started = False
            self.is_stopping = self._is_killing = False
            self.ends = RankEnds()
            self._succeeded = {}
            self._pids = {}
            self._failed_before = set()
            try:
                make_private(self.directory)
            except PermissionError as error:
                raise Error(str(error), code="SS513") from None
            for path in self.directory.iterdir():
                if path.name in (OUTCOME, LEAVE) or path.suffix in (".json", ".log"):
                    path.unlink()
        self.num_ranks = len(variables)
        self.world_size = int(variables[0]["WORLD_SIZE"])
        marks = {PREFIX + "LAUNCHER": target.kind, PREFIX + "ERROR_DIR": str(self.directory)}
        are_all_shown = 1 < self.world_size <= len(self.shown)
        numbers = [int(own["RANK"]) for own in variables]
        self._server.start(
            [
                {"rank": rank, "variables": {**own, **marks}, "is_shown": are_all_shown or rank in self.shown}
                for rank, own in zip(numbers, variables, strict=True)
            ],
            target=asdict(target),
            cwd=os.getcwd(),
            directory=str(self.directory),
        )

    @property
    def done(self) -> bool:
        """Whether every rank has ended."""
        return len(self.ends.codes) == self.num_ranks

    @property
    def has_succeeded(self) -> bool:
        """Whether every rank has ended with exit code 0."""
        return self.done and self.ends.have_succeeded

    @property
    def outcome(self) -> Outcome:
        """How their run has ended."""
        try:
            return Outcome(read_text(self.directory / OUTCOME))
        except (OSError, ValueError):
            return Outcome.UNKNOWN

    def poll(self, timeout_s: float = POLL_S) -> None:
        """Process the server's next event, waiting up to `timeout_s` for it.

        Raises Error if the ranks could not be started.
        """
        try:
            event = self._server.receive(timeout_s)
        except (EOFError, OSError):
            if not self.started:
                raise Error(
                    "the process that starts the ranks has died or was killed (out of memory?): look into the system's "
                    "log, and start again",
                    code="SS513",
                ) from None
            self._give_up("was killed with the process that starts the ranks (out of memory?)")
            return
        if event is not None and "error" in event:
            if not self.started:
                raise Error(event["error"], code="SS513")
            self._give_up(f"was killed: {event['error']}")
        elif event is not None and "started" in event:
            self.started = True
            self._pids |= event["started"]
        elif event is not None:
            self._end(event["rank"], event["code"], event["time_s"], event["signals"])

    def request_stop(self, signum: int = signal.SIGTERM) -> None:
        """Send a signal to the ranks. A run completes its step, saves and ends; other programs are killed by it."""
        self._note_stop()
        self._server.signal(signum)

    def _note_stop(self) -> None:
        if not self.is_stopping:
            self.is_stopping = True
            self._failed_before = {rank for rank in self._pids if (self.directory / f"{rank}.json").exists()}

    def end_stuck(self, ranks: Sequence[int], reason: str) -> None:
        """Kill ranks that do not respond. `reason`: a sentence, for the failure."""
        for rank in ranks:
            if (pid := self._pids.get(rank)) is not None:
                write_failure(rank, str(self.directory), Stuck(reason), 1)
                kill_group(pid)

    def stop(self) -> None:
        """End the other ranks after a failure, within seconds, also those that wait in a collective."""
        if self.started:
            self._poll_for(FOLLOW_S)
            if not self.done:
                with suppress(OSError):
                    (self.directory / LEAVE).touch()
                self.request_stop()
                self._poll_for(LEAVE_S)
            self.kill()

    def kill(self) -> None:
        """Kill the ranks that still run, and their children, and wait for their end."""
        self._note_stop()
        self._is_killing = True
        if self.started and not self.done:
            self._server.signal(signal.SIGKILL)
            self._poll_for(KILL_S)
            self._give_up(describe_death(-signal.SIGKILL))

    def _poll_for(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.done and (left_s := deadline_s - time.monotonic()) > 0:
            self.poll(min(left_s, POLL_S))

    def first_failure(self) -> RankFailure | None:
        """Return the failure that caused the others. Of ranks with the same error, one that is shown is preferred.

        Call when all ranks have ended, so that their output is complete.
        """
        first = self.ends.first_failure
        if first is not None and first.secondary and self._succeeded and self.outcome is not Outcome.STOPPED:
            # The others have lost a rank that ended before them with exit code 0. It counts even if its loop is
            # finished, because a further loop or an evaluation can follow.
            rank, time_s = min(self._succeeded.items(), key=lambda end: end[1])
            waiting = f", while rank {first.rank} waited in {first.call}" if first.call else ""
            message = (
                f"ended before its run did, with exit code 0{waiting}: let every rank make the same calls to the end "
                "of the script, run.evaluate among them"
            )
            return RankFailure(rank, time_s, 1, False, "died", message)
        alike = [f for f in self.ends.failures if first and (f.kind, f.message) == (first.kind, first.message)]
        failure = min(alike, key=lambda failure: (failure.rank not in self.shown, failure.rank), default=first)
        if failure is None:
            return None
        try:
            text = read_tail(Path(self.find_log(failure.rank) or self.directory / f"rank{failure.rank}.log"))
        except OSError:
            text = ""
        if failure.code == -signal.SIGABRT and "op.preamble.length <= op.nbytes" in text:  # gloo's message
            failure = replace(failure, message=f"{failure.message}{OTHER_SIZES}")
        return failure if failure.rank in self.shown else replace(failure, log=_cut(text))

    def record(self, failure: RankFailure) -> None:
        """Write the failure that ended this start beside its logs, unless the rank has only lost another one."""
        log = self.find_log(failure.rank)
        if log and not failure.secondary:
            content = json.dumps({"rank": failure.rank, "reason": failure.reason})
            with suppress(OSError):
                replace_file(Path(log).with_name(FAILURE), content.encode())

    def report(self, failure: RankFailure, then: str = "") -> None:
        """Print a failure; the reason comes last, and once. `then`: what follows, if the launch does not end."""
        lines: list[str] = []
        if failure.kind == "error":
            lines.append(f"samestep: error: {add_code(failure.message, failure.error_code)}")
        elif failure.kind != "exit" or failure.rank not in self.shown:  # a shown rank that exits has printed its reason
            if failure.log and not failure.traceback:
                where = self.find_log(failure.rank)
                lines += [f"samestep: the end of rank {failure.rank}'s output{where and f' ({where})'}:", failure.log]
            own = [other for other in self.ends.failures if other.rank != failure.rank and not other.secondary]
            same = [other.rank for other in own if other.message == failure.message]
            lines += [f"samestep: {other.reason}" for other in own if other.rank not in same]
            others = ""
            if self.world_size > 1:
                others = f"; the same for {describe_ranks(same)}" if same else "; the others were stopped"
            if failure.traceback:
                lines += [f"samestep: rank {failure.rank} of {self.world_size} failed{others}"] if others else []
                lines.append(failure.traceback.rstrip("\n"))
            elif not then:
                lines.append(f"samestep: {failure}{others}")
        if then:
            lines.append(f"samestep: {failure.reason}{then}")
        for line in lines:
            print_error(line)

    def close(self) -> None:
        """Remove the directory."""
        self._workdir.close()

    def find_log(self, rank: int) -> str:
        """Return the path of a rank's log in the run's directory; "" if the run has not started or has no directory."""
        try:
            return os.readlink(self.directory / f"rank{rank}.log")
        except OSError:
            return ""

    def _end(self, rank: int, code: int, time_s: float, signals: Sequence[int], death: str = "") -> None:
        """Note the end of a rank. `signals`: which it was sent."""
        self._pids.pop(rank, None)  # another process may get its number
        if not code and not self.is_stopping:
            self._succeeded[rank] = time_s
        # A rank that ends by the signal that it was sent has not failed.
        is_obedient = -code in (signals if code == -signal.SIGKILL else STOP_SIGNALS) and bool(signals)
        failure = read_failure(rank, self.directory) if code else None
        if is_obedient and rank not in self._failed_before:
            failure = None  # else it failed before, and had not ended yet
        if code and not is_obedient and failure is None:
            failure = RankFailure(rank, time_s, code, False, "died", death or describe_death(code))
        if failure is not None:
            log = self.find_log(rank)
            if log and failure.traceback and not failure.secondary:  # not printed by the rank
                with suppress(OSError), open(log, "a", opener=open_regular) as file:
                    file.write(failure.traceback)
        self.ends.add(rank, code, failure)

    def _give_up(self, death: str) -> None:
        """Treat the remaining ranks as killed: the server has ended, or cannot kill them. `death`: for the message."""
        for pid in self._pids.values():
            kill_group(pid)
        for rank in [*self._pids]:
            self.lost = True
            self._end(rank, -signal.SIGKILL, time.time(), [signal.SIGKILL] if self._is_killing else [], death)


def _cut(log: str) -> str:
    """Return the last lines of a log, without samestep's frames in a traceback of faulthandler."""
    own = f'  File "{Path(__file__).parent}'
    return "\n".join([line for line in log.splitlines() if not line.startswith(own)][-TAIL_LINES:])
