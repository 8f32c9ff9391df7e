"""The rendezvous server of several nodes: admits launchers, starts all ranks together, and decides what follows.

The server is a thread of the launcher on the machine of `--rdzv-endpoint`. A *round* is one start of all ranks. It ends
when every connected node has reported how its ranks ended. Then all ranks start again, or the launch ends.

Any machine can connect. Before a connection has proven knowledge of the secret, the server reads one short line from
it and sends it only a random number. Before it is admitted, nothing that it sends affects the run.
"""

import errno
import ipaddress
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import Struct, to_builtins
from msgspec.structs import asdict

from samestep.console import describe_ranks, say
from samestep.decoding import convert
from samestep.errors import Error, add_code
from samestep.launch.failure import RankEnds, RankFailure
from samestep.launch.handshake import derive_key, is_proven, make_nonce, prove
from samestep.launch.healer import Healer
from samestep.launch.local_ranks import open_store
from samestep.launch.messages import LauncherLink
from samestep.launch.rendezvous_client import End, Hello, Nodes, find_difference, find_other_arguments, parse_hello
from samestep.world.environment import Restart, count_job_nodes
from samestep.world.host import is_loopback

TICK_S = 0.1
FLUSH_S = 5.0  # for the nodes to receive the end
ADMIT_S = 15.0  # for a connection to be admitted
MAX_PENDING = 128  # connections that are not admitted yet; beyond that, the oldest is closed
SAY_S = 5.0  # after which the nodes print for whom they wait
SAY_AGAIN_S = 60.0
MAX_WARNINGS = 8  # about connections without the secret


class Proof(Struct, frozen=True, forbid_unknown_fields=True):
    """A node's proof that it knows the secret, and a challenge for the server."""

    nonce: str
    proof: str


class Room(Struct, frozen=True, forbid_unknown_fields=True):
    """How many ranks the run of a node can use."""

    num_ranks: int


class Refusal(Struct, frozen=True, forbid_unknown_fields=True):
    """No rank of a node waits any longer for one that has ended after a signal."""

    round: int


class NodeOutcome(Struct, frozen=True, forbid_unknown_fields=True):
    """How the ranks of a node ended in a round.

    Attributes:
        failure: of the rank that failed first.
        signum: the signal that its launcher has received, or 0.
        has_succeeded: all ranks have ended with exit code 0.
        is_complete: the run has reached its end.
    """

    round: int
    failure: RankFailure | None
    signum: int
    has_succeeded: bool
    is_complete: bool


class NewEnds(Struct, frozen=True, forbid_unknown_fields=True):
    """The ranks of a node that have ended since its last message. Sent with `--heal`.

    Attributes:
        codes: (rank, exit code or minus the signal).
        failures: of those that failed.
    """

    round: int
    codes: list[tuple[int, int]]
    failures: list[RankFailure]


Greeting = Proof | Hello  # of a node that is not admitted yet
Report = Room | Refusal | NodeOutcome | NewEnds  # of one that is
REPORTS: Mapping[str, type[Report]] = {"room": Room, "refuse": Refusal, "ended": NodeOutcome, "ends": NewEnds}


@dataclass
class PendingNode:
    """A connection that is not admitted yet.

    Attributes:
        nonce: the challenge that it must answer.
        since_s: when it connected.
        is_proven: it has proven knowledge of the secret.
    """

    link: LauncherLink
    nonce: str = field(default_factory=make_nonce)
    since_s: float = field(default_factory=time.monotonic)
    is_proven: bool = False


@dataclass
class Member:
    """A node that was admitted.

    Attributes:
        ranks: its ranks in this round.
        outcome: how they ended.
    """

    link: LauncherLink
    hello: Hello
    ranks: range = range(0)
    outcome: NodeOutcome | None = None


@dataclass
class LaunchRound:
    """One start of all ranks.

    Attributes:
        number: from 1.
        members: the nodes whose ranks run. A node that is lost is removed.
        store: that of the ranks.
        ends: how ranks have ended, with `--heal`.
        healer: None without `--heal`.
        lost: the names of lost nodes without which the others do not continue.
        stuck: ranks that their nodes must end.
        names: of all nodes that have begun it.
        is_admitting: a node has joined, so the ranks save and end.
        is_stopping: the ranks end at once.
    """

    number: int
    members: list[Member]
    store: Any  # TCPStore
    ends: RankEnds = field(default_factory=RankEnds)
    healer: Healer | None = None
    lost: list[str] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)
    is_admitting: bool = False
    is_stopping: bool = False
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.names = [member.hello.name for member in self.members]

    def name(self, member: Member) -> str:
        """Return the name of a node, with its ranks if another one has the same name."""
        name = member.hello.name
        return f"{name} ({describe_ranks(member.ranks)})" if self.names.count(name) > 1 else name

    def locate(self, rank: int) -> str:
        """Return a clause that names the node of a rank; "" if that node is lost."""
        return next((f", on {self.name(member)}" for member in self.members if rank in member.ranks), "")


class RendezvousServer(threading.Thread):
    """The server thread. It sends each decision to all nodes.

    Args:
        received: the signals that the launcher on this machine has received so far.
        heals: whether the other ranks continue if one dies.
    """

    def __init__(
        self,
        nodes: Nodes,
        listener: socket.socket,
        max_restarts: int,
        received: Sequence[int],
        *,
        heals: bool = False,
    ) -> None:
        super().__init__(name="samestep rendezvous", daemon=True)
        self._nodes = nodes
        self._listener = listener
        self._max_restarts = max_restarts
        self._received = received
        self._heals = heals
        self._members: list[Member] = []
        self._pending: list[PendingNode] = []
        self._round: LaunchRound | None = None  # None between rounds
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)  # a connection can be closed before it is accepted
        self._selector.register(listener, selectors.EVENT_READ)
        self._num_rounds = 0
        self._is_over = False
        self._num_restarts = 0
        self._room = sys.maxsize  # how many ranks the run can use, once known
        self._restart: Restart | None = None
        self._warnings: set[str] = set()  # printed so far
        self._changed_s = time.monotonic()
        self._wait_s = self._changed_s + nodes.timeout_s
        self._say_s = self._changed_s + SAY_S

    def run(self) -> None:
        try:
            self._serve()
        finally:  # closed connections tell the nodes that the server has ended
            self._listener.close()
            for link in [peer.link for peers in (self._members, self._pending) for peer in peers]:
                link.close()

    def _serve(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select(TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(key.data)
            for pending in [each for each in self._pending if time.monotonic() > each.since_s + ADMIT_S]:
                self._drop(pending)
            if self._round is not None:
                self._end_stuck(self._round)
                self._conclude_if_ended(self._round)
            else:
                self._begin_if_complete()
        self._selector.unregister(self._listener)
        self._listener.close()
        deadline_s = time.monotonic() + FLUSH_S
        while self._members and time.monotonic() < deadline_s:
            for key, _ in self._selector.select(TICK_S):
                self._receive(key.data)

    # --- members ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(True)
            if len(self._pending) >= MAX_PENDING:
                self._drop(self._pending[0])
            pending = PendingNode(LauncherLink(connection))
            self._pending.append(pending)
            self._selector.register(pending.link, selectors.EVENT_READ, pending)
            pending.link.send("challenge", nonce=pending.nonce)

    def _receive(self, peer: PendingNode | Member) -> None:
        while peer in self._members or peer in self._pending:
            try:
                message = peer.link.receive()
                if message is None:
                    return
                handle: Callable[[], Member | None]
                if isinstance(peer, Member):
                    handle = partial(self._process, peer, parse_report(message))
                else:
                    handle = partial(self._greet, peer, parse_greeting(message, peer))
            except (OSError, ValueError):  # closed, or not a launcher of samestep
                self._drop(peer)
                return
            peer = handle() or peer

    def _greet(self, pending: PendingNode, greeting: Greeting) -> Member | None:
        """Go on with the admission of a node. Returns it once it is admitted."""
        if isinstance(greeting, Hello):
            return self._admit(pending, greeting)
        self._check_proof(pending, greeting)
        return None

    def _check_proof(self, pending: PendingNode, answer: Proof) -> None:
        link = pending.link
        secret = self._nodes.secret
        if not is_proven({"proof": answer.proof}, secret, "node", pending.nonce, answer.nonce):
            link.send("denied")
            address = link.addresses[1]
            if len(self._warnings) < MAX_WARNINGS:
                self._warn(f"a connection from {address} was refused: it does not have the secret of this run's nodes")
            self._drop(pending)
            return
        pending.is_proven = True
        link.trust()
        link.send("proof", proof=prove(secret, "hub", pending.nonce, answer.nonce))

    def _process(self, member: Member, report: Report) -> None:
        round_ = self._round
        if isinstance(report, Room):
            self._room = report.num_ranks
        elif round_ is None or report.round != round_.number or member not in round_.members:
            return
        elif isinstance(report, Refusal):
            if round_.healer is not None:
                round_.healer.refuse()
        elif isinstance(report, NodeOutcome):
            member.outcome = report
            if not report.has_succeeded:  # otherwise the other nodes can still be saving
                _stop_all(round_, "now")
        else:
            failures = {failure.rank: failure for failure in report.failures}
            self._heal_without(round_, {rank: (code, failures.get(rank)) for rank, code in report.codes})

    def _heal_without(self, round_: LaunchRound, ended: Mapping[int, tuple[int, RankFailure | None]]) -> bool:
        """Let the other ranks continue without ranks that have ended. If they cannot, stop all.

        Args:
            ended: rank -> exit code, and its failure.

        Returns:
            Whether no rank must stop.
        """
        if round_.healer is None:
            return False
        ends = round_.ends
        for rank in ended.keys() - ends.codes.keys():
            ends.add(rank, *ended[rank])
        if not round_.is_stopping:
            round_.healer.heal(self._received)
        if ends.failures:
            _stop_all(round_, "now")
            return False
        for member in round_.members if ends.outlived else ():
            member.link.send("outlive", round=round_.number, ranks=[failure.rank for failure in ends.outlived])
        return True

    def _end_stuck(self, round_: LaunchRound) -> None:
        """Let nodes end ranks that do not respond, so that the others continue."""
        ranks, reason = ([], "") if round_.healer is None else round_.healer.find_stuck()
        for member in round_.members:
            own = [rank for rank in ranks if rank in member.ranks and rank not in round_.stuck]
            if own:
                round_.stuck += own
                member.link.send("kill", round=round_.number, ranks=own, reason=reason)

    def _warn(self, sentence: str) -> None:
        """Print a sentence once."""
        if sentence not in self._warnings:
            self._warnings.add(sentence)
            say(sentence)

    def _drop(self, peer: PendingNode | Member) -> None:
        self._selector.unregister(peer.link)
        peer.link.close()
        if isinstance(peer, PendingNode):
            self._pending.remove(peer)
            return
        self._members.remove(peer)
        self._changed_s = time.monotonic()
        round_ = self._round
        if round_ is not None and peer in round_.members and not self._is_over:
            round_.members.remove(peer)
            if not self._heal_without(round_, _build_lost(peer.ranks, round_.name(peer))):
                round_.lost.append(round_.name(peer))
                _stop_all(round_, "now")

    def _admit(self, pending: PendingNode, hello: Hello) -> Member | None:
        """Admit a node, or refuse it."""
        there = [member.hello for member in self._members]
        num_ranks = sum(other.num_ranks for other in there)
        run = f"the run at {self._nodes.endpoint}"
        reason = find_difference(hello, there)
        code = "SS510" if reason is None else "SS504"
        if reason is None and len(there) == self._nodes.most:
            reason = f"{run} has its {self._nodes.most} nodes: raise --nnodes, or use another port"
        if reason is None and num_ranks + hello.num_ranks > self._room:
            room = f"{self._room} ranks, one per micro-batch of a step"
            reason = f"{run} can use {room}, and has {num_ranks}: start fewer here"
        if reason is not None:
            pending.link.send("refused", reason=reason, code=code)
            say(f"{hello.name} was refused: {reason}")
            self._drop(pending)
            return None
        warning = find_other_arguments(hello, there[0]) if there else None
        if warning is not None:
            self._warn(warning)
        member = Member(pending.link, hello)
        self._pending.remove(pending)
        self._members.append(member)
        self._selector.modify(member.link, selectors.EVENT_READ, member)
        self._changed_s = time.monotonic()
        member.link.send("welcome")
        if self._round is not None and not self._round.is_admitting:
            self._round.is_admitting = True
            _stop_all(self._round, "saved")
        return member

    # --- rounds -----------------------------------------------------------------------------------------------------

    def _begin_if_complete(self) -> None:
        now_s = time.monotonic()
        there = len(self._members)
        is_due = self._num_rounds > 0 or now_s > self._changed_s + self._nodes.last_call_s
        if there == self._nodes.most or (there >= self._nodes.least and is_due):
            self._begin()
        elif there < self._nodes.least and now_s > self._wait_s:
            advice = "start the launcher there too, or allow more time with --rdzv-timeout"
            missing = self._describe_missing(
                f"did not join at {self._nodes.endpoint} within {self._nodes.timeout_s:.0f} s"
            )
            self._end(End(message=add_code(f"{missing}: {advice}", "SS507"), code=Error.exit_code))
        elif there < self._nodes.least and there and now_s > self._say_s:
            self._say_s = now_s + SAY_AGAIN_S
            left_s = self._wait_s - now_s
            missing = self._describe_missing(f"still missing at {self._nodes.endpoint}")
            # The nodes of a Slurm job share one output.
            for member in self._members[: 1 if count_job_nodes() > 1 else None]:
                member.link.send("waiting", sentence=f"{missing}; waiting for up to {left_s:.0f} s more")

    def _describe_missing(self, what: str) -> str:
        """Return a clause: which nodes `what`, and which are there."""
        hellos = [member.hello for member in self._members]
        present = ", ".join(hello.name for hello in hellos)
        ranks = {hello.node_rank for hello in hellos}
        missing = [] if None in ranks else [rank for rank in range(self._nodes.most) if rank not in ranks]
        who = f"--node-rank {', '.join(map(str, missing))}" if missing else f"{self._nodes.least - len(hellos)} more"
        return f"of {self._nodes.least} nodes, {who} {what}; present: {present}"

    def _begin(self) -> None:
        members = sorted(
            self._members, key=lambda member: -1 if member.hello.node_rank is None else member.hello.node_rank
        )
        sizes = [member.hello.num_ranks for member in members]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [
            f"{start}{f'-{start + size - 1}' if size > 1 else ''} on {member.hello.name}"
            for start, size, member in zip(starts, sizes, members, strict=True)
        ]
        self._num_rounds += 1
        address = self._listener.getsockname()[0]
        address = "" if ipaddress.ip_address(address).is_unspecified else address
        store = open_store(open_listener(address, 0), address or "localhost")
        self._round = LaunchRound(self._num_rounds, members, store)
        if self._heals:
            secret = derive_key(self._nodes.secret, "the ranks")
            self._round.healer = Healer(store, secret, sum(sizes), self._round.ends, self._round.locate)
        for node, member in enumerate(members):
            member.outcome = None
            member.ranks = range(starts[node], starts[node] + sizes[node])
            place = {
                "port": store.port,
                "node": node,
                "num_nodes": len(members),
                "first_rank": starts[node],
                "world_size": sum(sizes),
                "num_restarts": self._num_restarts,
            }
            member.link.send(
                "begin",
                round=self._num_rounds,
                sentence=f"ranks {', '.join(parts)}",
                address=self._find_address(member),
                num_ranks=member.hello.num_ranks,
                place=place,
                restart=to_builtins(self._restart),
            )

    def _find_address(self, member: Member) -> str:
        """Return the address at which the other nodes reach a node. For the server's own node, that of the server."""
        address = member.link.addresses[1]
        if is_loopback(address):
            mine = (other.link.addresses[0] for other in self._members)
            return next((seen for seen in mine if not is_loopback(seen)), address)
        return address

    def _conclude_if_ended(self, round_: LaunchRound) -> None:
        """When all ranks have ended, decide what follows."""
        members = round_.members
        outcomes = [member.outcome for member in members if member.outcome is not None]
        if len(outcomes) < len(members):
            return
        self._round = None
        self._changed_s = time.monotonic()
        self._wait_s = self._changed_s + self._nodes.timeout_s
        self._say_s = self._changed_s + SAY_S
        decision = self._decide(round_, outcomes)
        if round_.healer is not None and round_.is_stopping and len(self._received) < 2:
            could_restart = not (self._received or self._max_restarts)
            round_.healer.report(is_end=isinstance(decision, End), could_restart=could_restart)
        if isinstance(decision, End):
            self._end(decision)
        else:
            self._restart = decision

    def _decide(self, round_: LaunchRound, outcomes: Sequence[NodeOutcome]) -> Restart | End:
        """Decide what follows the end of all ranks: another round, or the end of the launch."""
        members = round_.members
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        first = RankEnds(failures=failures, outlived=round_.ends.outlived).first_failure
        leaving = [member for member, outcome in zip(members, outcomes, strict=True) if outcome.signum]
        has_succeeded = all(outcome.has_succeeded for outcome in outcomes)
        is_complete = has_succeeded and all(outcome.is_complete for outcome in outcomes)
        may_restart = self._num_restarts < self._max_restarts
        if leaving:
            if is_complete or self._received or len(self._members) - len(leaving) < self._nodes.least:
                return End(is_complete=is_complete)
            for member in leaving:  # the others continue without them
                member.link.send("end", **asdict(End()))
                self._drop(member)
            return Restart(f"{' and '.join(map(round_.name, leaving))} received a signal to stop")
        if first is not None and not (first.secondary and (round_.lost or round_.is_admitting)):
            if first.kind != "error" and may_restart:
                self._num_restarts += 1
                return Restart(first.reason, first.rank)
            return End(failure=f"{first.reason}{round_.locate(first.rank)}", code=first.exit_code)
        if round_.lost:
            reason = f"{' and '.join(round_.lost)} {'was' if len(round_.lost) == 1 else 'were'} lost"
            if len(self._members) >= self._nodes.least:
                return Restart(reason)
            if self._members and may_restart:  # the node can join again
                self._num_restarts += 1
                say(f"{reason}; waiting for up to {self._nodes.timeout_s:.0f} s for it to be started again")
                return Restart(reason)
            return End(message=f"{reason}: the same commands resume from the newest snapshot", code=1)
        if round_.is_admitting and not is_complete:
            return Restart("a node has joined")
        if has_succeeded:
            return End(is_complete=is_complete)
        return End(message="the ranks were stopped, and no node has reported a reason", code=1)

    def _end(self, end: End) -> None:
        """End all launchers."""
        self._is_over = True
        for member in self._members:
            member.link.send("end", **asdict(end))


def parse_greeting(message: Mapping[str, Any], pending: PendingNode) -> Greeting:
    """Check and convert what a node sends to be admitted. Raises ValueError if no launcher of samestep sends it."""
    fields = {**message}
    if fields.pop("kind") != ("hello" if pending.is_proven else "proof"):
        raise ValueError("not a greeting")
    return parse_hello(fields) if pending.is_proven else convert(fields, Proof)


def parse_report(message: Mapping[str, Any]) -> Report:
    """Check and convert what a node reports. Raises ValueError if no launcher of samestep sends it."""
    fields = {**message}
    kind = fields.pop("kind")
    if kind not in REPORTS:
        raise ValueError("not a report")
    return convert(fields, REPORTS[kind])


def _stop_all(round_: LaunchRound, how: str) -> None:
    if how == "now" and not round_.is_stopping:
        round_.is_stopping = True
        if round_.healer is not None:
            round_.healer.refuse()
    for member in round_.members:
        if member.outcome is None:
            member.link.send("stop", round=round_.number, how=how)


def _build_lost(ranks: Sequence[int], node: str) -> dict[int, tuple[int, RankFailure]]:
    """Return the ends of the ranks of a node that was lost."""
    message = f"was lost with {node}"
    return {rank: (1, RankFailure(rank, time.time(), 1, False, "died", message)) for rank in ranks}


def open_listener(address: str, port: int) -> socket.socket:
    """Listen at an address of this machine ("": all). Port 0 is a free one.

    Raises:
        OSError: the port is in use.
        Error: it cannot be opened for another reason.
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
                raise
            reason = error.strerror or str(error)  # IPv6 can be turned off
    raise Error(f"port {port} cannot be opened here ({reason}): choose one above 1023", code="SS509")
