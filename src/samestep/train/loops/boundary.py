"""What happens between the bodies of a loop, and at its end: votes, comparisons of replicas, and snapshots."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.data.loader import seed_all
from samestep.engine.control import Vote
from samestep.errors import Error
from samestep.files import replace_file
from samestep.plan.seeds import derive
from samestep.snapshot.inspection import TrainingState
from samestep.snapshot.snapshotter import Snapshotter
from samestep.train import calls
from samestep.train.context import RunContext
from samestep.train.ending.shutdown import Resources
from samestep.train.ending.stopping import Stopping
from samestep.train.guards.watchdog import Watchdog
from samestep.train.loops.feed import Feed
from samestep.train.loops.run_metrics import RunMetrics
from samestep.train.prepared import Prepared
from samestep.train.state.run_state import RunState
from samestep.train.step.steps import Observers, Step
from samestep.world.environment import (
    BEGUN,
    OUTCOME,
    BegunRun,
    Environment,
    Outcome,
)
from samestep.world.workdir import make_private


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


class Boundary:
    """Begins and ends the bodies of a loop, and the loop.

    A body runs completely or not at all: snapshots and stops happen when the script requests the next step or epoch.
    After an epoch's last step, they wait until the epoch's body has run.

    Attributes:
        failure: at the end of the loop, an Error if the last snapshot could not be written; else None.
    """

    def __init__(
        self,
        context: RunContext,
        state: RunState,
        prepared: Prepared,
        services: Services,
        feed: Feed,
        observers: Observers,
    ) -> None:
        self._context = context
        self._state = state
        self._prepared = prepared
        self._services = services
        self._feed = feed
        self._on = observers
        self.failure: Error | None = None

    def begin(self) -> None:
        """Begin the loop."""
        if self._state.place.is_past:
            return
        location = self._context.location
        stopping = self._services.stopping
        stopping.signals.listen()
        self._services.watchdog.begin()
        if self._state.place.is_further:
            location.write_status("running", "", None)
            drop_note(self._context.environment, OUTCOME)
        elif location.directory is not None:
            restart = self._context.environment.restart
            world_size = self._context.world_size
            location.directory.write_start(restart, from_step=self._state.steps_done, world_size=world_size)
        note_begun(self._context)
        self._context.group.announce_ready()  # rank 0 has done what no other rank does again
        calls.wait_for_call(self._context.group, stopping.call)

    def seed_body(self, purpose: str, number: int) -> None:
        """Seed the body and its evaluations from its number, so that they do not depend on where the run resumed."""
        seed_all(derive(self._context.config.seed, purpose, step=number))

    def cast_vote(self) -> Vote:
        """Return this rank's vote, for the exchange of a step."""
        results = (0, 0)
        for each in self._on.interceptors:
            results = max(results, each.results())  # only one of them has any
        return self._services.stopping.cast_vote(
            computed=results[0],
            recomputed=results[1],
            checksum=self._services.metrics.partial_checksums.take_own(),
        )

    def end_body(self, step: Step | None, *, epochs_done: int | None, numbered: bool) -> None:
        """Save the snapshots that are due after a body, and end the process if the ranks have voted to stop.

        Args:
            step: the last step; None before the first one.
            epochs_done: at an epoch's end, after its body.
            numbered: whether the run can resume from the position, so that a numbered snapshot may be written.
        """
        steps_done = self._state.steps_done
        stopping = self._services.stopping
        snapshotter = self._services.snapshotter
        if step is not None:
            self._on.end_body(step)
        if self._prepared.replicas.is_due(steps_done, epochs_done):
            self._prepared.replicas.compare(steps_done)
        # Ranks that continue with a step notice in its exchange that another one waits here.
        if epochs_done is not None:
            calls.wait_for_call(self._context.group, stopping.call, snapshotter.take_asked())
        elif stopping.call == calls.STOP:
            calls.wait_for_call(self._context.group, calls.STOP)
        ending = stopping.is_ending
        due = snapshotter.take_due(step=steps_done, epochs_done=epochs_done, numbered=numbered, ending=ending)
        if due:
            self._services.watchdog.enter("saving", steps_done)
            snapshotter.wait_until_written()
            snapshotter.save(self._get_state(epochs_done), steps_done, due, ending=ending)
            self._services.watchdog.enter("script", steps_done)
        self._exit_after_signal()

    def _get_state(self, epochs_done: int | None) -> TrainingState:
        """Return the content of a snapshot. `epochs_done`: as for `end_body`."""
        state = self._state
        lanes = self._feed.gather_lanes()
        epoch = self._feed.plan.epoch_of(state.steps_done) if epochs_done is None else epochs_done
        position = state.build_position(epoch, self._feed.data, lanes)
        divided = self._prepared.divided if self._context.location.is_divided else None
        read_states = self._prepared.collect_states() if divided is None else divided.outline()
        self._services.metrics.complete_checksums()
        return self._prepared.replicas.build_training_state(
            lambda: self._prepared.contents.build(position, state.script, read_states),
            state.build_notes(),
            state.steps_done,
            None if divided is None else divided.is_mine,
        )

    def _exit_after_signal(self) -> None:
        """End the process after a signal, once all ranks have voted."""
        stopping = self._services.stopping
        if not stopping.is_interrupted:
            return
        context = self._context
        steps_done = self._state.steps_done
        saved = ""
        if self._services.snapshotter.saved_step == steps_done:
            saved = f", saved in {context.location.named}"
        then = ": the same command continues from there" if saved else ""
        context.say(f"stopped by a signal after step {steps_done}{saved}{then}")
        stopping.signals.ignore_further()
        self._end("stopped", f"stopped by {signal.Signals(stopping.signal).name}")
        if self.failure is not None:
            raise self.failure
        notify_launcher(context.environment, OUTCOME, Outcome.STOPPED.value)
        raise SystemExit(stopping.signals.exit_code)

    def finish(self) -> None:
        """End a loop without steps left, so that the code after it draws the same numbers in a later start."""
        state = self._state
        if not state.place.is_past:
            reason = state.stop_reason
            if reason:
                self._context.say(f"stopped at step {state.steps_done}: {reason}")
            self._end("stopped" if reason else "done", reason)
            notify_launcher(self._context.environment, OUTCOME, Outcome.FINISHED.value)
            note_begun(self._context, is_done=True)
        state.end_loop(self._feed.plan)
        self.seed_body("after", state.steps_done)

    def _end(self, status: str, reason: str) -> None:
        context = self._context
        services = self._services
        steps_done = self._state.steps_done
        self._state.leave_loop()
        self._feed.close()
        services.watchdog.enter("saving", steps_done)
        services.metrics.complete_checksums()
        services.snapshotter.end(steps_done)
        # On all ranks: if the launcher of one node ended with START_AGAIN, srun would return it for all nodes.
        problems = context.group.gather(services.snapshotter.explain_unsaved(steps_done))
        if failure := next(filter(None, problems), ""):
            status = "failed"
            reason = f"{failure}; fix this, and start the same command again"
            self.failure = Error(reason, rank=problems.index(failure), code="SS417")
        services.watchdog.enter("script", steps_done)
        rows, measured = services.metrics.sum_up(services.watchdog.spent_s())
        end: dict[str, Any] | None = None if failure else {"steps": steps_done, "measured": measured}
        if context.group.can_heal:  # If rank 0 dies before this, another one writes it, or all start again.
            context.group.once(context.location.write_status, status, reason, end)
        else:
            context.location.write_status(status, reason, end)
        services.watchdog.close()
        services.metrics.finish(rows, status)
        self._prepared.misuse.close()
        services.stopping.signals.restore()


def note_begun(context: RunContext, *, is_done: bool = False) -> None:
    """Leave a note for samestep's launcher, which run a restart continues."""
    environment = context.environment
    if environment.local_rank == 0 and context.location.path is not None:
        run = BegunRun(context.location.shown, environment.run_number, is_done)
        notify_launcher(environment, BEGUN, run.to_text())


def drop_note(environment: Environment, event: str) -> None:
    """Remove a note."""
    if environment.error_dir is not None:
        Path(environment.error_dir, event).unlink(missing_ok=True)


def notify_launcher(environment: Environment, event: str, text: str = "") -> None:
    """Leave a note for samestep's launcher. An exit code can only express success and failure."""
    if environment.error_dir is not None:
        path = Path(environment.error_dir, event)
        with suppress(OSError):  # the disk is full: the launcher then assumes the default
            make_private(path.parent)
            replace_file(path, os.fsencode(text), by_many=True)
