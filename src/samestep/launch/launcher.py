"""Runs a launch to its end: on this machine, or as one of several nodes.

The agent of each machine executes what the supervisor decides. Node 0 has the supervisor, and the agents of the other
nodes reach it by a link.
"""

import errno
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from samestep.console import print_error, saying_when_slow
from samestep.errors import Error, add_code
from samestep.launch.agent import POLL_S, Agent, Launch
from samestep.launch.forkserver import ForkServer
from samestep.launch.link import (
    Board,
    Continue,
    Finish,
    Link,
    Lost,
    Message,
    Nodes,
    Start,
    Tick,
    derive_key,
    is_listening,
)
from samestep.launch.rank_process import FORWARDED_SIGNALS
from samestep.launch.supervisor import Policy, Supervisor
from samestep.launch.target import Target, check_target
from samestep.processes import wait_until
from samestep.world.environment import (
    LOCALHOST,
    SECRET,
    Outcome,
    find_exit_code,
    has_agent_store,
    read_environment,
    read_master,
    set_hook,
)
from samestep.world.host import find_own_address
from samestep.world.membership import STUCK, have_come, name_generation
from samestep.world.signed import SignedEntries

DEFAULT_PORT = 29400  # torchrun's
GREETING_S = 10.0  # for a store to answer
SAY_S = 5.0  # an agent that waits longer for node 0 says so
FLUSH_S = 5.0  # for the nodes to receive the end


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
        self._supervisor = Supervisor(
            Policy(nodes.num_nodes, launch.max_restarts, launch.heals, nodes.timeout_s, nodes.endpoint),
            time.monotonic(),
        )
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
    deadline_s = time.monotonic() + nodes.timeout_s
    with saying_when_slow(f"waiting for up to {nodes.timeout_s:.0f} s for the launcher at {nodes.endpoint}", SAY_S):
        while not (link.sees(0) or agent.launch.received):
            if not link.is_alive() or time.monotonic() > deadline_s:
                raise Error(
                    f"no answer from {nodes.endpoint} within {nodes.timeout_s:.0f} s: start the launcher on that "
                    f"machine too, with the same {SECRET}, and check that no firewall closes the port",
                    code="SS507",
                )
            time.sleep(POLL_S)
    if agent.launch.received:
        return Finish(find_exit_code(Outcome.STOPPED, agent.launch.received[0]))
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
