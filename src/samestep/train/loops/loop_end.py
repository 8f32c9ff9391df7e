"""The end of a loop: its last snapshot, its table, and the note for another start."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.errors import Error
from samestep.files import replace_file
from samestep.train.context import RunContext
from samestep.train.ending.stop_signals import MAX_IDLE_STOPS, count_idle_stops, describe_stop
from samestep.train.guards.misuse import MisuseChecks
from samestep.train.loops.feed import Feed
from samestep.train.loops.services import Services
from samestep.train.state.run_state import RunState
from samestep.watch.records import RESTARTS
from samestep.world.environment import (
    BEGUN,
    OUTCOME,
    START_AGAIN,
    BegunRun,
    Environment,
    Outcome,
    find_exit_code,
)
from samestep.world.workdir import make_private


class LoopEnd:
    """Ends a loop, by its last step, run.stop() or a signal.

    Attributes:
        failure: at the end, an Error if the last snapshot could not be written or if another start would not help; else
            None.
    """

    def __init__(
        self, context: RunContext, state: RunState, services: Services, feed: Feed, misuse: MisuseChecks
    ) -> None:
        self._context = context
        self._state = state
        self._services = services
        self._feed = feed
        self._misuse = misuse
        self.failure: Error | None = None

    def exit_after_signal(self) -> None:
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
        self._end("stopped", describe_stop(stopping.signal))
        if self.failure is not None:
            raise self.failure
        notify_launcher(context.environment, OUTCOME, Outcome.STOPPED.value)
        raise SystemExit(stopping.signals.exit_code)

    def finish(self) -> None:
        """End a loop without steps left."""
        state = self._state
        if not state.place.is_past:
            reason = state.stop_reason
            if reason:
                self._context.say(f"stopped at step {state.steps_done}: {reason}")
            self._end("stopped" if reason else "done", reason)
            notify_launcher(self._context.environment, OUTCOME, Outcome.FINISHED.value)
            note_begun(self._context, is_done=True)
        state.end_loop(self._feed.plan)

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
        ends = [(context.rank, *self._explain_failure())]
        ends = context.group.gather(ends[0]) if services.stopping.signal else ends
        rank, failure, code = next((end for end in ends if end[1]), (0, "", ""))
        if failure:
            self.failure = Error(failure, rank=rank, code=code)
            status = "failed"
            reason = failure
        services.watchdog.enter("script", steps_done)
        rows, measured = services.metrics.sum_up(services.watchdog.spent_s())
        end: dict[str, Any] | None = None if failure else {"steps": steps_done, "measured": measured}
        if context.group.can_heal:  # If rank 0 dies before this, another one writes it, or all start again.
            context.group.once(context.location.write_status, status, reason, end)
        else:
            context.location.write_status(status, reason, end)
        services.watchdog.close()
        services.metrics.finish(rows, status)
        self._misuse.close()
        services.stopping.signals.restore()
        if self.failure is None:
            services.resources.end_loop()

    def _explain_failure(self) -> tuple[str, str]:
        """Describe a failure at the run's end, on ranks that record it, with its code; "" if there was none."""
        stopping = self._services.stopping
        snapshotter = self._services.snapshotter
        if problem := snapshotter.explain_unsaved(self._state.steps_done):
            return f"{problem}; fix this, and start the same command again", "SS417"
        is_again = stopping.is_interrupted and find_exit_code(Outcome.STOPPED, stopping.signal) == START_AGAIN
        run_dir = self._context.location.path
        if not is_again or self._context.rank != 0 or run_dir is None:
            return "", ""
        if (snapshotter.saved_step or 0) > self._state.resumed_step:
            return "", ""
        count = count_idle_stops(run_dir / RESTARTS) + 1
        if count < MAX_IDLE_STOPS:
            return "", ""
        cure = "give each more time (with submit: a longer --time)"
        if self._context.config.snapshot_every is None:
            cure = "let it save (--snapshot-every), or give it time for all of its steps"
        return (
            f"{count} starts in a row were stopped before they had saved more than step {self._state.resumed_step}: "
            f"{cure}, and start the same command again",
            "SS418",
        )


def note_begun(context: RunContext, *, is_done: bool = False) -> None:
    """Leave a note for samestep's launcher, which run a restart continues."""
    environment = context.environment
    if environment.local_rank == 0 and context.location.path is not None:
        run = BegunRun(context.location.shown, environment.run_number, is_done)
        notify_launcher(environment, BEGUN, run.to_text())


def notify_launcher(environment: Environment, event: str, text: str = "") -> None:
    """Leave a note for samestep's launcher. An exit code can only express success and failure."""
    if environment.error_dir is not None:
        path = Path(environment.error_dir, event)
        with suppress(OSError):  # the disk is full: the launcher then assumes the default
            make_private(path.parent)
            replace_file(path, os.fsencode(text), by_many=True)
