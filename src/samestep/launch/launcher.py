"""Runs a launch to its end: on this machine, or as one of several nodes.

The agent of each machine executes what the supervisor decides, and reports what happens to its ranks. Node 0 has the
supervisor, and the agents of the other nodes reach it by a link.
"""

import errno
import json
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from samestep.config import PREFIX, Overrides, to_variables
from samestep.console import print_error, say, saying_when_slow
from samestep.errors import Error, Stuck, add_code
from samestep.files import open_regular, read_tail, replace_file
from samestep.launch.forkserver import ForkServer
from samestep.launch.link import (
    Board,
    Broken,
    Continue,
    Ended,
    EndStuck,
    Event,
    Finish,
    Joined,
    Link,
    Lost,
    Message,
    Nodes,
    Print,
    Report,
    Signal,
    Signalled,
    Start,
    Tick,
    derive_key,
    is_listening,
)
from samestep.launch.rank_process import FORWARDED_SIGNALS, INTERRUPTED
from samestep.launch.rank_reports import RankFailure, Reports, build_failure, describe_death
from samestep.launch.supervisor import Supervisor
from samestep.launch.target import Target, check_target
from samestep.processes import kill_group, wait_until
from samestep.world.environment import (
    CONTINUES,
    FAILURE,
    HEAL,
    LOCALHOST,
    RESTART,
    SECRET,
    BegunRun,
    Outcome,
    child_variables,
    find_exit_code,
    has_agent_store,
    read_environment,
    read_host,
    read_master,
    set_hook,
)
from samestep.world.host import find_interface, find_own_address, find_source
from samestep.world.membership import STUCK, have_come, name_generation
from samestep.world.signed import SignedEntries

DEFAULT_PORT = 29400  # torchrun's
GREETING_S = 10.0  # for a store to answer
SAY_S = 5.0  # an agent that waits longer for node 0 says so
FLUSH_S = 5.0  # for the nodes to receive the end
POLL_S = 0.1
TAIL_LINES = 20
DEAD_SERVER = (
    "the process that starts the ranks has died or was killed (out of memory?), and the ranks with it: look into the "
    "system's log, and start again"
)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL)


# --- the nodes --------------------------------------------------------------------------------------------------------


def parse_nodes(
    nnodes: int | None, node_rank: int | None, endpoint: str | None, timeout_s: float, secret: str = ""
) -> Nodes:
    """Parse the options of `launch` for several nodes. Raises Error if one is invalid."""
    if nnodes is None and endpoint is not None:
        raise Error(
            f"--rdzv-endpoint {endpoint} is where several machines meet, and --nnodes is not given: add --nnodes N, "
            "the number of machines, or leave --rdzv-endpoint out",
            code="SS104",
        )
    num_nodes = nnodes or 1
    if node_rank is not None and not 0 <= node_rank < num_nodes:
        raise Error(f"--node-rank is {node_rank}, but the {num_nodes} nodes are 0 to {num_nodes - 1}", code="SS101")
    if num_nodes == 1:
        return Nodes()
    if endpoint is None or node_rank is None:
        raise Error(
            f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT, the same on all machines, and --node-rank R, which is "
            "0 on HOST and another number on each other machine",
            code="SS104",
        )
    host, port = parse_endpoint(endpoint)
    return _check(Nodes(num_nodes, node_rank, host, port, timeout_s, secret))


def read_nodes(timeout_s: float, secret: str) -> Nodes:
    """Read the nodes from the variables that torchrun, srun or mpirun has set, as for a rank.

    Raises Error if they are incomplete, or several nodes are on one machine.
    """
    environment = read_environment()
    if environment.world_size == 1:
        return Nodes()
    if environment.local_world_size > 1:
        raise Error(
            f"{environment.local_world_size} agents run on this machine, and one starts all of its ranks: give "
            "torchrun --nproc-per-node 1, or srun --ntasks-per-node 1",
            code="SS104",
        )
    host, port = read_master()
    return _check(Nodes(environment.world_size, environment.rank, host, port, timeout_s, secret, has_agent_store()))


def _check(nodes: Nodes) -> Nodes:
    """Check that the address is known, and that there is a secret. Raises Error."""
    try:
        socket.getaddrinfo(nodes.host, nodes.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Error(
            f"--rdzv-endpoint {nodes.endpoint}: no address of {nodes.host} is known here ({error.strerror})",
            code="SS507",
        ) from None
    if not nodes.secret:
        raise Error(
            f"other programs can reach {nodes.endpoint}, and there is no secret to tell them from this run's nodes: "
            f"set {SECRET} to the same text on all nodes (`openssl rand -hex 32` prints one)",
            code="SS508",
        )
    return nodes


def parse_endpoint(text: str) -> tuple[str, int]:
    """Parse "host:port", "address:port" or "[IPv6 address]:port"; the port is optional. Raises Error otherwise."""
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::([0-9]{1,5}))?", text)
    port = int(match[3] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise Error(
            f"--rdzv-endpoint takes HOST:PORT or [IPv6 ADDRESS]:PORT, with a port from 1 to 65535, not {text!r}",
            code="SS101",
        )
    return match[1] or match[2], port


# --- the agent of a machine -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """The parameters of a launch.

    Attributes:
        num_ranks: number of ranks on this machine.
        received: the signals that this process has received, and the agent has not reported yet.
        heals: whether the other ranks continue if one dies.
        variables: more environment variables for the ranks.
        shows_all: whether the output of all ranks goes to the terminal, not only that of rank 0.
        prints: whether failures are printed.
    """

    target: Target
    num_ranks: int
    overrides: Overrides
    received: list[int]
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

    def describe(self) -> Joined:
        """Describe this node to the supervisor."""
        return Joined(read_host(), self.launch.num_ranks, find_source(self.launch.nodes.host))

    def close(self) -> None:
        """Remove the temporary files."""
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self.reports.file)

    def poll(self) -> list[Event]:
        """Return what has happened since the last call, waiting for a moment."""
        events = self._poll_server()
        while self.launch.received:
            events.append(Signalled(self.launch.received.pop(0)))
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
        is_killed = -code in (signals if code == -signal.SIGKILL else STOP_SIGNALS) and bool(signals)
        is_interrupted = code == INTERRUPTED and signal.SIGINT in signals  # its report is of the KeyboardInterrupt
        self.reports.read()
        failure = self.reports.failures.get(rank) if code and not is_interrupted else None
        if code and failure is None and not (is_killed or is_interrupted):
            failure = RankFailure(rank, time_s, code, False, "died", describe_death(code))
        if failure is not None:
            failure = self._exchange_with_log(failure)
        return Ended(rank, code, failure, self.reports.outcome)

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


# --- a launch ---------------------------------------------------------------------------------------------------------


def open_store(address: str = LOCALHOST, port: int = 0) -> Any:  # TCPStore
    """Open a rendezvous store at an address of this machine ("": all IPv4 ones). Port 0 is a free one.

    Raises Error if the port cannot be opened.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
        raise Error(f"port {port} {reason} here: choose another one, on all nodes", code="SS509") from None
    return TCPStore(
        address or "localhost",
        listener.getsockname()[1],
        None,
        True,
        timedelta(seconds=300),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class Supervision:
    """The supervisor with what it needs to act: the ranks' store, and the links to other nodes.

    Args:
        agent: that of this machine.
        link: None for a launch on one machine.
    """

    def __init__(self, agent: Agent, link: Link | None = None) -> None:
        launch = agent.launch
        nodes = launch.nodes
        self._agent = agent
        self._link = link
        self._address = nodes.host if link is None else find_own_address(nodes.host)
        self._store: Any = None
        self._entries: Any = None  # of this store
        self._supervisor = Supervisor(nodes, time.monotonic(), max_restarts=launch.max_restarts, heals=launch.heals)
        self._handle(0, agent.describe())

    def run(self) -> Finish:
        """Run the launch to its end."""
        agent = self._agent
        while agent.end is None:
            events: list[tuple[int, Message]] = [(0, event) for event in agent.poll()]
            if self._link is not None:
                events += self._link.receive()
            if self._store is not None and agent.launch.heals:
                events.insert(0, (0, self._read_board()))
            for node, event in events or [(0, Tick())]:
                self._handle(node, event)
        return agent.end

    def _handle(self, node: int, event: Message) -> None:
        for target, command in self._supervisor.handle(node, event, time.monotonic()):
            told = command
            if isinstance(command, Start):
                if target == 0:
                    # a new one, since the old one holds the earlier addresses
                    self._store = open_store(self._address)
                    key = derive_key(self._agent.launch.nodes.secret, "the ranks")
                    self._entries = SignedEntries(key.encode(), self._store)
                told = replace(command, port=int(self._store.port))
            if isinstance(command, Continue):
                self._entries.put(name_generation(command.number), command.members)
            elif target == 0:
                self._agent.execute(told)
            elif self._link is not None:
                self._link.send(target, told)

    def _read_board(self) -> Board:
        store = self._store
        generation = self._supervisor.generation
        stuck, reason = self._entries.get(STUCK, tuple[list[int], str]) or ([], "")
        return Board(
            is_ready=have_come(store, 0, range(self._supervisor.world_size)),
            has_met=have_come(store, generation.number, generation.members),
            stuck=stuck,
            reason=reason,
        )


def run_node(agent: Agent) -> Finish:
    """Run the ranks of this machine to the end of the launch. Raises Error if the nodes do not find each other."""
    nodes = agent.launch.nodes
    if nodes.num_nodes == 1:
        return Supervision(agent).run()
    others = range(1, nodes.num_nodes) if nodes.node == 0 else [0]
    link = Link(nodes.node, others, derive_key(nodes.secret, "the nodes"), _find_store(nodes))
    link.start()
    try:
        return _follow(agent, link) if nodes.node else Supervision(agent, link).run()
    finally:
        link.close(FLUSH_S)


def _find_store(nodes: Nodes) -> Callable[[], Any]:
    """Return a function that opens the nodes' store, or a connection to it. Raises Error if the port is in use."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    if nodes.node == 0 and not nodes.has_store:
        store = open_store(find_own_address(nodes.host), nodes.port)
        return lambda: PrefixStore("samestep/nodes", store)

    def connect() -> Any:
        if not wait_until(lambda: is_listening(nodes.host, nodes.port), nodes.timeout_s, every_s=0.2):
            raise OSError("nothing listens there")
        return PrefixStore(
            "samestep/nodes", TCPStore(nodes.host, nodes.port, None, False, timedelta(seconds=GREETING_S))
        )

    return connect


def _follow(agent: Agent, link: Link) -> Finish:
    """Run the agent of a node without the supervisor."""
    nodes = agent.launch.nodes
    link.send(0, agent.describe())
    received = agent.launch.received
    with saying_when_slow(f"waiting for up to {nodes.timeout_s:.0f} s for the launcher at {nodes.endpoint}", SAY_S):
        wait_until(lambda: link.sees(0) or received or not link.is_alive(), nodes.timeout_s, every_s=POLL_S)
    if received:
        return Finish(find_exit_code(Outcome.STOPPED, received[0]))
    if not link.sees(0):
        raise Error(
            f"no answer from {nodes.endpoint} within {nodes.timeout_s:.0f} s: start the launcher on that machine too, "
            f"with the same {SECRET}, and check that no firewall closes the port",
            code="SS507",
        )
    while agent.end is None:
        for event in agent.poll():
            link.send(0, event)
        for _, message in link.receive():
            agent.execute(message)
            if isinstance(message, Lost) and agent.end is None:
                return Finish(
                    1,
                    f"the launcher at {nodes.endpoint}, the rendezvous of the nodes, has ended: the same commands "
                    "resume from the newest snapshot",
                )
    return agent.end


def record_signals() -> list[int]:
    """Record the signals to stop that this process receives from now on.

    The first is forwarded to the ranks; the second kills them.
    """
    received: list[int] = []
    for signum in FORWARDED_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, and & in a shell, ignore some
            signal.signal(signum, lambda number, _: received.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # see cli.main
    return received


def run_launch(target: Target, values: dict[str, Any], nodes: Nodes) -> int:
    """Run ranks to their end and report the failure, if any.

    Args:
        values: options of `samestep launch`, and those of `Run`, which replace the script's.

    Returns:
        0, or the exit code of the rank that failed first (128 + signal if a signal killed it). After Ctrl-C 130. After
        SIGTERM or SIGUSR1 75 if every rank has saved and ended (the same command continues the run), else 128 +
        signal; but 0 if the run has reached its end.

    Raises:
        Error: there is no such script, an argument is invalid, or the nodes do not join.
    """
    check_target(target)
    num_ranks = values.pop("nproc_per_node", None)  # default: one per GPU, else 1
    options = {
        "shows_all": values.pop("show_all", False),
        "max_restarts": values.pop("max_restarts", 0),
        "heals": values.pop("heal", False),
    }
    if values.pop("tf_config", False):
        set_hook("samestep.launch.tf_config")
    received = record_signals()
    # Before numpy is imported and starts threads, which a fork does not copy.
    os.environ.setdefault("OMP_NUM_THREADS", str(values.get("num_threads") or 1))  # noqa: TID251
    with closing(ForkServer(fork=True)) as server:
        if num_ranks is None:
            import torch

            num_ranks = 1 if values.get("device") == "cpu" else max(torch.cuda.device_count(), 1)
        launch = Launch(target, num_ranks, values, received, nodes, **options)
        with closing(Agent(server, launch)) as agent:
            end = run_node(agent)
            if end.message:
                print_error(f"samestep: error: {add_code(end.message, end.error_code)}")
            return end.code
