"""The agent of one machine: executes what the supervisor decides, and reports what happens to its ranks.

On one machine, and on node 0 of several, the agent also holds the supervisor. The other nodes' agents reach it by a
link (link.py).
"""

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from samestep.config import Overrides
from samestep.console import say, saying_when_slow
from samestep.errors import Error
from samestep.files import read_text
from samestep.launch.link import Link, is_listening
from samestep.launch.local_ranks import POLL_S, Ranks, build_variables, open_store
from samestep.launch.node_messages import (
    Board,
    Broken,
    Continue,
    EndStuck,
    Event,
    Finish,
    Joined,
    Lost,
    Message,
    Print,
    Report,
    Signal,
    Signalled,
    Start,
    Tick,
)
from samestep.launch.nodes import Nodes, derive_key, find_own_address
from samestep.launch.supervisor import Policy, Supervisor
from samestep.launch.target import Target
from samestep.processes import wait_until
from samestep.world.environment import (
    BEGUN,
    CONTINUES,
    SECRET,
    BegunRun,
    Outcome,
    find_exit_code,
    read_host,
)
from samestep.world.host import find_interface, find_source
from samestep.world.membership import READY, STUCK, have_come, name_generation
from samestep.world.rendezvous_store import SignedEntries

GREETING_S = 10.0  # for a store to answer
SAY_S = 5.0  # an agent that waits longer for node 0 says so
FLUSH_S = 5.0  # for the nodes to receive the end


@dataclass(frozen=True)
class Launch:
    """The parameters of a launch.

    Attributes:
        num_ranks: number of ranks on this machine.
        received: the signals that this process has received so far.
        heals: whether the other ranks continue if one dies.
        variables: more environment variables for the ranks.
        prints: whether failures are printed.
    """

    target: Target
    num_ranks: int
    overrides: Overrides
    received: Sequence[int]
    max_restarts: int = 0
    heals: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    prints: bool = True


class Agent:
    """The agent of one machine.

    Args:
        nodes: the nodes of the launch; None: only this machine.

    Attributes:
        end: how the launch has ended.
    """

    def __init__(self, ranks: Ranks, launch: Launch, nodes: Nodes | None = None) -> None:
        self.ranks = ranks
        self.launch = launch
        self.nodes = nodes
        self.end: Finish | None = None
        self.secret = secrets.token_hex() if nodes is None else derive_key(nodes.secret, "the ranks")
        self._num_signals = 0

    def describe(self) -> Joined:
        """Describe this node to the supervisor."""
        address = "" if self.nodes is None else find_source(self.nodes.host)
        return Joined(read_host(), self.launch.num_ranks, address)

    def poll(self) -> list[Event]:
        """Return what has happened since the last call, waiting for a moment."""
        events: list[Event] = []
        try:
            events += self.ranks.poll()
        except Error as error:
            events.append(Broken(str(error), error.code))
            time.sleep(POLL_S)
        received = self.launch.received
        events += [Signalled(signum) for signum in received[self._num_signals :]]
        self._num_signals = len(received)
        return events

    def execute(self, command: Message) -> None:
        """Do what the supervisor has decided."""
        ranks = self.ranks
        match command:
            case Start():
                self._start(command)
            case Signal():
                ranks.signal(command.signum, spares=command.spares)
            case EndStuck():
                ranks.end_stuck(command.rank, command.reason)
            case Print() if self.launch.prints:
                say(command.sentence)
            case Report() if self.launch.prints:
                ranks.report(command)
            case Finish():
                self.end = command
            case _:
                pass

    def _start(self, start: Start) -> None:
        launch = self.launch
        nodes = self.nodes
        overrides = launch.overrides
        network: dict[str, str] = {}
        if nodes is not None:
            network = {"host": nodes.host, "interface": find_interface([nodes.host, start.peer])}
            if not start.node:
                say(start.sentence)
        variables = {**launch.variables}
        if start.restart is not None and (self.ranks.directory / BEGUN).exists():  # continue that run
            text = read_text(self.ranks.directory / BEGUN)
            if overrides.get("fresh") or not BegunRun.from_text(text).is_done:
                variables[CONTINUES] = text
            overrides = {**overrides, "resume": "latest", "fresh": False}
        own = build_variables(launch.num_ranks, start, overrides, self.secret, **network)
        self.ranks.start(launch.target, [each | variables for each in own])


class Supervision:
    """The supervisor with what it needs to act: the ranks' store, and the links to other nodes.

    Args:
        agent: that of this machine.
        link: None for a launch on one machine.
        open_store: opens a store for the ranks of a start: a new one, since the old one holds the earlier addresses.
    """

    def __init__(self, agent: Agent, link: Link | None = None, open_store: Callable[[], Any] = open_store) -> None:
        launch = agent.launch
        nodes = agent.nodes
        policy = Policy(max_restarts=launch.max_restarts, heals=launch.heals)
        if nodes is not None:
            policy = dataclasses.replace(
                policy, num_nodes=nodes.num_nodes, join_s=nodes.timeout_s, endpoint=nodes.endpoint
            )
        self._agent = agent
        self._link = link
        self._open_store = open_store
        self._store: Any = None
        self._entries: Any = None  # of this store
        self._supervisor = Supervisor(policy, time.monotonic())
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
            if isinstance(command, Continue):
                self._entries.put(name_generation(command.number), command.members)
                continue
            told = command
            if isinstance(command, Start):
                if target == 0:
                    self._store = self._open_store()
                    self._entries = SignedEntries(self._agent.secret.encode(), self._store)
                told = replace(command, port=int(self._store.port))
            if target == 0:
                self._agent.execute(told)
            elif self._link is not None:
                self._link.send(target, told)

    def _read_board(self) -> Board:
        store = self._store
        generation = self._supervisor.generation
        stuck, reason = self._entries.get(STUCK, tuple[list[int], str]) or ([], "")
        return Board(
            is_ready=int(store.add(READY, 0)) >= self._supervisor.world_size,
            has_met=have_come(store, generation.number, generation.members),
            stuck=stuck,
            reason=reason,
        )


def run_agent(ranks: Ranks, launch: Launch, nodes: Nodes | None = None) -> Finish:
    """Run the ranks of this machine to the end of the launch. Raises Error if the nodes do not find each other."""
    agent = Agent(ranks, launch, nodes)
    if nodes is None:
        return Supervision(agent).run()
    others = range(1, nodes.num_nodes) if nodes.node == 0 else [0]
    link = Link(nodes.node, others, derive_key(nodes.secret, "the nodes"), _find_store(nodes))
    link.start()
    try:
        if nodes.node:
            return _follow(agent, nodes, link)
        address = find_own_address(nodes.host)
        return Supervision(agent, link, lambda: open_store(address)).run()
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
        limit = timedelta(seconds=GREETING_S)
        return PrefixStore("samestep/nodes", TCPStore(nodes.host, nodes.port, None, False, limit))

    return connect


def _follow(agent: Agent, nodes: Nodes, link: Link) -> Finish:
    """Run the agent of a node without the supervisor."""
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
                lost = f"the launcher at {nodes.endpoint}, the rendezvous of the nodes, has ended"
                agent.end = Finish(1, f"{lost}: the same commands resume from the newest snapshot")
    return agent.end
