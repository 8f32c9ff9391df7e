"""Ranks under torch's elastic agent, which has them started, watched, and started again.

`SimpleElasticAgent` is made to be extended by how ranks are started, watched and stopped: here, forked by our
server. (torch's own `LocalElasticAgent` imports torch anew in each rank, and waits 30 s for ranks that are
blocked in a collective when another one has failed.)
"""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from samestep.config import Overrides
from samestep.console import say
from samestep.launch.handshake import derive_key
from samestep.launch.links import Link, open_listener
from samestep.launch.local_ranks import Failure, Ranks, Target, open_store
from samestep.launch.places import HOST, Place, build_variables
from samestep.launch.rendezvous_client import Nodes, build_hello, connect, find_addresses, find_own_address
from samestep.launch.rendezvous_server import FLUSH_S, Hub
from samestep.world.environment import BEGUN, ROOM, STOPPED, Restart, count_job_nodes

MONITOR_INTERVAL_S = 1e-6  # `Ranks.poll` waits itself, and for no longer than it must.


class LocalRendezvous(StaticTCPRendezvous):
    """One agent on this machine, in a store that is open already, so that the system has chosen the port.

    Each start has a store of its own: an old one keeps its keys, and the new ranks would look for the old ones.
    """

    def __init__(self) -> None:
        super().__init__(HOST, 0, rank=0, world_size=1, run_id=uuid.uuid4().hex, timeout=300)

    def next_rendezvous(self) -> RendezvousInfo:
        store: Any = open_store()
        self._store, self.master_port = store, store.port
        return super().next_rendezvous()


@dataclass(frozen=True)
class Launch:
    """What is to be run.

    Attributes:
        target: what each rank runs.
        num_ranks: on this machine.
        overrides: options of `Run` that replace those of the script.
        received: grows by each signal that the launcher is sent.
        max_restarts: how often all ranks are started again when one has failed.
        report: is told of each failure here after which they are started again, and of what follows.
    """

    target: Target
    num_ranks: int
    overrides: Overrides
    received: Sequence[int]
    max_restarts: int
    report: Callable[[Failure, str], None]


class RankAgent(SimpleElasticAgent):
    """The elastic agent over a `Ranks`, not yet started."""

    def __init__(self, ranks: Ranks, launch: Launch, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.ranks = ranks
        self.launch = launch
        self.num_restarts = 0
        self.restart: Restart | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._start(self._find_place(worker_group))
        return {worker.local_rank: worker.local_rank for worker in worker_group.workers}

    def _find_place(self, worker_group: WorkerGroup) -> Place:
        port: Any = worker_group.master_port
        return Place(port, num_restarts=self.num_restarts, restart=self.restart)

    def _start(self, place: Place) -> None:
        overrides, begun = self.launch.overrides, self.ranks.directory / BEGUN
        if place.restart is not None and begun.exists():  # to go on with that run, however the first start found it
            run_dir = os.fsdecode(begun.read_bytes()) if overrides.get("fresh") else overrides.get("run_dir")
            overrides = {**overrides, "resume": "latest", "fresh": False, "run_dir": run_dir}
        variables = build_variables(self.launch.num_ranks, place, overrides)
        self.ranks.start(self.launch.target, variables, first_rank=place.first_rank, world_size=place.world_size)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._watch()
        if self._has_failed():
            self.ranks.stop()
            self._decide()
            return self._fail()
        if self.ranks.done:
            values = dict.fromkeys(worker.global_rank for worker in worker_group.workers)
            return RunResult(WorkerState.SUCCEEDED, values)
        return RunResult(WorkerState.HEALTHY)

    def _watch(self) -> None:
        """Notes what has happened, and passes signals on."""
        self.ranks.poll()
        received = self.launch.received
        if len(received) > 1:
            self.ranks.kill()
        elif received and not self.ranks.told_to_stop:
            self.ranks.tell_to_stop(signal.SIGTERM if received[0] == signal.SIGHUP else received[0])

    def _has_failed(self) -> bool:
        return bool(self.ranks.failures or (self.launch.received and not self.ranks.started))

    def _fail(self) -> RunResult:
        failures = {
            failure.rank: ProcessFailure(failure.rank, pid=0, exitcode=failure.code, error_file="")
            for failure in self.ranks.failures
        }
        return RunResult(WorkerState.FAILED, failures=failures)

    def _decide(self) -> None:
        """The ranks have failed, and ended: whether they are started again."""
        failure = self.ranks.first_failure()
        # An Error is a person's mistake, and would be the same mistake again.
        if failure is None or failure.kind == "error" or self.launch.received or self.ranks.lost:
            self._remaining_restarts = 0
        if failure is not None and self._remaining_restarts > 0:
            self.num_restarts += 1
            self.restart = Restart(failure.reason, failure.rank)
            self.launch.report(failure, f"; restart {self.num_restarts} of {self.launch.max_restarts}")

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.ranks.stop()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.ranks.kill()


class NodeRendezvous(RendezvousHandler):
    """Joins the rounds that the hub begins.

    Attributes:
        begun: what the hub said of the present round; empty before the first.
        stop: how the present round is to be stopped: "now", "saved", or "": not at all.
        end: what the hub said of the end, once it did.
    """

    def __init__(self, link: Link, nodes: Nodes, launch: Launch) -> None:
        self._link, self._nodes, self._launch = link, nodes, launch
        self._joined = 0
        self._has_told_room = False
        self.begun: dict[str, Any] = {}
        self.stop = ""
        self.end: dict[str, Any] | None = None

    def take(self, timeout_s: float = 0.0) -> None:
        """Notes what the hub says."""
        try:
            for message in self._link.receive(timeout_s) if self.end is None else []:
                if message["kind"] == "begin":
                    self.begun, self.stop = message, ""
                elif message["kind"] == "stop" and message["round"] == self.begun.get("round"):
                    self.stop = message["how"]
                elif message["kind"] == "end":
                    self.end = message
        except OSError:
            lost = f"the launcher at {self._nodes.endpoint} is gone, and with it the place where the nodes meet"
            self.end = {
                "message": f"{lost}: the same commands go on from the newest snapshot",
                "failure": None,
                "code": 1,
            }

    @property
    def is_new(self) -> bool:
        """Whether a round has begun that this node is not in yet."""
        return bool(self.begun) and int(self.begun["round"]) > self._joined

    def tell_room(self, ranks: Ranks) -> None:
        """Says, once, how many ranks the run can take, when those of this node know."""
        if not self._has_told_room:
            with suppress(OSError, ValueError):
                self._link.send("room", num_ranks=int((ranks.directory / ROOM).read_text()))
                self._has_told_room = True

    def tell_end(self, ranks: Ranks) -> None:
        """Says how the ranks of this node have ended."""
        failure = ranks.first_failure()
        if failure is not None:
            failure = replace(failure, traceback="", log="")
        self._link.send(
            "ended",
            round=self._joined,
            failure=None if failure is None else asdict(failure),
            signum=self._launch.received[0] if self._launch.received else 0,
            is_well=ranks.done and not any(ranks.codes.values()),
            done=not (ranks.directory / STOPPED).exists(),
        )

    def next_rendezvous(self) -> RendezvousInfo:
        while not self.is_new:
            self.take(0.1)
            if self.end is not None or self._launch.received:
                raise RendezvousGracefulExitError
        self._joined = self.begun["round"]
        store = RendezvousStoreInfo(self._nodes.host, self.begun["port"])
        return RendezvousInfo(HashStore(), self.begun["node"], len(self.begun["sizes"]), store)

    def find_place(self) -> Place:
        """This node's in the present round."""
        begun = self.begun
        return Place(
            port=begun["port"],
            host=self._nodes.host,
            interface=find_addresses().get(begun["address"], ""),
            node=begun["node"],
            num_nodes=len(begun["sizes"]),
            first_rank=sum(begun["sizes"][: begun["node"]]),
            world_size=sum(begun["sizes"]),
            num_restarts=begun["num_restarts"],
            restart=None if begun["restart"] is None else Restart(*begun["restart"]),
            secret=derive_key(self._nodes.secret, "the ranks"),
        )

    def get_backend(self) -> str:
        return "samestep"

    def is_closed(self) -> bool:
        return self.end is not None

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0  # The hub lets them in.

    def get_run_id(self) -> str:
        return self._nodes.run_id

    def shutdown(self) -> bool:
        self._link.close()
        return True


class NodeAgent(RankAgent):
    """One of several: the hub decides, for all of them alike, what follows from an end."""

    def __init__(self, ranks: Ranks, launch: Launch, spec: WorkerSpec, rendezvous: NodeRendezvous) -> None:
        super().__init__(ranks, launch, spec)
        self.rendezvous = rendezvous
        self._has_told = False
        self._seen_restarts = 0

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        place = self.rendezvous.find_place()
        return [
            Worker(i, place.first_rank + i, place.first_rank + i, place.world_size or 0, place.world_size or 0)
            for i in range(spec.local_world_size)
        ]

    def _find_place(self, worker_group: WorkerGroup) -> Place:
        place, begun = self.rendezvous.find_place(), self.rendezvous.begun
        self._has_told = False
        self._say_restart(place)
        firsts = [sum(begun["sizes"][:i]) for i in range(place.num_nodes)]
        there = [
            f"{first}{f'-{first + size - 1}' if size > 1 else ''} on {name}"
            for first, size, name in zip(firsts, begun["sizes"], begun["names"], strict=True)
        ]
        if not place.first_rank or count_job_nodes() == 1:  # the nodes of a Slurm job share one output
            print(f"samestep: ranks {', '.join(there)}", file=sys.stderr, flush=True)
        return place

    def _say_restart(self, place: Place) -> None:
        if place.restart is None:
            return
        mine, is_counted = self.ranks.first_failure(), place.num_restarts > self._seen_restarts
        self._seen_restarts = place.num_restarts
        then = f"; restart {place.num_restarts} of {self.launch.max_restarts}" if is_counted else "; all start again"
        if mine is not None and mine.reason == place.restart.reason:
            self.launch.report(mine, then)
        else:
            say(f"{place.restart.reason}{then}")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._watch()
        self.rendezvous.take()
        if self.rendezvous.end is not None:
            self.ranks.stop()
            self._remaining_restarts = 0
            return self._fail()
        if self.rendezvous.is_new:
            self._remaining_restarts = 1  # The hub has counted.
            return self._fail()
        if self.rendezvous.stop == "now" or self._has_failed():
            self.ranks.stop()
        elif self.rendezvous.stop == "saved" and self.ranks.started and not self.ranks.told_to_stop:
            self.ranks.tell_to_stop()
        self.rendezvous.tell_room(self.ranks)
        if not self._has_told and (self.ranks.done or self._has_failed()):
            self._has_told = True
            self.rendezvous.tell_end(self.ranks)
        if self._has_told and (len(self.launch.received) > 1 or self.ranks.lost):
            self._remaining_restarts = 0  # nobody waits for the others
            return self._fail()
        return RunResult(WorkerState.HEALTHY)


def run_agent(ranks: Ranks, launch: Launch) -> None:
    """Starts the ranks and returns when all have ended for good, by themselves or because of a failure or signal."""
    spec = _build_spec(launch, LocalRendezvous())
    RankAgent(ranks, launch, spec).run()


def run_node_agent(ranks: Ranks, launch: Launch, nodes: Nodes) -> dict[str, Any]:
    """As `run_agent`, together with the launchers of other nodes.

    Returns:
        What the hub said at the end: "message" where something other than a rank has failed; "failure", a sentence
        on the rank that has, on whichever node; "code", the exit code; "is_whole", whether the run was at its end
        where neither is the case. Empty where a signal came first.

    Raises:
        Error: the nodes do not come together.
    """
    address = find_own_address(nodes.host)
    listener = None if address is None else open_listener(address, nodes.port)
    hub = None
    if listener is not None:
        hub = Hub(nodes, listener, launch.max_restarts, launch.received)
        hub.start()
    hello = build_hello(nodes, launch.target, launch.num_ranks, launch.max_restarts, launch.overrides)
    link = connect(nodes, hello, lambda: bool(launch.received))
    if link is None:
        return {}
    rendezvous = NodeRendezvous(link, nodes, launch)
    try:
        NodeAgent(ranks, launch, _build_spec(launch, rendezvous), rendezvous).run()
        if launch.received and rendezvous.end is None and hub is not None:
            with suppress(OSError):
                rendezvous.take()
    finally:
        link.close()
        if hub is not None and rendezvous.end is not None:
            hub.join(FLUSH_S + 1)
    return rendezvous.end or {}


def _build_spec(launch: Launch, rendezvous: RendezvousHandler) -> WorkerSpec:
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # We say ourselves what failed.
    return WorkerSpec(
        role="rank",
        local_world_size=launch.num_ranks,
        rdzv_handler=rendezvous,
        entrypoint=launch.target.name,
        max_restarts=launch.max_restarts,
        monitor_interval=MONITOR_INTERVAL_S,
    )
