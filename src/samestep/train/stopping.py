"""How a run ends: the loop after the same step on all ranks, and the process with the right error and exit code.

A loop ends after its last step, by run.stop(), or by a signal. What a run keeps open over its loops is closed when
nothing refers to the run any more. The process of a run that has not ended correctly ends with its error.
"""

import gc
import io
import math
import os
import pickle
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NamedTuple, NoReturn
from weakref import WeakSet

from samestep.console import print_error
from samestep.engine.control import Saving, Vote
from samestep.engine.passes import Reduced
from samestep.errors import Error, PeerFailed, UsageError, WorkerDied, add_code, recognize
from samestep.launch.rank_process import kept_signals
from samestep.launch.rank_reports import Result, build_failure, has_launcher, is_secondary, report
from samestep.processes import Held, hold, leave, leave_now
from samestep.snapshot.snapshotter import Snapshotter
from samestep.train.context import RunContext, RunState
from samestep.train.guards import Call, gather_after_step
from samestep.train.metrics import RunMetrics
from samestep.train.step import Step, StepObserver
from samestep.train.watchdog import Watchdog
from samestep.watch.progress import Progress
from samestep.watch.trackers import Trackers
from samestep.world.environment import Environment, Outcome, allow_all_characters, find_exit_code
from samestep.world.process_group import close_group, has_group, is_first

# Seconds in which a further signal counts as a repetition of the first one: a scheduler that signals every process of a
# job reaches a rank directly and also through its launcher. After a real second signal, samestep's launcher kills the
# ranks. A scheduler sends SIGKILL some time after the signal at a job's limit.
SAME_SIGNAL_S = {"python": 0.0, "torchrun": 2.0, "samestep": math.inf, "srun": math.inf}

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# Of the process, as signals are.
_listeners: dict[int, "WeakSet[StopSignals]"] = {number: WeakSet() for number in STOP_SIGNALS}
_before: dict[int, Any] = {}  # the handlers before `_hear`


def _hear(number: int, frame: FrameType | None) -> None:
    """Handle a signal: it concerns all runs that listen."""
    for each in [*_listeners[number]]:
        each.hear(number)
    if not _listeners[number]:  # they have ended in another thread, where handlers cannot be restored
        signal.signal(number, _before[number])
        signal.raise_signal(number)


class StopSignals:
    """Treats SIGINT, SIGTERM and SIGUSR1 as requests to stop, on which all ranks vote in each step.

    A second signal ends the process at once. In a run that saves no state, each signal does.

    Attributes:
        heard: number of the first signal; 0 for none.
    """

    def __init__(self, environment: Environment, say: Callable[[str], None], *, is_on: bool) -> None:
        self.heard = 0
        self._say = say
        self._is_on = is_on
        self._launcher = environment.launcher
        self._same_for_s = SAME_SIGNAL_S[environment.launcher]
        self._heard_at_s = 0.0
        # Before the loop of a plain script there is nothing to save: Ctrl-C raises KeyboardInterrupt as usual.
        self.listen(STOP_SIGNALS if self._launcher != "python" else STOP_SIGNALS[1:])
        if is_on and kept_signals:
            self.hear(kept_signals[0])

    def listen(self, numbers: Iterable[int] = STOP_SIGNALS) -> None:
        """Listen to signals, possibly again after `restore`. Works in the main thread only."""
        if not self._is_on or threading.current_thread() is not threading.main_thread():
            return
        for number in numbers:
            _listeners[number].add(self)
            if (before := signal.signal(number, _hear)) is not _hear:
                _before[number] = before

    def hear(self, number: int) -> None:
        """Note a signal."""
        now_s = time.monotonic()
        if self.heard:
            if now_s - self._heard_at_s >= self._same_for_s:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.heard = number
        self._heard_at_s = now_s
        with suppress(RuntimeError, OSError):  # it interrupted a print, or the terminal is gone
            then = "" if self._launcher == "srun" else "; a second one ends at once"
            self._say(f"{signal.Signals(number).name}: the run stops and saves within a step{then}")

    def ignore_further(self) -> None:
        """Ignore further signals, after all ranks have voted to stop.

        The launcher, or a scheduler on another node, may deliver the same request later. It must not kill a rank that
        is already stopping.
        """
        if math.isinf(self._same_for_s):
            self.restore(signal.SIG_IGN)

    def restore(self, handler: signal.Handlers | None = None) -> None:
        """Listen no more. If no other run listens, this sets `handler`, or else the previous handlers."""
        for number in STOP_SIGNALS:
            _listeners[number].discard(self)
            is_last = not _listeners[number] and signal.getsignal(number) is _hear
            if is_last and threading.current_thread() is threading.main_thread():
                signal.signal(number, _before[number] if handler is None else handler)


class Decision(NamedTuple):
    """What all ranks do when the body ends.

    Attributes:
        signal: the signal that stops the run; 0 for none.
        saves: whether a snapshot is due by a clock.
        is_copying: whether the ranks copy their state for a snapshot.
        is_written: whether all ranks have written what they store of a snapshot.
    """

    signal: int
    saves: bool
    is_copying: bool
    is_written: bool


def decide(votes: Sequence[Vote]) -> Decision:
    """Decide by the votes of all ranks, equally on all of them.

    Raises:
        UsageError: only some ranks have a snapshot in progress.
    """
    signals, are_due, saving, *_ = zip(*votes, strict=True)
    copying = [each == Saving.COPYING for each in saving]
    if any(copying) and not all(copying):
        raise UsageError(
            f"rank {copying.index(True)} takes a snapshot, and rank {copying.index(False)} does not: call run.snapshot "
            "on every rank; one of them writes it",
            code="SS501",
        )
    return Decision(max(signals), True in are_due, all(copying), {*saving} == {Saving.WRITTEN})


class Stopping(StepObserver):
    """Decides, equally on all ranks, which step of a loop is the last one, and waits for the copies of snapshots.

    Each step's exchange carries a vote of every rank. An observer of steps.

    Args:
        signals: the signals that this rank has received.

    Attributes:
        signal: the signal that stops the run on all ranks; 0 for none.
    """

    def __init__(self, state: RunState, snapshotter: Snapshotter, watchdog: Watchdog, signals: StopSignals) -> None:
        self._state = state
        self._snapshotter = snapshotter
        self._watchdog = watchdog
        self.signals = signals

    def begin_loop(self) -> None:
        """A loop begins."""
        self.signal = 0

    @property
    def is_ending(self) -> bool:
        """Whether no further step of the loop begins."""
        state = self._state
        return bool(self.signal or state.stop_reason) or state.steps_done >= state.loop.last_step

    @property
    def call(self) -> Call:
        """The call by which this rank tells the others whether it ends a loop that goes on without a run.stop()."""
        return Call.STOP if self._state.is_stopped and not self.signal else Call.NONE

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
        if decision.is_copying:
            self._watchdog.enter("saving", self._state.steps_done)
        self._snapshotter.join_copy()
        if decision.is_copying:
            self._watchdog.enter(before, self._state.steps_done)
        if decision.is_written:
            self._snapshotter.join_parts()
        if not self._state.is_in_loop:
            return
        if decision.saves:
            self._snapshotter.want()
        self.signal = decision.signal

    def exchanged(self, step: Step, reduced: Reduced) -> None:
        if any(map(any, reduced.votes)):  # else no rank asks for anything
            self.take_votes(reduced.votes)


class Shared(Held):
    """What the runs of a process share. It is closed after all of them.

    That is the process group, of which torch has one, and the errors of runs that have not ended correctly. The process
    ends with the first of them.
    """

    def __init__(self) -> None:
        self.errors: list[tuple[Error, Environment]] = []

    def close(self) -> None:
        for each in self.errors:
            end_with(*each)
        close_group()

    def forget(self) -> None:
        self.errors.clear()


shared = Shared()


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
        self.snapshotter = Snapshotter(
            context.config.snapshot_every, context.location, context.say, partial(gather_after_step, context.group)
        )
        saves = context.location.path is not None and context.config.snapshot_every is not None
        signals = StopSignals(context.environment, progress.say, is_on=saves)
        self.watchdog = Watchdog(context)
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
            shared.errors.append((error, self._context.environment))

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
            shared.errors.append((error, environment))

    def forget(self) -> None:
        self._is_open = False
        self.stopping.signals.restore()


def report_errors(rank: int) -> None:
    """Make an uncaught Error end the program with its sentence and exit code 2.

    A rank that only lost another rank prints one line, because the other rank's error is the cause.
    """
    allow_all_characters()
    previous = sys.excepthook
    pid = os.getpid()
    if getattr(previous, "__module__", "") == __name__:
        return

    def report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != pid:
            previous(kind, error, trace)
            return
        error = recognize(error) or error
        if isinstance(error, Error):
            _say_once(error)
            _leave(Error.exit_code)
        if isinstance(error, WorkerDied):
            print_error(f"samestep: rank {rank}'s {error}", original=True)
            _leave(1)
        if isinstance(error, PeerFailed) or is_secondary(error):
            reason = " ".join(str(error).split("\n")[0].split())
            print_error(f"samestep: rank {rank} has lost another rank ({reason})", original=True)
            _leave(1)
        previous(kind, error, trace)
        if issubclass(kind, KeyboardInterrupt) and not _is_at_prompt():
            # Python would end with 1 if an atexit function, such as one of torch, creates a namedtuple.
            leave(find_exit_code(Outcome.STOPPED, signal.SIGINT), waits=True)
        if issubclass(kind, Exception) and has_group():
            if isinstance(sys.stderr, io.StringIO):  # torch.distributed's hook would print it after this one
                text = textwrap.indent(sys.stderr.getvalue(), f"[rank{rank}]: ")
                print_error(text.removesuffix("\n"), original=True)
            _leave(1)

    sys.excepthook = report_uncaught


def _leave(code: int) -> NoReturn:
    """End the process with this code, without the destructors of torch's threads, which may abort it instead.

    At a prompt, or with `python -i`, only the statement ends.
    """
    if _is_at_prompt():
        raise SystemExit(code)
    leave(code)


def _is_at_prompt() -> bool:
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def _say_once(error: Error) -> None:
    if is_first("error"):
        # Not sys.stderr: torch.distributed's hook buffers sys.stderr around this one, and SystemExit loses the buffer.
        print_error(f"samestep: error: {add_code(str(error), error.code)}", original=True)


def describe_failure(error: BaseException, rank: int) -> str:
    """Describe the error that ends a rank, for `status.json`."""
    if is_secondary(error):
        return f"rank {rank} lost another rank"
    return f"rank {rank}: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"


def end_with(error: Error, environment: Environment) -> NoReturn:
    """End the process of a finished script as if the script had raised `error`."""
    if has_launcher():
        report(build_failure(environment.rank, error, Error.exit_code))
        report(Result(environment.rank, pickle.dumps(error)))
    else:
        _say_once(error)
    leave_now(Error.exit_code)
