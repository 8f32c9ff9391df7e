"""What happens between the bodies of a loop: votes, comparisons of replicas, and snapshots."""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from samestep.data.loader import seed_all
from samestep.engine.control import Vote
from samestep.plan.seeds import derive
from samestep.snapshot.inspection import TrainingState
from samestep.train.context import RunContext
from samestep.train.loops.feed import Feed
from samestep.train.loops.healing import continue_with, join
from samestep.train.loops.loop_end import LoopEnd, announce_start
from samestep.train.loops.services import Services
from samestep.train.prepared import Prepared
from samestep.train.state.handover import hand_over
from samestep.train.state.run_state import RunState
from samestep.train.step.steps import Observers, Step
from samestep.world.announcements import count_calls
from samestep.world.membership import list_gone


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
        self._position = 0
        self._has_calls_in_head = False
        self.end = LoopEnd(context, state, services, feed, prepared.misuse)

    def begin(self) -> None:
        """Begin the loop. A run that has already received a signal to stop ends here."""
        if self._state.place.is_past:
            return
        handover = None if self._state.place.is_further else self._prepared.handover
        if handover is not None:  # what follows needs its number in the group
            join(self._context, self._state, self._feed, self._services, handover)
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
        announce_start(self._context)
        if handover is not None:
            self._prepared.replicas.compare_joined(self._state.steps_done)
            return
        self._context.group.end_recording(self._context.environment)
        self._context.group.announce_ready()  # rank 0 has done what no other rank does again
        stopping.vote_together()
        self.end.exit_after_signal()
        stopping.agree_together()

    def begin_body(self, purpose: str, number: int) -> None:
        """Seed the body and its evaluations from its number, so that they do not depend on where the run resumed."""
        seed_all(derive(self._context.config.seed, purpose, step=number))
        self._state.begin_body()

    def begin_head(self) -> None:
        """The script's lines at the head of an epoch begin."""
        self._position = self._context.group.position

    def end_head(self) -> None:
        """The steps of an epoch begin."""
        self._has_calls_in_head = self._context.group.position != self._position

    def _can_admit(self, *, numbered: bool, is_epoch_end: bool) -> bool:
        """Return whether ranks that join here make the same calls as the others from here on.

        Within an epoch, a rank that joins also runs the script's lines at the epoch's head. And it has called the
        sampler for the next step, when it opened its loop.
        """
        stopping = self._services.stopping
        if not (stopping.is_admitting and numbered) or stopping.is_ending or self._feed.calls_sampler:
            return False
        return is_epoch_end or not self._has_calls_in_head

    def cast_vote(self) -> Vote:
        """Return this rank's vote, for the exchange of a step."""
        computed, recomputed = self._on.interceptors.results()
        metrics = self._services.metrics
        return self._services.stopping.cast_vote(
            comparison=self._prepared.replicas.is_time(),
            computed=computed,
            recomputed=recomputed,
            logged=metrics.take_names(),
            checksum=metrics.take_checksum(),
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
        self._prepared.replicas.compare_if_due(steps_done, epochs_done)
        # At an epoch's end, the next exchange may not be that of a step.
        if epochs_done is None:
            stopping.agree()
        else:
            stopping.agree_together(snapshotter.take_asked())
        epoch = self._feed.plan.epoch_of(steps_done) if epochs_done is None else epochs_done
        if self._context.location.path is not None:
            self._services.watchdog.enter("saving", steps_done)
            snapshotter.save_what_is_due(
                lambda: self._get_state(epoch),
                step=steps_done,
                epochs_done=epochs_done,
                numbered=numbered,
                ending=stopping.is_ending,
            )
            self._services.watchdog.leave_saving(steps_done)
        self.end.exit_after_signal()
        if self._can_admit(numbered=numbered, is_epoch_end=epochs_done is not None):
            self._admit(epoch)

    def _admit(self, epoch: int) -> None:
        """Take in the ranks that wait to join. `epoch`: the epoch of the next step."""
        context = self._context
        steps_done = self._state.steps_done
        snapshotter = self._services.snapshotter
        began_s = time.monotonic()
        self._services.watchdog.enter("saving", steps_done)
        snapshotter.join_copy()  # a rank that joins has no copy in progress
        self._services.watchdog.enter("reducing", steps_done)
        state = self._get_state(epoch)  # while only ranks that have it are in the group
        if joined := context.group.admit():
            hand_over(
                context.group,
                state.build(),
                step=steps_done,
                meta=self._describe(epoch, state.notes),
                saved_step=snapshotter.saved_step,
                recent=[*snapshotter.recent],
                num_calls=count_calls(),
                gone=list_gone(),
            )
            self._prepared.gradients.forget_names()
            seconds = time.monotonic() - began_s
            continue_with(context, self._state, self._feed, self._services, joined, seconds)
            self._prepared.replicas.compare_joined(steps_done)
        self._services.watchdog.enter("script", steps_done)

    def _describe(self, epoch: int, notes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `meta` of a snapshot of this moment, and write all rows and records."""
        context = self._context
        directory = context.location.directory
        if directory is not None:
            with suppress(OSError):  # the rows that could not be written are kept
                return directory.mark(epoch=epoch, world_size=context.world_size, notes=notes)
        settings = self._prepared.contents.options.in_force
        return {"epoch": epoch, "metrics_bytes": 0, "world_size": context.world_size, "settings": settings, **notes}

    def _get_state(self, epoch: int) -> TrainingState:
        """Return the content of a snapshot. `epoch`: the epoch of the next step."""
        state = self._state
        lanes = self._feed.gather_lanes()
        position = state.build_position(epoch, self._feed.data, lanes)
        divided = self._prepared.divided if self._context.location.is_divided else None
        read_states = self._prepared.collect_states() if divided is None else divided.outline()
        self._services.metrics.complete_checksums()
        return self._prepared.replicas.build_training_state(
            lambda: self._prepared.contents.build(position, state.script, read_states),
            state.build_notes(lanes),
            state.steps_done,
            None if divided is None else divided.is_mine,
        )

    def finish(self) -> None:
        """End a loop that has completed, so that the code after it draws the same numbers in a later start."""
        self.end.finish()
        self.begin_body("after", self._state.steps_done)
        self._state.begin_after_loop()
