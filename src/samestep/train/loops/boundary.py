"""What happens between the bodies of a loop: votes, comparisons of replicas, and snapshots."""

from samestep.data.loader import seed_all
from samestep.engine.control import Vote
from samestep.plan.seeds import derive
from samestep.snapshot.inspection import TrainingState
from samestep.train.context import RunContext
from samestep.train.loops.feed import Feed
from samestep.train.loops.loop_end import LoopEnd, note_begun
from samestep.train.loops.services import Services
from samestep.train.prepared import Prepared
from samestep.train.state.run_state import RunState
from samestep.train.step.steps import Observers, Step


class Boundary:
    """Begins and ends the bodies of a loop, and the loop.

    A body runs completely or not at all: snapshots and stops happen when the script requests the next step or epoch.
    After an epoch's last step, they wait until the epoch's body has run.

    Attributes:
        end: the end of the loop.
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
        self.end = LoopEnd(context, state, services, feed, prepared.misuse)

    def begin(self) -> None:
        """Begin the loop. A run that has already received a signal to stop ends here."""
        if self._state.place.is_past:
            return
        location = self._context.location
        stopping = self._services.stopping
        stopping.signals.take()
        self._services.watchdog.begin()
        if self._state.place.is_further:
            location.write_status("running", "", None)
        elif location.directory is not None:
            restart = self._context.environment.restart
            world_size = self._context.world_size
            location.directory.write_start(restart, from_step=self._state.steps_done, world_size=world_size)
        note_begun(self._context)
        self._context.group.announce_ready()  # rank 0 has done what no other rank does again
        if stopping.signals.is_on:
            stopping.vote()
        self.end.exit_after_signal()
        stopping.agree_together()

    def seed_body(self, purpose: str, number: int) -> None:
        """Seed the body and its evaluations from its number, so that they do not depend on where the run resumed."""
        seed_all(derive(self._context.config.seed, purpose, step=number))

    def cast_vote(self) -> Vote:
        """Return this rank's vote, for the exchange of a step."""
        results = (0, 0)
        for each in self._on.interceptors:
            results = max(results, each.results())  # only one of them has any
        return self._services.stopping.cast_vote(
            comparison=self._prepared.replicas.is_time(),
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
        stopping.react()
        if step is not None:
            self._on.end_body(step)
        if stopping.take_comparison() or self._prepared.replicas.is_due(steps_done, epochs_done):
            self._prepared.replicas.compare(steps_done)
        # At an epoch's end, the next exchange may not be that of a step.
        if epochs_done is None:
            stopping.agree()
        else:
            stopping.agree_together(snapshotter.take_asked())
        ending = stopping.is_ending
        due = snapshotter.take_due(step=steps_done, epochs_done=epochs_done, numbered=numbered, ending=ending)
        if due:
            self._services.watchdog.enter("saving", steps_done)
            snapshotter.wait_until_written()
            snapshotter.save(self._get_state(epochs_done), steps_done, due, ending=ending)
            self._services.watchdog.enter("script", steps_done)
        self.end.exit_after_signal()

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

    def finish(self) -> None:
        """End a loop that has completed, so that the code after it draws the same numbers in a later start."""
        self.end.finish()
        self.seed_body("after", self._state.steps_done)
        self._state.begin_after_loop()
