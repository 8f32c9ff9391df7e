"""Ends a loop after the same step on all ranks: after its last step, by run.stop(), or by a signal."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from samestep.engine.control import Saving, Vote
from samestep.engine.passes import Reduced
from samestep.errors import UsageError
from samestep.launch.rank_process import kept_signals
from samestep.snapshot.snapshotter import Snapshotter
from samestep.train.context import RunContext
from samestep.train.guards.calls import EPOCH_END, EPOCH_END_AFTER_STOP, wait_for_call
from samestep.train.guards.watchdog import Watchdog
from samestep.train.state.run_state import RunState
from samestep.train.step.steps import Step, StepObserver
from samestep.watch.records import read_rows
from samestep.world.environment import START_AGAIN, Environment, Outcome, find_exit_code

# Seconds in which a further signal counts as a repetition of the first one: a scheduler that signals every process of a
# job reaches a rank directly and also through its launcher. After a real second signal, samestep's launcher kills the
# ranks. A scheduler sends SIGKILL some time after the signal at a job's limit.
SAME_SIGNAL_S = {"python": 0.0, "torchrun": 2.0, "samestep": math.inf, "srun": math.inf}

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# Maximum number of consecutive starts that may be stopped by a signal before they have saved anything new, and still
# request another start. One or two happen on a busy cluster; more mean that the time limit is too short.
MAX_IDLE_STOPS = 3


def describe_stop(signum: int) -> str:
    """Return the reason of a stop, as in `status.json` and `restarts.jsonl`."""
    return f"stopped by {signal.Signals(signum).name}"


def count_idle_stops(history: Path) -> int:
    """Count the latest consecutive starts that a signal stopped before they saved anything new.

    Args:
        history: `restarts.jsonl`, with the line of the current start.
    """
    rows = []
    with suppress(OSError):
        rows = read_rows(history)
    again = {describe_stop(number) for number in STOP_SIGNALS if find_exit_code(Outcome.STOPPED, number) == START_AGAIN}
    began = [0, *(row["from_step"] for row in rows)]  # the first step of the start that ended with each line
    count = 0
    for row, step in reversed([*zip(rows, began, strict=False)]):
        if row["reason"] not in again or row["from_step"] != step:
            break
        count += 1
    return count


class StopSignals:
    """Treats SIGINT, SIGTERM and SIGUSR1 as requests to stop, on which all ranks vote at the end of a step.

    A second signal ends the process at once.

    Attributes:
        is_on: whether a signal is a request. False in a run without a directory, which a signal ends at once.
        heard: number of the first signal; 0 for none.
    """

    def __init__(self, environment: Environment, say: Callable[[str], None], *, is_on: bool) -> None:
        self.heard = 0
        self.is_on = is_on
        self._say = say
        self._launcher = environment.launcher
        self._same_for_s = SAME_SIGNAL_S[environment.launcher]
        self._heard_at_s = 0.0
        self._before: dict[int, Any] = {}
        self._is_released = False
        # Before the loop of a plain script there is nothing to save: Ctrl-C raises KeyboardInterrupt as usual.
        self._install([number for number in STOP_SIGNALS if number != signal.SIGINT or self._launcher != "python"])

    def take(self) -> None:
        """Install all handlers, possibly again after `restore`. Works in the main thread only."""
        self._install(STOP_SIGNALS)

    def _install(self, numbers: Sequence[signal.Signals]) -> None:
        if not self.is_on:
            return
        self._is_released = False
        if threading.current_thread() is threading.main_thread():
            missing = [number for number in numbers if number not in self._before]
            self._before |= {number: signal.signal(number, self._hear) for number in missing}
        if not self.heard:
            for number in kept_signals[:1]:
                self._hear(number, None)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._is_released:  # a later run's handler was on top of this one
            self._pass_on(number, frame)
            return
        now_s = time.monotonic()
        if self.heard and now_s - self._heard_at_s >= self._same_for_s:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self.heard:
            return
        hearer: Any = self
        while isinstance(hearer, StopSignals):  # this run's loop may be that of an earlier run, whose handler is below
            hearer = hearer.note(number, now_s)
        with suppress(RuntimeError, OSError):  # it interrupted a print, or the terminal is gone
            then = "" if self._launcher == "srun" else "; a second one ends at once"
            self._say(f"{signal.Signals(number).name}: the run stops and saves within a step{then}")

    def note(self, number: int, now_s: float) -> object:
        """Note that a signal has arrived. Returns the object whose method was the handler before this one's, if any."""
        self.heard = number
        self._heard_at_s = now_s
        return getattr(self._before.get(number), "__self__", None)

    @property
    def exit_code(self) -> int:
        """Return the exit code of a stopped run: not 0, so that a shell does not treat the run as complete.

        Under a launcher it is 0, so that the launcher does not treat a rank that stopped as requested as failed.
        """
        return find_exit_code(Outcome.STOPPED, self.heard) if self._launcher == "python" else 0

    def ignore_further(self) -> None:
        """Ignore further signals, after all ranks have voted to stop.

        The launcher, or a scheduler on another node, may deliver the same request later. It must not kill a rank that
        is already stopping.
        """
        if math.isinf(self._same_for_s):
            for number in self._before:
                signal.signal(number, signal.SIG_IGN)
            self._before = {}

    def restore(self) -> None:
        """Restore the previous handlers. Works in the main thread only; elsewhere, signals are passed on to them."""
        self._is_released = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in [*self._before.items()]:
            if signal.getsignal(number) == self._hear:
                signal.signal(number, handler)
                del self._before[number]

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


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
