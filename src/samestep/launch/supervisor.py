"""Starts the ranks of this machine, watches them, and restarts them after a failure.

`run_local` does so for a launch on one machine. On several nodes each launcher runs `run_node`, and the rendezvous
server decides for all of them when the ranks start, stop and restart (docs/dev/restarts.md).
"""

import dataclasses
import shlex
import signal
from collections.abc import Sequence
from contextlib import suppress

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from samestep.config import Overrides
from samestep.console import say
from samestep.decoding import convert
from samestep.files import read_text
from samestep.launch.failure import RankFailure
from samestep.launch.handshake import derive_key
from samestep.launch.healer import Healer, LateEnds
from samestep.launch.local_ranks import Placement, Ranks, build_variables, open_store
from samestep.launch.messages import LauncherLink
from samestep.launch.rendezvous_client import End, Nodes, build_hello, connect, find_own_address
from samestep.launch.rendezvous_server import FLUSH_S, RendezvousServer, open_listener
from samestep.launch.target import Target
from samestep.world.environment import BEGUN, CONTINUES, RANKED, ROOM, BegunRun, Outcome, Restart, count_job_nodes
from samestep.world.host import list_addresses


@dataclasses.dataclass(frozen=True)
class Launch:
    """The parameters of a launch.

    Attributes:
        num_ranks: number of ranks on this machine.
        received: the signals that this process has received so far.
        heals: whether the other ranks continue if one dies.
    """

    target: Target
    num_ranks: int
    overrides: Overrides
    received: Sequence[int]
    max_restarts: int
    heals: bool = False


def _start(ranks: Ranks, launch: Launch, place: Placement) -> None:
    """Start the ranks."""
    overrides = launch.overrides
    variables: dict[str, str] = {}
    if place.restart is not None and (ranks.directory / BEGUN).exists():  # continue that run
        text = read_text(ranks.directory / BEGUN)
        if overrides.get("fresh") or not BegunRun.from_text(text).is_done:
            variables[CONTINUES] = text
        overrides = {**overrides, "resume": "latest", "fresh": False}
    own = build_variables(launch.num_ranks, place, overrides, heals=launch.heals)
    ranks.start(launch.target, [each | variables for each in own])


def _poll(ranks: Ranks, launch: Launch, healer: Healer | None = None) -> bool:
    """Process events, and forward signals. Returns whether a rank has failed, or a signal came before the start."""
    ranks.poll()
    received = launch.received
    if healer is not None:
        healer.heal(received)
    if len(received) > 1:
        ranks.kill()
    elif received and not ranks.is_stopping:
        ranks.request_stop(signal.SIGTERM if received[0] == signal.SIGHUP else received[0])
    return bool(ranks.ends.failures or (received and not ranks.started))


def run_local(ranks: Ranks, launch: Launch) -> End:
    """Run the ranks of a launch on one machine to their end, including restarts."""
    starts = LocalStarts(ranks, launch)
    try:
        while starts.run():
            pass
        return End(is_complete=True)
    finally:
        ranks.kill()


class LocalStarts:
    """The starts of all ranks of a launch on one machine."""

    def __init__(self, ranks: Ranks, launch: Launch) -> None:
        self._ranks = ranks
        self._launch = launch
        self._num_restarts = 0
        self._restart: Restart | None = None

    def run(self) -> bool:
        """Start all ranks, and wait for their end. Returns whether they start again."""
        ranks = self._ranks
        launch = self._launch
        store = open_store()  # a new one: the old one holds the addresses of the earlier ranks
        num_keys = store.num_keys()
        place = Placement(store.port, num_restarts=self._num_restarts, restart=self._restart)
        _start(ranks, launch, place)
        healer = Healer(store, place.secret, launch.num_ranks, ranks.ends) if launch.heals else None
        while not (has_failed := _poll(ranks, launch, healer)) and not ranks.done:
            pass
        if has_failed:
            if healer is not None:
                healer.refuse()
            ranks.stop()
        elif ranks.has_succeeded and store.num_keys() == num_keys:
            _warn_of_copies(ranks, launch.target)
        failure = ranks.first_failure()
        if failure is None:
            return False
        ranks.record(failure)
        # An Error is a mistake of the user, and would occur again.
        can_restart = not (launch.received or ranks.lost or failure.kind == "error")
        is_end = not can_restart or self._num_restarts >= launch.max_restarts
        if healer is not None and has_failed and len(launch.received) < 2:
            healer.report(is_end=is_end, could_restart=can_restart and not launch.max_restarts)
        if is_end:
            return False
        self._num_restarts += 1
        self._restart = Restart(failure.reason, failure.rank)
        ranks.report(failure, f"; restart {self._num_restarts} of {launch.max_restarts}")
        return True


def _warn_of_copies(ranks: Ranks, target: Target) -> None:
    """Warn if no rank has determined its rank, by joining the others in the store or by reading the environment."""
    if target.kind != "call" and ranks.num_ranks > 1 and not (ranks.directory / RANKED).exists():
        command = shlex.join(["samestep", "verify", "--plain", *target.to_words()])
        say(
            f"no rank used samestep or a process group, or read RANK: each of the {ranks.num_ranks} ranks ran a full "
            f"copy of {target.name}; see docs/coming-from.md, and check it with {command}"
        )


class _Begin(Struct, frozen=True):
    """The server's message at the beginning of a round; that of round 0 is never sent."""

    round: int = 0
    sentence: str = ""
    address: str = ""
    num_ranks: int = 0
    place: dict[str, int] = {}
    restart: Restart | None = None


class NodeSession:
    """The ranks of this node in the rounds of the rendezvous server. A round is one start of all ranks.

    Attributes:
        begun: the server's last "begin" message.
        stop: how the current round must stop: "now", "saved" (after a snapshot), or "": not at all.
        end: how the launch has ended, once the server has sent that.
    """

    def __init__(self, link: LauncherLink, nodes: Nodes, launch: Launch, ranks: Ranks) -> None:
        self._link = link
        self._nodes = nodes
        self._launch = launch
        self._ranks = ranks
        self._round = 0  # whose ranks were started
        self._seen_restarts = 0
        self._num_reported = 0  # ranks whose ends the server knows
        self._has_reported = self._has_sent_room = False
        self._late = LateEnds(ranks.ends)
        self.begun = _Begin()
        self.stop = ""
        self.end: End | None = None

    def run(self) -> None:
        """Run the ranks until the server ends the launch, or a signal ends it before the first round."""
        while True:
            while not self._has_new_round():
                self.receive(0.1)
                if self.end is not None or self._launch.received:
                    return
            self._start()
            while not self._is_round_over():
                pass
            if not self._has_new_round():
                return
            self._ranks.stop()

    def receive(self, timeout_s: float = 0.0) -> None:
        """Process the server's messages."""
        try:
            while self.end is None and (message := self._link.receive(timeout_s)) is not None:
                timeout_s = 0.0
                kind = message.pop("kind")
                if kind == "begin":
                    self.begun = convert(message, _Begin)
                    self.stop = ""
                elif kind == "stop" and message["round"] == self.begun.round:
                    self.stop = message["how"]
                elif kind == "kill" and message["round"] == self.begun.round:
                    self._ranks.end_stuck(message["ranks"], message["reason"])
                elif kind == "outlive" and message["round"] == self.begun.round:
                    self._ranks.ends.outlive(message["ranks"])
                elif kind == "waiting":
                    say(message["sentence"])
                elif kind == "end":
                    self.end = convert(message, End)
        except OSError:
            lost = f"the launcher at {self._nodes.endpoint}, the rendezvous of the nodes, has ended"
            sentence = f"{lost}: the same commands resume from the newest snapshot"
            self.end = End(message=sentence, code=1)

    def _has_new_round(self) -> bool:
        return self.end is None and self.begun.round > self._round

    def _start(self) -> None:
        begun = self.begun
        self._round = begun.round
        self._has_reported = False
        self._num_reported = 0
        place = Placement(
            **begun.place,
            host=self._nodes.host,
            interface=list_addresses().get(begun.address, ""),
            restart=begun.restart,
            secret=derive_key(self._nodes.secret, "the ranks"),
        )
        if place.restart is not None:
            self._report_restart(place.restart, place.num_restarts)
        if not place.first_rank or count_job_nodes() == 1:  # the nodes of a Slurm job share one output
            say(begun.sentence)
        launch = dataclasses.replace(self._launch, num_ranks=begun.num_ranks)
        _start(self._ranks, launch, place)
        self._late = LateEnds(self._ranks.ends)

    def _report_restart(self, restart: Restart, num_restarts: int) -> None:
        own = self._ranks.first_failure()
        is_counted = num_restarts > self._seen_restarts
        self._seen_restarts = num_restarts
        then = f"; restart {num_restarts} of {self._launch.max_restarts}" if is_counted else "; all start again"
        if own is not None and own.reason == restart.reason:
            self._ranks.report(own, then)
        else:
            say(f"{restart.reason}{then}")

    def _is_round_over(self) -> bool:
        """Process events once. Returns whether this node is done with the round."""
        ranks = self._ranks
        received = self._launch.received
        self.receive()
        has_failed = _poll(ranks, self._launch)
        if self._launch.heals:
            if len(received) < 2:  # after a second signal, all ranks of this node are killed
                self._report_ends()
            if received and self._late.are_due():
                self._link.send("refuse", round=self._round)
        if self.end is not None:
            ranks.stop()
            return True
        if self._has_new_round():
            return True
        if self.stop == "now" or (has_failed and not self._is_undecided):
            ranks.stop()
        elif self.stop == "saved" and ranks.started and not ranks.is_stopping:
            ranks.request_stop()
        if not self._has_sent_room:
            with suppress(OSError, ValueError):
                self._link.send("room", num_ranks=int(read_text(ranks.directory / ROOM)))
                self._has_sent_room = True
        if not self._has_reported and not self._is_undecided and (ranks.done or has_failed):
            self._has_reported = True
            failure = ranks.first_failure()
            if failure is not None:
                ranks.record(failure)
            self._link.send(
                "ended",
                round=self._round,
                failure=None if failure is None else to_builtins(_shorten(failure)),
                signum=received[0] if received else 0,
                has_succeeded=ranks.has_succeeded,
                is_complete=ranks.outcome is not Outcome.STOPPED,
            )
        return self._has_reported and (len(received) > 1 or ranks.lost)  # do not wait for the other nodes

    @property
    def _is_undecided(self) -> bool:
        """Whether the server has not answered yet if the other ranks continue without those that failed here."""
        is_asked = self._launch.heals and len(self._launch.received) < 2 and self.stop != "now"
        return is_asked and bool(self._ranks.ends.failures)

    def _report_ends(self) -> None:
        """Report the ranks that have ended since the last call."""
        codes = [*self._ranks.ends.codes.items()][self._num_reported :]
        if codes:
            self._num_reported += len(codes)
            ended = {rank for rank, _ in codes}
            failures = [_shorten(failure) for failure in self._ranks.ends.failures if failure.rank in ended]
            self._link.send("ends", round=self._round, codes=codes, failures=to_builtins(failures))


def _shorten(failure: RankFailure) -> RankFailure:
    """Return a failure without the texts that only its own node prints."""
    return replace(failure, traceback="", log="")


def run_node(ranks: Ranks, launch: Launch, nodes: Nodes) -> End:
    """Run the ranks of this node, together with the launchers of the other nodes, to their end.

    The launcher at the endpoint also runs the rendezvous server. Raises Error if the nodes do not join.
    """
    server = None
    if (address := find_own_address(nodes.host)) is not None:
        with suppress(OSError):  # the port is in use, by a launcher of another node on this machine
            listener = open_listener(address, nodes.port)
            server = RendezvousServer(nodes, listener, launch.max_restarts, launch.received, heals=launch.heals)
            server.start()
    hello = build_hello(
        nodes,
        launch.target,
        launch.num_ranks,
        launch.max_restarts,
        launch.overrides,
        heals=launch.heals,
    )
    link = connect(nodes, hello, lambda: bool(launch.received))
    if link is None:
        return End()
    session = NodeSession(link, nodes, launch, ranks)
    try:
        try:
            session.run()
        finally:
            ranks.kill()
        if launch.received and session.end is None and server is not None:
            session.receive()
    finally:
        link.close()
        if server is not None and session.end is not None:
            server.join(FLUSH_S + 1)
    return session.end or End()
