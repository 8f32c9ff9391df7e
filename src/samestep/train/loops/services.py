"""What a run keeps open over all its loops."""

from dataclasses import dataclass

from samestep.snapshot.snapshotter import Snapshotter
from samestep.train.ending.shutdown import Resources
from samestep.train.ending.stopping import Stopping
from samestep.train.guards.watchdog import Watchdog
from samestep.train.loops.run_metrics import RunMetrics


@dataclass(frozen=True)
class Services:
    """What a run keeps open over all its loops.

    Attributes:
        snapshotter: decides which snapshots are due, and writes them.
        watchdog: measures phases, and ends a run that makes no progress.
        stopping: decides which step is the last one.
        metrics: records steps and rows of metrics, and shows progress.
        resources: what is closed with the run.
    """

    snapshotter: Snapshotter
    watchdog: Watchdog
    stopping: Stopping
    metrics: RunMetrics
    resources: Resources
