"""The agent of one machine: executes what the supervisor decides, and reports what happens to its ranks."""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from msgspec.structs import replace

from samestep.config import PREFIX, Overrides, to_variables
from samestep.console import print_error, say
from samestep.errors import Stuck, add_code
from samestep.files import open_regular, read_tail, replace_file
from samestep.launch.forkserver import ForkServer
from samestep.launch.link import (
    Broken,
    Ended,
    EndStuck,
    Event,
    Finish,
    Joined,
    Message,
    Nodes,
    Print,
    Report,
    Signal,
    Signalled,
    Start,
    derive_key,
)
from samestep.launch.rank_reports import RankFailure, Reports, build_failure, describe_death
from samestep.launch.target import Target
from samestep.processes import kill_group
from samestep.world.environment import CONTINUES, FAILURE, HEAL, RESTART, SECRET, BegunRun, child_variables, read_host
from samestep.world.host import find_interface, find_source

POLL_S = 0.1
TAIL_LINES = 20
DEAD_SERVER = (
    "the process that starts the ranks has died or was killed (out of memory?), and the ranks with it: look into the "
    "system's log, and start again"
)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL)


@dataclass(frozen=True)
class Launch:
    """The parameters of a launch.

    Attributes:
        num_ranks: number of ranks on this machine.
        received: the signals that this process has received so far.
        heals: whether the other ranks continue if one dies.
        variables: more environment variables for the ranks.
        shows_all: whether the output of all ranks goes to the terminal, not only that of rank 0.
        prints: whether failures are printed.
    """

    target: Target
    num_ranks: int
    overrides: Overrides
    received: Sequence[int]
    nodes: Nodes = field(default_factory=Nodes)
    max_restarts: int = 0
    heals: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    shows_all: bool = False
    prints: bool = True


def build_variables(launch: Launch, start: Start, run: BegunRun | None, interface: str) -> list[dict[str, str]]:
    """Build the environment of each rank on this machine.

    Args:
        run: whose loop has begun last; a restart continues it.
        interface: the network interface to the other ranks; "" if unknown.
    """
    nodes = launch.nodes
    overrides = launch.overrides
    variables: dict[str, str] = {}
    if start.restart is not None:
        variables[RESTART] = json.dumps(asdict(start.restart))
        if run is not None:
            if overrides.get("fresh") or not run.is_done:
                variables[CONTINUES] = json.dumps(asdict(run))
            overrides = {**overrides, "resume": "latest", "fresh": False}
    backends = ("GLOO", "NCCL") if nodes.num_nodes > 1 else ("GLOO",)
    common = {
        "OMP_NUM_THREADS": str(overrides.get("num_threads") or 1),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for determinism; read when CUDA starts
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0" if start.heals else "1",  # 1 ends a rank if another one has died
        **({f"{backend}_SOCKET_IFNAME": interface for backend in backends} if interface else {}),
        **child_variables(),
        **to_variables(overrides),
        **({HEAL: "1"} if start.heals else {}),
        **variables,
        PREFIX + "LAUNCHER": launch.target.kind,
        SECRET: derive_key(nodes.secret, "the ranks"),
        "WORLD_SIZE": str(start.world_size),
        "LOCAL_WORLD_SIZE": str(launch.num_ranks),
        "GROUP_RANK": str(start.node),
        "GROUP_WORLD_SIZE": str(nodes.num_nodes),
        "MASTER_ADDR": nodes.host,
        "MASTER_PORT": str(start.port),
        # Makes init_process_group connect to the existing store instead of opening one in rank 0.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(start.num_restarts),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": str(start.port),
        **launch.variables,
    }
    return [{**common, "RANK": str(start.first_rank + i), "LOCAL_RANK": str(i)} for i in range(launch.num_ranks)]


class Agent:
    """The agent of one machine. One server forks its ranks; when all have ended, it can start them again.

    Attributes:
        launch: its parameters.
        end: how it has ended.
        reports: of the ranks.
    """

    def __init__(self, server: ForkServer, launch: Launch) -> None:
        self.end: Finish | None = None
        self.reports = Reports()
        self._server = server
        self.launch = launch
        self._directory = ""  # temporary, of the present start
        self._pids: dict[int, int] = {}  # of the ranks that run
        self._num_signals = 0

    def describe(self) -> Joined:
        """Describe this node to the supervisor."""
        return Joined(read_host(), self.launch.num_ranks, find_source(self.launch.nodes.host))

    def close(self) -> None:
        """Remove the temporary files."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self.reports.close()

    def poll(self) -> list[Event]:
        """Return what has happened since the last call, waiting for a moment."""
        events = self._poll_server()
        received = self.launch.received
        events += [Signalled(signum) for signum in received[self._num_signals :]]
        self._num_signals = len(received)
        return events

    def _poll_server(self) -> list[Event]:
        try:
            event = self._server.receive(POLL_S) or {}
        except (EOFError, OSError):
            event = {"error": DEAD_SERVER}
        match event:
            case {"started": pids}:
                self._pids = pids
            case {"error": message}:  # the server has ended, and the ranks with it
                for pid in self._pids.values():
                    kill_group(pid)
                self._pids = {}
                time.sleep(POLL_S)
                return [Broken(message, "SS513")]
            case {"rank": rank, "code": code, "time_s": time_s, "signals": signals}:
                return [self._note_end(rank, code, time_s, signals)]
        return []

    def _note_end(self, rank: int, code: int, time_s: float, signals: Sequence[int]) -> Ended:
        """Note the end of a rank. `signals`: which it was sent."""
        self._pids.pop(rank)
        # A rank that ends by the signal that it was sent has not failed.
        is_obedient = -code in (signals if code == -signal.SIGKILL else STOP_SIGNALS) and bool(signals)
        self.reports.read()
        failure = self.reports.failures.get(rank) if code else None
        if code and not is_obedient and failure is None:
            failure = RankFailure(rank, time_s, code, False, "died", describe_death(code))
        if failure is not None:
            failure = self._exchange_with_log(failure)
        return Ended(rank, code, time_s, failure, self.reports.outcome)

    def _exchange_with_log(self, failure: RankFailure) -> RankFailure:
        """Write a traceback, which the rank has not printed, to its log. Without one, add the end of a hidden log."""
        log = self.reports.logs.get(failure.rank, "")
        with suppress(OSError):
            if failure.traceback and log and not failure.secondary:
                with open(log, "a", opener=open_regular) as file:
                    file.write(failure.traceback)
            elif not failure.traceback and not self._is_shown(failure.rank):
                text = read_tail(Path(log or f"{self._directory}/rank{failure.rank}.log"))
                return replace(failure, log="\n".join(text.splitlines()[-TAIL_LINES:]))
        return failure

    # --- commands ---------------------------------------------------------------------------------------------

    def execute(self, command: Message) -> None:
        """Do what the supervisor has decided."""
        match command:
            case Start():
                self._start(command)
            case Signal(signum, spares):
                self.reports.read()
                # A rank that has reported an error completes a snapshot that it is writing, and ends within LEAVE_S.
                self._server.signal(signum, [*self.reports.failures] if spares else [])
            case EndStuck(rank, reason) if rank in self._pids:
                self.reports.failures[rank] = build_failure(rank, Stuck(reason), 1)
                kill_group(self._pids[rank])
            case Print(sentence) if self.launch.prints:
                say(sentence)
            case Report() if self.launch.prints:
                self._report(command)
            case Finish():
                self.end = command

    def _start(self, start: Start) -> None:
        """Request the ranks. Returns before their processes exist."""
        launch = self.launch
        interface = "lo"  # else gloo resolves the host's name
        if launch.nodes.num_nodes > 1:
            interface = find_interface([launch.nodes.host, *start.addresses])
            if not start.node:
                say(start.sentence)
        variables = build_variables(launch, start, self.reports.run, interface)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = tempfile.mkdtemp(prefix="samestep-")
        self.reports.clear()
        self._server.start(
            [
                {"rank": rank, "variables": own, "is_shown": self._is_shown(rank)}
                for rank, own in enumerate(variables, start.first_rank)
            ],
            target=asdict(launch.target),
            cwd=os.getcwd(),
            directory=self._directory,
            reports=self.reports.file,
        )

    def _report(self, report: Report) -> None:
        """Print the failure of a rank; the reason comes last, and once."""
        failure = report.failure
        log = self.reports.logs.get(failure.rank, "")
        if log and not failure.secondary:
            content = {"rank": failure.rank, "reason": failure.reason}
            with suppress(OSError):
                replace_file(Path(log).with_name(FAILURE), json.dumps(content).encode())
        others = "; the others were stopped" if report.world_size > 1 else ""
        is_said = failure.kind == "exit" and self._is_shown(failure.rank)  # it has printed its reason
        if failure.kind == "error":
            print_error(f"samestep: error: {add_code(failure.message, failure.error_code)}")
        elif failure.traceback:
            if others:
                print_error(f"samestep: rank {failure.rank} of {report.world_size} failed{others}")
            print_error(failure.traceback.rstrip("\n"))
        elif failure.log:
            print_error(f"samestep: the end of rank {failure.rank}'s output{log and f' ({log})'}:\n{failure.log}")
        if report.then:
            print_error(f"samestep: {failure.reason}{report.then}")
        elif not (failure.kind == "error" or failure.traceback or is_said):
            print_error(f"samestep: {failure}{others}")

    def _is_shown(self, rank: int) -> bool:
        """Return whether the output of a rank goes to the terminal."""
        return self.launch.shows_all or rank == 0
