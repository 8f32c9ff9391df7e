"""Ranks under torch's elastic agent, which does the rendezvous and watches them.

`SimpleElasticAgent` is made to be extended by how ranks are started, watched and stopped: here, forked by our
server. (torch's own `LocalElasticAgent` imports torch anew in each rank, and waits 30 s for ranks that are
blocked in a collective when another one has failed.)
"""

import logging
import signal
import uuid
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from samestep.launch.local import HOST, Ranks, Target, build_variables, open_store
from samestep.world.environment import Overrides

MONITOR_INTERVAL_S = 1e-6  # `Ranks.poll` waits itself, and for no longer than it must.


class LocalRendezvous(StaticTCPRendezvous):
    """One agent on this machine, in a store that is open already, so that the system has chosen the port."""

    def __init__(self, store: Any) -> None:
        super().__init__(HOST, store.port, rank=0, world_size=1, run_id=uuid.uuid4().hex, timeout=300)
        self._store = store


class RankAgent(SimpleElasticAgent):
    """The elastic agent over a `Ranks`.

    Args:
        ranks: not yet started.
        target: what they run.
        spec: the agent's.
        overrides: arguments of `Run` to replace.
        received: grows by each signal that the launcher is sent.
    """

    def __init__(
        self, ranks: Ranks, target: Target, spec: WorkerSpec, overrides: Overrides, received: Sequence[int]
    ) -> None:
        super().__init__(spec)
        self.ranks = ranks
        self.target = target
        self.overrides = overrides
        self.received = received

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        num_ranks = worker_group.spec.local_world_size
        port: Any = worker_group.master_port
        self.ranks.start(self.target, build_variables(num_ranks, port, self.overrides))
        return {worker.local_rank: worker.local_rank for worker in worker_group.workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.ranks.poll()
        if len(self.received) > 1:
            self.ranks.kill()
        elif self.received and not self.ranks.told_to_stop:
            self.ranks.tell_to_stop()
        if self.ranks.failures or (self.received and not self.ranks.started):
            failures = {
                failure.rank: ProcessFailure(failure.rank, pid=0, exitcode=failure.code, error_file="")
                for failure in self.ranks.failures
            }
            return RunResult(WorkerState.FAILED, failures=failures)
        if self.ranks.done:
            values = dict.fromkeys(worker.global_rank for worker in worker_group.workers)
            return RunResult(WorkerState.SUCCEEDED, values)
        return RunResult(WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.ranks.stop()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.ranks.kill()


def run_agent(ranks: Ranks, target: Target, num_ranks: int, overrides: Overrides, received: Sequence[int]) -> None:
    """Starts the ranks and returns when all have ended, by themselves or because one failed or a signal came."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # We say ourselves what failed.
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        rdzv_handler=LocalRendezvous(open_store()),
        entrypoint=target.name,
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
    )
    RankAgent(ranks, target, spec, overrides, received).run()
