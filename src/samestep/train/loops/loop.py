"""The loop over epochs and steps: what happens between two steps, and how the loop ends."""

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from samestep.console import warn
from samestep.data.attributes import Attributes
from samestep.data.lanes import LanePosition
from samestep.data.loader import Loader, seed_all
from samestep.data.order_files import keep_order
from samestep.engine.control import Vote
from samestep.engine.gradient_averager import GradientAverager
from samestep.errors import Error, InvalidValue, UsageError
from samestep.files import replace_file
from samestep.plan.ledger import fingerprint
from samestep.plan.loop_plan import Task
from samestep.plan.seeds import derive
from samestep.snapshot.inspection import TrainingState
from samestep.snapshot.snapshotter import Snapshotter
from samestep.train.context import RunContext
from samestep.train.ending.stop_signals import MOST_IDLE_STOPS, count_idle_stops, describe_stop
from samestep.train.ending.stopping import Stopping
from samestep.train.guards.replicas import Replicas
from samestep.train.guards.watchdog import Watchdog
from samestep.train.inputs.loop_data import LoopData
from samestep.train.loops.run_metrics import MetricsTally, RunMetrics
from samestep.train.state.position import Place, Position, find_last_step
from samestep.train.step.steps import Observers, Step
from samestep.watch.records import RESTARTS
from samestep.world.environment import (
    BEGUN,
    FINISHED,
    ROOM,
    START_AGAIN,
    STOPPED,
    advise,
    stop_code,
)
from samestep.world.workdir import make_private

AFTER_LOOP = 2**31  # number of the first evaluation after a loop; evaluations inside it have other numbers and draws


class Epoch:
    """One pass over the data set. Iterate over it to get its steps. `Run.epochs` creates the epochs.

    Attributes:
        number: number of the epoch, from 0, over the whole run.
        num_steps: number of optimizer steps in the complete epoch. With a sampler, it may differ between epochs.
        done: whether the script has iterated over its steps.

    Example::

        >>> import samestep, torch
        >>> run = samestep.Run(None, batch_size=4, micro_batch_size=2)
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> run.prepare(model=model, optimizer=optimizer)
        >>> rows = []
        >>> for epoch in run.epochs(torch.ones(8, 1), 2):
        ...     for step in epoch:
        ...         for x in step:
        ...             step.backward(0 * model(x).mean() + epoch.number)
        ...         optimizer.step()
        ...     rows.append((epoch.number, epoch.num_steps, epoch.metrics))
        ...
        >>> rows
        [(0, 2, {'loss': 0.0}), (1, 2, {'loss': 1.0})]
    """

    def __init__(self, loop: "Loop", number: int, num_steps: int, end: int, tally: MetricsTally) -> None:
        self.number = number
        self.num_steps = num_steps
        self._loop = loop
        self._end = end
        self._tally = tally
        self._is_begun = False
        self.done = False

    def __iter__(self) -> Iterator[Step]:
        if self._is_begun:
            raise UsageError(f"the steps of epoch {self.number} can be iterated over once: take the next epoch")
        self._is_begun = True
        yield from self._loop.run_steps_of_epoch(self._end)
        self.done = True

    @property
    def metrics(self) -> dict[str, float]:
        """Averages of `Step.metrics` over the steps of the epoch so far, including those before a restart, by weight.

        Raises:
            UsageError: read before the first step of the epoch is done, or after the epoch.

        Example: see `Epoch`.
        """
        if self._tally.epoch != self.number:
            raise UsageError(
                f"epoch.metrics of epoch {self.number} was read before its first step was done, or in another epoch: "
                "read it in the epoch's body, after the loop over its steps"
            )
        return self._tally.averages()


class Loop:
    """One loop of a run: what `run.epochs` or `run.steps` returns.

    A body runs completely or not at all: snapshots and stops happen when the script asks for the next step or epoch.
    After an epoch's last step, they wait until the epoch's body has run.

    Args:
        build_state: position -> the state for a snapshot.
        on_end: called when the loop has ended, with rows for the final table and with the status.

    Attributes:
        step: the current step, or the last one.
        repeats_head: whether the script's current lines already ran before the restart: the beginning of an epoch, or
            the lines after a complete loop.
        failure: at the end, an Error if the last snapshot could not be written or if another start would not help; else
            None.
    """

    def __init__(
        self,
        context: RunContext,
        data: LoopData,
        place: Place,
        *,
        position: Position,
        gradients: GradientAverager,
        snapshotter: Snapshotter,
        stopping: Stopping,
        watchdog: Watchdog,
        metrics: RunMetrics,
        observers: Observers,
        replicas: Replicas,
        build_state: Callable[[dict[str, Any]], dict[str, Any]],
        on_end: Callable[[dict[str, Any], str, Error | None], None],
    ) -> None:
        self._context = context
        self._data = data
        self._plan = data.plan
        self.place = place
        self._position = position
        self._gradients = gradients
        self._snapshotter = snapshotter
        self._stopping = stopping
        self._watchdog = watchdog
        self._metrics = metrics
        self._on = observers
        self._replicas = replicas
        self._build_state = build_state
        self._on_end = on_end
        self.step: Step | None = None
        self._left_error: Error | None = None  # the script left the loop before its end
        self.repeats_head = place.is_past
        self.failure: Error | None = None
        if not place.is_past and not stopping.ending:
            self._call_sampler()
        num_workers = (
            0
            if place.is_past
            else self._plan.count_workers(data.spec.num_workers, rank=context.rank, world_size=context.world_size)
        )
        spec = replace(data.spec, num_workers=num_workers)
        positions = {} if data.lanes is None else data.lanes.positions
        self._loader = Loader(spec, self._begin_tasks(), device=context.device, positions=positions)
        self._attributes = Attributes(data.spec)

    def run_epochs(self, num_epochs: int) -> Generator[Epoch, None, None]:
        """Yield the epochs from the run's position on."""
        with self._restoring_signals():
            yield from self._run_epochs(num_epochs)

    def _run_epochs(self, num_epochs: int) -> Iterator[Epoch]:
        position = self._position
        self._begin()
        for number in range(self._plan.epoch_of(position.steps_done), self._plan.first_epoch + num_epochs):
            if self._stopping.ending:
                break
            self._load_further()
            self._begin_body("epoch", number)
            per_epoch = self._plan.count_steps(number)
            end = self._plan.end_of(number)
            self.repeats_head = position.steps_done > end - per_epoch
            epoch = Epoch(self, number, per_epoch, end, self._metrics.tally)
            try:
                yield epoch
            except GeneratorExit:
                self._leave("epochs", f"epoch {number}")
                raise
            self.check_not_left()
            if not epoch.done:
                raise UsageError(
                    f"the steps of epoch {number} were not iterated over: its body needs `for step in epoch`; to end "
                    "early, call run.stop() and continue the loop"
                )
            self._stopping.vote_alone()
            whole = position.steps_done == end
            self._watchdog.enter("script", position.steps_done)
            if not whole:  # the body of an interrupted epoch will run again, and will request its snapshots again
                self._snapshotter.drop_names("the run stopped within the epoch that asks for it")
            self._end_body(epochs_done=number + 1 if whole else None, numbered=whole)
        self._finish()

    def run_steps_of_epoch(self, end: int) -> Iterator[Step]:
        """Yield the steps up to step `end`, in an epoch's body."""
        with self._restoring_signals():
            yield from self._run_steps_of_epoch(end)

    def _run_steps_of_epoch(self, end: int) -> Iterator[Step]:
        if (change := self._attributes.find_change()) is not None:  # such as by set_epoch, earlier in the body
            warn(self._context.say, change, start="the data set's")
        while self._position.steps_done < end and not self._stopping.ending:
            yield from self._run_step(is_last=self._position.steps_done + 1 == end)

    def run_steps(self) -> Generator[Step, None, None]:
        """Yield the steps from the run's position on."""
        with self._restoring_signals():
            yield from self._run_steps()

    def _run_steps(self) -> Iterator[Step]:
        self._begin()
        while not self._stopping.ending:
            self._load_further()
            yield from self._run_step(is_last=False)
        self._finish()

    def _run_step(self, *, is_last: bool) -> Iterator[Step]:
        """Yield the next step, and close it after its body. `is_last`: the body of the epoch continues after it."""
        position = self._position
        number = self._position.steps_done
        self.repeats_head = False
        self._begin_body("step", number)
        if self.step is None:
            self._replicas.watch(self._snapshotter)
        else:
            self.step.is_over = True
        spans = self._plan.micro_batches(number)
        self.step = step = Step(
            number,
            self._plan.epoch_of(number),
            spans,
            self._loader,
            context=self._context,
            gradients=self._gradients,
            position=position,
            logs=self._context.location.logs,
            cast_vote=self._cast_vote,
            observers=self._on,
        )
        self._on.begin_step(step)
        try:
            yield step
        except GeneratorExit:
            self._leave("steps", f"step {number}")
            raise
        step.check_not_left()
        if step.open or not step.num_passes:
            raise UsageError(
                f"the micro-batches of step {number} were not iterated over: its body needs `for batch in step`; to "
                "end early, call run.stop() and continue the loop"
            )
        position.steps_done += 1
        self._on.end_step(step)
        if not is_last:
            self._end_body(epochs_done=None, numbered=True)

    def _cast_vote(self) -> Vote:
        results = self._on.interceptors.results()
        logged = self._metrics.take_names()
        return self._stopping.cast_vote(comparison=self._replicas.is_time(), results=results, logged=logged)

    def explain_end(self) -> tuple[str, str]:
        """Describe why the loop has no step left, and how to train it longer."""
        steps_done = self._position.steps_done
        last_step = self.place.last_step
        if steps_done < last_step:
            return f"run.stop() has ended it after step {steps_done}", f"start with {advise(resume=steps_done)}"
        end = self._plan.find_end(self.place.planned)
        is_cut = end is None or last_step < end
        more = "a larger max_steps" if is_cut else "more steps" if self._plan.is_endless else "more epochs"
        return f"{steps_done} of {last_step} steps are done", f"ask for {more}"

    def check_not_left(self) -> None:
        """Raise Error if the script left one of the loops before its end."""
        if self._left_error is not None:
            raise self._left_error

    def find_end(self) -> tuple[int, int]:
        """Return the step and the epoch at which the next loop begins. Raises Error before this loop has ended."""
        if not self._stopping.is_ended:
            raise UsageError(
                "this run is inside another loop: call run.epochs() or run.steps() after that loop, not inside it "
                "or before it has begun"
            )
        return self._position.steps_done, self._plan.next_epoch(self._position.steps_done)

    def find_failure(self) -> Error | None:
        """At the end of the process: return why the run has not ended correctly."""
        return self._left_error or self.failure

    @contextmanager
    def _restoring_signals(self) -> Iterator[None]:
        """After an error in the loop, Ctrl-C is no request to stop: a notebook, for example, continues without it."""
        try:
            yield
        except Exception:
            self._release_signals()
            raise

    def _release_signals(self) -> None:
        if self._context.environment.launcher == "python":  # a rank of a launcher may still get its signals
            self._stopping.signals.restore()

    def _leave(self, loop: str, where: str) -> None:
        self._on.leave(self._position.steps_done)
        self._release_signals()
        if not self._stopping.is_ended and self._left_error is None:
            self._left_error = UsageError(
                f"the loop over the {loop} was left by break (or return, or an error) in {where}, so that what came "
                "after the last snapshot is lost: to end early, call run.stop() and continue the loop"
            )

    def _begin(self) -> None:
        """Begin the loop. A run that has already received a signal to stop ends here."""
        if self.place.is_past:
            return
        location = self._context.location
        settings = self._context.config
        environment = self._context.environment
        self._stopping.signals.take()
        self._watchdog.begin()
        if self.place.is_further:
            location.write_status("running", "", None)
        elif location.directory is not None:
            from_step = self._position.steps_done
            world_size = self._context.world_size
            location.directory.write_start(environment.restart, from_step=from_step, world_size=world_size)
        if environment.local_rank == 0:
            self._notify_launcher(ROOM, str(settings.batch_size // settings.micro_batch_size))
            if location.path is not None:
                self._notify_launcher(BEGUN, location.shown)
        self._stopping.vote_together()
        self._exit_after_signal()
        self._stopping.agree_together()

    def _begin_body(self, purpose: str, number: int) -> None:
        """Seed the body and its evaluations from its number, so that they do not depend on where the run resumed."""
        seed_all(derive(self._context.config.seed, purpose, step=number))
        self._position.num_evaluations = 0

    def _end_body(self, *, epochs_done: int | None, numbered: bool) -> None:
        """Save the snapshots that are due after a body, and end the process if the ranks have voted to stop.

        Args:
            epochs_done: at an epoch's end, after its body.
            numbered: whether the run can resume from the position, so that a numbered snapshot may be written.
        """
        steps_done = self._position.steps_done
        stopping = self._stopping
        snapshotter = self._snapshotter
        if self.step is not None:
            self._on.end_body(self.step)
        self._replicas.compare_if_due(steps_done, epochs_done)
        # At an epoch's end, the next exchange may not be that of a step.
        if epochs_done is None:
            stopping.agree()
        else:
            stopping.agree_together(snapshotter.take_asked())
        if self._context.location.path is not None:
            epoch = self._plan.epoch_of(steps_done) if epochs_done is None else epochs_done
            position: dict[str, Any] = {"step": steps_done, "epoch": epoch, **self._data.state_dict(steps_done)}
            stopped = {"stopped": stopping.reason} if stopping.reason and steps_done < self.place.last_step else {}
            notes: dict[str, Any] = {"tally": self._metrics.tally.state_dict()} | stopped

            def get_state() -> TrainingState:
                if self._data.lanes is not None:
                    lanes = self._gather_lanes()
                    position["lanes"] = [lane.row for lane in lanes]
                    notes["lanes_s"] = [lane.spent_s for lane in lanes]
                return self._replicas.build_training_state(lambda: self._build_state(position), steps_done)

            self._watchdog.enter("saving", steps_done)
            snapshotter.save_what_is_due(
                get_state,
                step=steps_done,
                epochs_done=epochs_done,
                numbered=numbered,
                ending=stopping.ending,
                notes=notes,
            )
            self._watchdog.leave_saving(steps_done)
        self._exit_after_signal()

    def _gather_lanes(self) -> list[LanePosition]:
        """Gather the positions of a stream's lanes from the ranks that read them, on all ranks."""
        group = self._context.group
        newest = dict[int, LanePosition]()
        for sealed in group.gather(group.seal(self._loader.positions)):
            for lane, position in group.unseal(sealed).items():
                if lane not in newest or newest[lane].num_samples < position.num_samples:
                    newest[lane] = position
        return [newest[lane] for lane in sorted(newest)]

    def _exit_after_signal(self) -> None:
        """End the process after a signal, once all ranks have voted."""
        if not self._stopping.is_interrupted:
            return
        steps_done = self._position.steps_done
        signals = self._stopping.signals
        saved = self._snapshotter.saved_step == steps_done
        self._context.say(
            f"stopped by a signal after step {steps_done}"
            + (f", saved in {self._context.location.named}: the same command continues from there" if saved else "")
        )
        signals.leave()
        self._end("stopped", describe_stop(self._stopping.signal))
        if self.failure is not None:
            raise self.failure
        self._notify_launcher(STOPPED)
        raise SystemExit(signals.exit_code)

    def _notify_launcher(self, event: str, text: str = "") -> None:
        """Leave a note for samestep's launcher. An exit code can only express success and failure."""
        error_dir = self._context.environment.error_dir
        if error_dir is not None:
            path = Path(error_dir, event)
            with suppress(OSError):  # the disk is full: the launcher then assumes the default
                make_private(path.parent)
                replace_file(path, os.fsencode(text))

    def _finish(self) -> None:
        """End a loop that has completed."""
        if not self.place.is_past:
            reason = self._stopping.reason
            if reason:
                self._context.say(f"stopped at step {self._position.steps_done}: {reason}")
            self._end("stopped" if reason else "done", reason)
            self._notify_launcher(FINISHED)
            self._stopping.reason = ""  # a further loop is not stopped by it
        self._stopping.is_ended = True
        self._position.end_loop(self.place, self._plan)
        # So the code after the loop draws the same numbers in a later start that finds nothing left to do.
        self._begin_body("after", self._position.steps_done)
        self._position.num_evaluations = AFTER_LOOP

    def _end(self, status: str, reason: str) -> None:
        self._stopping.is_ended = True
        self._loader.close()
        context = self._context
        steps_done = self._position.steps_done
        self._watchdog.enter("saving", steps_done)
        self._snapshotter.end(steps_done)
        # On all ranks: if the launcher of one node ended with START_AGAIN, srun would return it for all nodes.
        ends = [(context.rank, self._explain_failure())]
        ends = context.group.gather(ends[0]) if self._stopping.signal else ends
        rank, failure = next((end for end in ends if end[1]), (0, ""))
        if failure:
            self.failure = Error(failure, rank=rank)
            status = "failed"
            reason = failure
        self._watchdog.enter("script", steps_done)
        rows, measured = self._metrics.sum_up(steps_done, self._position.began_step, self._watchdog.spent_s())
        end = None if failure else {"steps": steps_done, "measured": measured}
        context.location.write_status(status, reason, end)
        self._watchdog.close()
        self._on_end(rows, status, self.failure)

    def _explain_failure(self) -> str:
        """Describe a failure at the run's end, on ranks that record it; "" if there was none."""
        snapshotter = self._snapshotter
        position = self._position
        signal = self._stopping.signal
        if snapshotter.unsaved is not None and snapshotter.unsaved[0] == position.steps_done:
            return f"{snapshotter.unsaved[1]}; fix this, and start the same command again"
        is_again = self._stopping.is_interrupted and stop_code(signal) == START_AGAIN
        if not is_again or self._context.rank != 0 or (run_dir := self._context.location.path) is None:
            return ""
        if (snapshotter.saved_step or 0) > position.resumed_step:
            return ""
        count = count_idle_stops(run_dir / RESTARTS) + 1
        if count < MOST_IDLE_STOPS:
            return ""
        cure = "give each more time (with submit: a longer --time)"
        if self._context.config.snapshot_every is None:
            cure = "let it save (--snapshot-every), or give it time for all of its steps"
        return (
            f"{count} starts in a row were stopped before they had saved more than step {position.resumed_step}: "
            f"{cure}, and start the same command again"
        )

    def _begin_tasks(self) -> Iterator[Task]:
        """Return this rank's tasks for the steps whose samples are known: all, or with a sampler those of its epochs.

        So the loader workers do not read ahead over the end of an epoch, where a sampler may depend on its last step.
        """
        context = self._context
        steps_done = self._position.steps_done
        borrow = self._on.interceptors.borrow
        self._loaded_end = self._plan.find_known_end(self.place.last_step)
        return self._plan.tasks(
            steps_done, self._loaded_end, rank=context.rank, world_size=context.world_size, borrow=borrow
        )

    def _load_further(self) -> None:
        """Call the sampler for the next epochs, and load them, if the next step is not known yet."""
        if self._position.steps_done == self._loaded_end:
            self._call_sampler()
            self._loader.begin(self._begin_tasks())

    def _call_sampler(self) -> None:
        """Get the orders of the next step's epochs, check that all ranks have the same, and keep them for the audit."""
        if self._data.orders is None:
            return
        self._data.open_epochs(self._position.steps_done)
        for epoch, indices in self._data.orders.take_new().items():
            if len(set(self._context.group.gather(fingerprint(indices)))) > 1:
                raise InvalidValue(
                    f"sampler({epoch}) gave other indices on other ranks: seed it from the epoch, not the rank"
                )
            location = self._context.location
            if (directory := location.path) is not None and (
                problem := location.once(partial(keep_order, directory, epoch, indices))
            ):
                self._context.say(problem)
        last_step = find_last_step(self._plan, self.place.planned, self._context.config.max_steps)
        if last_step != self.place.last_step:
            self.place = replace(self.place, last_step=last_step)
            self._stopping.move_end(last_step)
            self._metrics.move_end(last_step)
