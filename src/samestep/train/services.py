"""What a run keeps open over all its loops, and how it is closed."""

import gc
import sys
from collections.abc import Callable
from functools import partial

from samestep.errors import Error
from samestep.processes import Held, hold
from samestep.snapshot.snapshotter import Snapshotter
from samestep.train import calls
from samestep.train.context import RunContext
from samestep.train.metrics import RunMetrics
from samestep.train.stopping import Stopping, StopSignals, describe_failure, shared
from samestep.train.watchdog import Watchdog
from samestep.watch.progress import Progress
from samestep.watch.trackers import Trackers


class Services(Held):
    """What a run keeps open over all its loops: until nothing refers to the run any more, or the process ends.

    Attributes:
        snapshotter: decides which snapshots are due, and writes them.
        watchdog: measures phases, and ends a run that makes no progress.
        stopping: decides which step is the last one.
        metrics: records steps and rows of metrics, and shows progress.
    """

    def __init__(self, context: RunContext, progress: Progress, trackers: Trackers) -> None:
        self._context = context
        self._progress = progress
        gather = partial(calls.gather_after_step, context.group)
        self.snapshotter = Snapshotter(context.config.snapshot_every, context.location, context.say, gather)
        signals = StopSignals(context.environment, progress.say, is_on=context.location.path is not None)
        self.watchdog = Watchdog(context, context.state)
        self.stopping = Stopping(context.state, self.snapshotter, self.watchdog, signals)
        self.metrics = RunMetrics(context, progress, trackers)
        self._is_open = True
        self._conclude: Callable[[], Error | None] = lambda: None
        if context.environment.run_number:
            gc.collect()  # closes runs without references: as reference cycles, they could remain for long
        hold(shared)
        hold(self)

    def watch(self, conclude: Callable[[], Error | None]) -> None:
        """Set the function that returns, when the run is closed, the error of a run that has not ended correctly.

        It is called while the run directory is open.
        """
        self._conclude = conclude

    def note(self, error: Error) -> None:
        """Note that the script has left the loop. If the run is closed already, the process ends with this error."""
        if not self._is_open:
            shared.add_error(error, self._context.environment)

    def close(self) -> None:
        """Close everything, at the end of the process."""
        self.drop(getattr(sys, "last_value", None))

    def drop(self, failure: BaseException | None = None) -> None:
        """Close everything. The process ends with the error of a run that has not ended correctly.

        Args:
            failure: the error that ends the process; None if it ends without an error, or continues because nothing
                refers to the run any more.
        """
        if not self._is_open:
            return
        error = self._conclude() if failure is None else None  # before this run counts as closed, see `note`
        self._is_open = False
        if not self._context.state.is_in_loop:
            self.snapshotter.drop_names("run.snapshot was called outside of a loop; call it in the body of the loop")
        self._progress.close()
        environment = self._context.environment
        directory = self._context.location.directory
        if failure is not None and directory is not None:
            directory.write_status("failed", describe_failure(failure, environment.rank))
        was_open = self.snapshotter.close()
        self.watchdog.close()
        self._context.group.close()
        self.stopping.signals.restore()
        if error is not None and was_open:
            shared.add_error(error, environment)

    def forget(self) -> None:
        self._is_open = False
        self.stopping.signals.restore()
