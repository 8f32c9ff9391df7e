"""Ends a loop after the same step on all ranks: after its last step, by run.stop(), or by a signal."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from samestep.engine.control import Saving, Vote
from samestep.engine.passes import Reduced
from samestep.errors import UsageError
from samestep.snapshot.snapshotter import Snapshotter
from samestep.train.context import RunContext
from samestep.train.ending.stop_signals import StopSignals
from samestep.train.guards.calls import EPOCH_END, EPOCH_END_AFTER_STOP, wait_for_call
from samestep.train.guards.watchdog import Watchdog
from samestep.train.state.run_state import RunState
from samestep.train.step.steps import Step, StepObserver


class Decision(NamedTuple):
    """What all ranks do when the body ends.

    Attributes:
        signal: the signal that stops the run; 0 for none.
        saves: whether a snapshot is due by a clock.
        is_written: whether all ranks have written their parts of a snapshot.
        compares: whether a replica check is due by a clock.
    """

    signal: int = 0
    saves: bool = False
    is_written: bool = False
    compares: bool = False


def decide(votes: Sequence[Vote]) -> Decision:
    """Decide by the votes of all ranks, equally on all of them.

    Raises:
        UsageError: only some ranks have a snapshot in progress.
    """
    signals, saves, saving, compares, *_ = zip(*votes, strict=True)
    if saving.count(Saving.COPYING) not in (0, len(saving)):
        copying = [each == Saving.COPYING for each in saving]
        raise UsageError(
            f"rank {copying.index(True)} takes a snapshot, and rank {copying.index(False)} does not: call run.snapshot "
            "on every rank; one of them writes it",
            code="SS501",
        )
    return Decision(max(signals), True in saves, {*saving} == {Saving.WRITTEN}, True in compares)


class Stopping(StepObserver):
    """Decides, equally on all ranks, which step of a loop is the last one, and waits for the copies of snapshots.

    Each step's exchange carries a vote of every rank. An observer of steps.

    Args:
        signals: the signals that this rank has received.

    Attributes:
        signal: the signal that stops the run on all ranks; 0 for none.
    """

    def __init__(
        self,
        context: RunContext,
        state: RunState,
        snapshotter: Snapshotter,
        watchdog: Watchdog,
        signals: StopSignals,
    ) -> None:
        self._context = context
        self._state = state
        self._snapshotter = snapshotter
        self._watchdog = watchdog
        self.signals = signals
        self.signal = 0
        self._compares = False
        self._has_agreed = False

    def begin_loop(self) -> None:
        """A loop begins."""
        self.signal = 0
        self._has_agreed = False

    def take_comparison(self) -> bool:
        """Return whether a replica check is due by a clock. Each is returned once."""
        is_due, self._compares = self._compares, False
        return is_due

    def ask(self, reason: str) -> None:
        """End the loop, because the script has called run.stop()."""
        self._state.stop(reason)

    @property
    def is_ending(self) -> bool:
        """Whether no further step of the loop begins."""
        state = self._state
        return state.steps_done >= state.place.last_step or bool(self.signal or state.stop_reason)

    @property
    def _is_at_end(self) -> bool:
        return self._state.steps_done >= self._state.place.last_step

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal ends this start. It does not end a run that is complete or ended by run.stop()."""
        return bool(self.signal) and not self._is_at_end and not self._state.stop_reason

    # --- votes ------------------------------------------------------------------------------------------------

    def cast_vote(self, **more: Any) -> Vote:
        """Return this rank's vote. `more`: the entries of `Vote` that others give."""
        snapshotter = self._snapshotter
        return Vote(self.signals.heard, snapshotter.is_time(), snapshotter.saving, **more)

    def take_votes(self, votes: Sequence[Vote]) -> None:
        """Apply the votes of all ranks.

        A signal on any rank ends the loop after this step or the epoch's body. Snapshots that are due by a clock are
        taken there.

        Waits for the copies of snapshots: the script may update the model as soon as this returns.

        Raises:
            UsageError: only some ranks have a snapshot in progress.
        """
        decision = decide(votes)
        before = self._watchdog.now[0]
        is_copying = self._snapshotter.saving is Saving.COPYING
        if is_copying:
            self._watchdog.enter("saving", self._state.steps_done)
        self._snapshotter.join_copy()
        if is_copying:
            self._watchdog.enter(before, self._state.steps_done)
        if decision.is_written:
            self._snapshotter.join_parts()
        if not self._state.is_in_loop:
            return
        if decision.saves:
            self._snapshotter.want()
        self.signal = decision.signal
        self._compares |= decision.compares

    def exchanged(self, step: Step, reduced: Reduced) -> None:
        if any(map(any, reduced.votes)):  # else no rank asks for anything
            self.take_votes(reduced.votes)

    def react(self) -> None:
        """With one rank, react at the end of a body to a signal that arrived after the exchange."""
        if self.signals.heard and self._context.world_size == 1:
            self.vote()

    def vote(self) -> None:
        """Exchange votes outside of a step, on all ranks: a signal may have arrived."""
        self.take_votes([Vote(signal) for signal in self._context.group.gather_number(self.signals.heard)])

    # --- run.stop() on some ranks alone -----------------------------------------------------------------------

    def exchange_failed(self, step: Step, error: RuntimeError) -> None:
        """Raise Error if an exchange failed because only another rank called run.stop()."""
        stopped = self._context.group.find_stopped()
        if stopped is not None:
            raise self._build_stop_error(*stopped, other=self._context.rank) from error

    def agree(self) -> None:
        """Check that all ranks end the loop if this one does, by run.stop(). Costs ranks without a run.stop() nothing.

        Raises:
            UsageError: another rank did not call run.stop().
        """
        group = self._context.group
        steps_done = self._state.steps_done
        if self._state.stop_reason and not self._is_settled:
            other = group.find_continuing(steps_done)
            if other is not None:
                first, step = group.find_stopped() or (group.rank, steps_done)
                raise self._build_stop_error(first, step, other)
            self._has_agreed = True

    def agree_together(self, names: Sequence[str] = ()) -> None:
        """Same as `agree`, but called on all ranks, with and without a run.stop().

        Args:
            names: the named snapshots that the script has asked for in this epoch.

        Raises:
            UsageError: only some ranks called run.stop(), or asked for these snapshots.
        """
        ends = wait_for_call(self._context.group, EPOCH_END_AFTER_STOP if self._state.stop_reason else EPOCH_END, names)
        if not self._is_settled:
            if len(set(ends)) > 1:
                stopped = ends.index(EPOCH_END_AFTER_STOP)
                raise self._build_stop_error(stopped, self._state.steps_done, other=ends.index(EPOCH_END))
            self._has_agreed = bool(self._state.stop_reason)

    @property
    def _is_settled(self) -> bool:
        """Whether the loop ends here on all ranks, with or without a run.stop()."""
        return self._has_agreed or bool(self.signal) or self._is_at_end

    def _build_stop_error(self, rank: int, step: int | str, other: int) -> UsageError:
        return UsageError(
            f"rank {rank} ended its loop after step {step} by run.stop(), and rank {other} did not: call it on every "
            "rank, based on values that all ranks share (step.loss, step.metrics, epoch.metrics; not loss.item())",
            rank=self._context.rank,
            code="SS501",
        )
