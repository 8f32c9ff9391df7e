"""The processes of the ranks on this machine: starts and signals them, and reads why one has failed."""

import errno
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
from enum import Enum, auto
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from samestep.config import PREFIX, Overrides, to_variables
from samestep.console import describe_ranks, print_error
from samestep.errors import Error, InvalidValue, Stuck, add_code
from samestep.files import open_regular, read_tail, read_text, replace_file
from samestep.launch.failure import RankFailure, describe_death, read_failure, write_failure
from samestep.launch.forkserver import ForkServer
from samestep.launch.node_messages import Ended, Report, Started
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


def open_listener(address: str, port: int) -> socket.socket:
    """Listen at an address of this machine ("": all). Port 0 is a free one.

    Raises Error if the port cannot be opened.
    """
    reason = ""
    families = [socket.AF_INET6, socket.AF_INET] if socket.has_dualstack_ipv6() else [socket.AF_INET]
    if address:
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET]
    for family in families:
        try:
            both = family == socket.AF_INET6 and not address
            return socket.create_server((address, port), family=family, dualstack_ipv6=both, backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Error(f"port {port} is in use here: choose another one, on all nodes", code="SS509") from None
            reason = error.strerror or str(error)  # IPv6 can be turned off
    raise Error(f"port {port} cannot be opened here ({reason}): choose one above 1023", code="SS509")


def parse_shown(text: str, num_ranks: int | None = None) -> frozenset[int] | None:
    """Parse `--show-ranks`: "all" (None), or numbers such as "0,2". Raises InvalidValue otherwise.

    Args:
        num_ranks: the number of ranks, if it is known.
    """
    if text == "all":
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise InvalidValue(f"--show-ranks takes all, or ranks such as 0,2, not {text!r}", code="SS101")
    shown = frozenset(int(part) for part in parts)
    if num_ranks is not None and max(shown) >= num_ranks:
        raise InvalidValue(
            f"--show-ranks names rank {max(shown)}, but the ranks are 0 to {num_ranks - 1}", code="SS101"
        )
    return shown


class ProcessState(Enum):
    """The state of a rank's process."""

    REQUESTED = auto()
    RUNNING = auto()
    BLAMED = auto()  # it runs, and had reported a failure when it was sent a signal
    ENDED = auto()


@dataclass
class RankProcess:
    """The process of a rank. `pid` is 0 before it exists, and after its end: another process may get its number."""

    pid: int = 0
    state: ProcessState = ProcessState.REQUESTED


class Ranks:
    """The ranks on this machine, forked by one server. When all have ended, `start` can start them again.

    Attributes:
        directory: temporary; the ranks write reports into it. `close` removes it.
        shown: the ranks whose output goes to the terminal; None: all.
        processes: per rank of the last `start`.
    """

    def __init__(self, server: ForkServer, shown: frozenset[int] | None = frozenset({0})) -> None:
        self._workdir = WorkDir()
        self.directory = self._workdir.path
        self.shown = shown
        self.processes: dict[int, RankProcess] = {}
        self._server = server
        self._is_broken = False  # the server has ended

    def start(self, target: Target, variables: list[dict[str, str]]) -> None:
        """Request one rank per element of `variables`, its whole environment. Returns before the processes exist."""
        if self.processes:
            try:
                make_private(self.directory)
            except PermissionError as error:
                raise Error(str(error), code="SS513") from None
            for path in self.directory.iterdir():
                if path.name in (OUTCOME, LEAVE) or path.suffix in (".json", ".log"):
                    path.unlink()
        numbers = [int(own["RANK"]) for own in variables]
        self.processes = {rank: RankProcess() for rank in numbers}
        marks = {PREFIX + "LAUNCHER": target.kind, PREFIX + "ERROR_DIR": str(self.directory)}
        world_size = int(variables[0]["WORLD_SIZE"])
        are_all_shown = 1 < world_size <= len(self.shown or range(world_size))
        self._server.start(
            [
                {"rank": rank, "variables": {**own, **marks}, "is_shown": are_all_shown or self.is_shown(rank)}
                for rank, own in zip(numbers, variables, strict=True)
            ],
            target=asdict(target),
            cwd=os.getcwd(),
            directory=str(self.directory),
        )

    def is_shown(self, rank: int) -> bool:
        """Return whether the output of a rank goes to the terminal."""
        return self.shown is None or rank in self.shown

    @property
    def are_done(self) -> bool:
        """Whether every rank has ended, and the server can start others."""
        return not self._is_broken and all(each.state is ProcessState.ENDED for each in self.processes.values())

    @property
    def _have_started(self) -> bool:
        return any(each.state is not ProcessState.REQUESTED for each in self.processes.values())

    def poll(self, timeout_s: float = POLL_S) -> list[Started | Ended]:
        """Return what has happened since the last call, waiting up to `timeout_s` for it.

        Raises Error if the ranks could not be started.
        """
        try:
            event = self._server.receive(timeout_s)
        except (EOFError, OSError):
            event = {"error": ""}
        if event is None:
            return []
        if "error" in event:
            return self._give_up(event["error"])
        if "started" in event:
            for rank, pid in event["started"].items():
                self.processes[rank] = RankProcess(pid, ProcessState.RUNNING)
            return [Started()]
        return [self._end(event["rank"], event["code"], event["time_s"], event["signals"])]

    def signal(self, signum: int, *, is_failure: bool = False) -> None:
        """Send a signal to the ranks; SIGKILL goes to their children, too.

        A run completes its step, saves and ends after SIGTERM; other programs are killed by it.

        Args:
            is_failure: another rank has failed, so that they end at once.
        """
        if is_failure:
            with suppress(OSError):
                (self.directory / LEAVE).touch()
        for rank, process in self.processes.items():
            if process.state is ProcessState.RUNNING and (self.directory / f"{rank}.json").exists():
                process.state = ProcessState.BLAMED
        self._server.signal(signum)

    def end_stuck(self, ranks: Sequence[int], reason: str) -> None:
        """Kill ranks that do not respond. `reason`: a sentence, for the failure."""
        for rank in ranks:
            if pid := self.processes[rank].pid:
                write_failure(rank, str(self.directory), Stuck(reason), 1)
                kill_group(pid)

    def read_outcome(self) -> Outcome:
        """Return how the run of the ranks has ended, if they have noted it."""
        try:
            return Outcome(read_text(self.directory / OUTCOME))
        except (OSError, ValueError):
            return Outcome.UNKNOWN

    def report(self, report: Report) -> None:
        """Print the failure of a rank, whose output is complete; the reason comes last, and once."""
        failure = self.complete(report.failure)
        log = self.find_log(failure.rank)
        if log and not failure.secondary:
            content = json.dumps({"rank": failure.rank, "reason": failure.reason})
            with suppress(OSError):
                replace_file(Path(log).with_name(FAILURE), content.encode())
        lines: list[str] = []
        if failure.kind == "error":
            lines.append(f"samestep: error: {add_code(failure.message, failure.error_code)}")
        elif failure.kind != "exit" or not self.is_shown(failure.rank):  # a shown one that exits has printed its reason
            if failure.log and not failure.traceback:
                lines += [f"samestep: the end of rank {failure.rank}'s output{log and f' ({log})'}:", failure.log]
            lines += [f"samestep: {other.reason}" for other in report.others]
            others = ""
            if report.world_size > 1:
                same = f"; the same for {describe_ranks(report.same)}" if report.same else ""
                others = same or "; the others were stopped"
            if failure.traceback:
                lines += [f"samestep: rank {failure.rank} of {report.world_size} failed{others}"] if others else []
                lines.append(failure.traceback.rstrip("\n"))
            elif not report.then:
                lines.append(f"samestep: {failure}{others}")
        if report.then:
            lines.append(f"samestep: {failure.reason}{report.then}")
        for line in lines:
            print_error(line)

    def complete(self, failure: RankFailure) -> RankFailure:
        """Add what the rank's output says."""
        try:
            text = read_tail(Path(self.find_log(failure.rank) or self.directory / f"rank{failure.rank}.log"))
        except OSError:
            text = ""
        if failure.code == -signal.SIGABRT and "op.preamble.length <= op.nbytes" in text:  # gloo's message
            failure = replace(failure, message=f"{failure.message}{OTHER_SIZES}")
        return failure if self.is_shown(failure.rank) else replace(failure, log=_cut(text))

    def close(self) -> None:
        """Remove the directory."""
        self._workdir.close()

    def find_log(self, rank: int) -> str:
        """Return the path of a rank's log in the run's directory; "" if the run has not started or has no directory."""
        try:
            return os.readlink(self.directory / f"rank{rank}.log")
        except OSError:
            return ""

    def _end(self, rank: int, code: int, time_s: float, signals: Sequence[int], death: str = "") -> Ended:
        """Note the end of a rank. `signals`: which it was sent."""
        was_blamed = self.processes[rank].state is ProcessState.BLAMED
        self.processes[rank] = RankProcess(state=ProcessState.ENDED)
        # A rank that ends by the signal that it was sent has not failed.
        is_obedient = -code in (signals if code == -signal.SIGKILL else STOP_SIGNALS) and bool(signals)
        failure = read_failure(rank, self.directory) if code else None
        if is_obedient and not was_blamed:
            failure = None  # else it failed before, and had not ended yet
        if code and not is_obedient and failure is None:
            failure = RankFailure(rank, time_s, code, False, "died", death or describe_death(code))
        if failure is not None:
            log = self.find_log(rank)
            if log and failure.traceback and not failure.secondary:  # not printed by the rank
                with suppress(OSError), open(log, "a", opener=open_regular) as file:
                    file.write(failure.traceback)
        return Ended(rank, code, time_s, failure, self.read_outcome(), can_restart=not self._is_broken)

    def _give_up(self, problem: str) -> list[Started | Ended]:
        """Treat the remaining ranks as killed: the server has ended. `problem`: its error, if it has reported one."""
        if not self._have_started:
            dead = (
                "the process that starts the ranks has died or was killed (out of memory?): look into the system's "
                "log, and start again"
            )
            raise Error(problem or dead, code="SS513")
        self._is_broken = True
        how = (
            f"was killed: {problem}"
            if problem
            else "was killed with the process that starts the ranks (out of memory?)"
        )
        ends: list[Started | Ended] = []
        for rank, process in self.processes.items():
            if process.state is not ProcessState.ENDED:
                kill_group(process.pid)
                ends.append(self._end(rank, -signal.SIGKILL, time.time(), [], how))
        if not ends:
            time.sleep(POLL_S)
        return ends


def _cut(log: str) -> str:
    """Return the last lines of a log, without samestep's frames in a traceback of faulthandler."""
    own = f'  File "{Path(__file__).parent}'
    return "\n".join([line for line in log.splitlines() if not line.startswith(own)][-TAIL_LINES:])
