"""The loop over epochs and steps."""

import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from operator import methodcaller

from samestep.data.loader import seed_all
from samestep.engine.control import Vote
from samestep.errors import Error, UsageError
from samestep.launch.rank_reports import LoopState, report
from samestep.plan.order import derive
from samestep.snapshot.async_copy import WHOLE, TrainingState
from samestep.train.context import LoopKind, MetricsTally, RunContext
from samestep.train.feed import Feed
from samestep.train.guards import Call, list_stable, wait_for_call
from samestep.train.prepared import Prepared
from samestep.train.step import Observers, Step, StepParts
from samestep.train.stopping import Services
from samestep.world.environment import BegunRun, Outcome, find_exit_code


class Epoch:
    """One pass over the data set. Iterate over it to get its steps. `Run.epochs` creates the epochs.

    Attributes:
        number: number of the epoch, from 0, over the whole run.
        num_steps: number of optimizer steps in the complete epoch, the same in all epochs of a loop.
        is_done: whether the script has iterated over its steps.

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

    def __init__(self, loop: "Loop", number: int, num_steps: int, tally: MetricsTally) -> None:
        self.number = number
        self.num_steps = num_steps
        self._loop = loop
        self._tally = tally
        self._is_begun = False
        self.is_done = False

    def __iter__(self) -> Iterator[Step]:
        if self._is_begun:
            raise UsageError(
                f"the steps of epoch {self.number} can be iterated over once: take the next epoch", code="SS218"
            )
        self._is_begun = True
        yield from self._loop.run_steps_of_epoch(self.number)
        self.is_done = True

    @property
    def metrics(self) -> dict[str, float]:
        """Averages of `Step.metrics`, by weight, over the steps of the epoch so far, including those before a restart.

        Raises:
            UsageError: read before the first step of the epoch is done, or after the epoch.

        Example: see `Epoch`.
        """
        if self._tally.epoch != self.number:
            raise UsageError(
                f"epoch.metrics of epoch {self.number} was read before its first step was done, or in another epoch: "
                "read it in the epoch's body, after the loop over its steps",
                code="SS219",
            )
        return self._tally.averages()


class Loop:
    """One loop of a run: what `run.epochs` or `run.steps` returns.

    A body runs completely or not at all: snapshots and stops happen when the script requests the next step or epoch.
    After an epoch's last step, they wait until the epoch's body has run.

    Attributes:
        step: the current step, or the last one.
        repeats_head: whether the script's current lines already ran before the restart: the beginning of an epoch, or
            the lines after a complete loop.
        is_cut: whether the script is in the rest of the body of an epoch in which the run stopped. It will run again.
    """

    def __init__(
        self, context: RunContext, prepared: Prepared, services: Services, feed: Feed, observers: Observers
    ) -> None:
        state = context.state
        self._context = context
        self._state = state
        self._prepared = prepared
        self._services = services
        self._feed = feed
        self._plan = feed.plan
        self._on = observers
        self._parts = StepParts(
            context,
            partial(derive, context.config.seed),
            feed.load,
            prepared.gradients,
            observers,
            services.watchdog,
            self._cast_vote,
            prepared.runner,
        )
        self.step: Step | None = None
        self.repeats_head = state.loop.is_past
        self.is_cut = False
        self._left_error: Error | None = None  # the script left the loop before its end
        self._unsaved_error: Error | None = None  # the last snapshot could not be written

    # --- bodies -----------------------------------------------------------------------------------------------

    def run_epochs(self) -> Generator[Epoch, None, None]:
        """Yield the epochs from the run's position on."""
        state = self._state
        num_steps = self._plan.steps_per_epoch
        with self._noting_if_left():
            self._begin()
            while not self._services.stopping.is_ending:
                self._feed.load_further()
                epoch = Epoch(self, self._plan.epoch_of(state.steps_done), num_steps, state.tally)
                self._seed_body("epoch", epoch.number)
                state.begin_epoch()
                self.repeats_head = state.steps_done > self._plan.num_steps_until(epoch.number) - num_steps
                yield epoch
                self._end_epoch(epoch)
            self._finish()

    def run_steps_of_epoch(self, number: int) -> Iterator[Step]:
        """Yield the steps of an epoch, in its body."""
        end = self._plan.num_steps_until(number)
        with self._noting_if_left():
            while self._state.steps_done < end and not self._services.stopping.is_ending:
                yield from self._run_step(is_last=self._state.steps_done + 1 == end)
            self.is_cut = self._state.steps_done < end

    def run_steps(self) -> Generator[Step, None, None]:
        """Yield the steps from the run's position on."""
        with self._noting_if_left():
            self._begin()
            while not self._services.stopping.is_ending:
                self._feed.load_further()
                yield from self._run_step(is_last=False)
            self._finish()

    def _run_step(self, *, is_last: bool) -> Iterator[Step]:
        """Yield the next step, and close it after its body. `is_last`: the body of the epoch continues after it."""
        number = self._state.steps_done
        self.repeats_head = False
        self._seed_body("step", number)
        self._state.begin_step()
        if self.step is None:  # a change before the first update is noticed, too
            objects = self._prepared.objects
            self._services.snapshotter.detect_writes(list_stable(objects, objects.name_params()))
        step = Step(number, self._plan.epoch_of(number), self._plan.micro_batches(number), self._parts)
        self.step = step
        self._on.begin_step(step)
        yield step
        if step.is_open or not step.num_passes:
            step.check_not_left()
            raise UsageError(
                f"the micro-batches of step {number} were not iterated over: its body needs `for batch in step`; to "
                "end early, call run.stop() and continue the loop",
                code="SS218",
            )
        self._state.end_step(step.result.is_skipped)
        self._services.watchdog.enter("script", number + 1)
        self._on.end_step(step)
        if not is_last:
            self._end_body(None)

    def _end_epoch(self, epoch: Epoch) -> None:
        """An epoch's body has run."""
        self.check_not_left()
        if not epoch.is_done:
            raise UsageError(
                f"the steps of epoch {epoch.number} were not iterated over: its body needs `for step in epoch`; to end "
                "early, call run.stop() and continue the loop",
                code="SS218",
            )
        self._services.watchdog.enter("script", self._state.steps_done)
        if self.is_cut:  # its body will run again, and will request its snapshots again
            self._services.snapshotter.drop_names("the run stopped within the epoch that asks for it")
        self._end_body(None if self.is_cut else epoch.number + 1)
        self.is_cut = False

    def _seed_body(self, purpose: str, number: int) -> None:
        """Seed the body and its evaluations from its number, so that they do not depend on where the run resumed."""
        seed_all(derive(self._context.config.seed, purpose, step=number))

    def _cast_vote(self) -> Vote:
        """Return this rank's vote, for the exchange of a step."""
        # Only one of them has results.
        computed, recomputed = max(map(methodcaller("results"), self._on.interceptors), default=(0, 0))
        return self._services.stopping.cast_vote(
            computed=computed,
            recomputed=recomputed,
            checksum=self._services.metrics.read_checksum(),
        )

    # --- between the bodies -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin the loop, if it has steps left."""
        loop = self._state.loop
        if loop.is_past:
            return
        context = self._context
        location = context.location
        self._services.stopping.signals.listen()
        self._services.watchdog.begin()
        if loop.kind is LoopKind.FURTHER:
            location.write_status("running", "", None)
        elif location.directory is not None:
            location.directory.write_start(
                context.environment.restart, from_step=self._state.steps_done, world_size=context.world_size
            )
        self._report(Outcome.UNKNOWN)
        context.group.announce_ready()  # what rank 0 alone does at the start is done
        wait_for_call(context.group, self._services.stopping.call)

    def _end_body(self, epochs_done: int | None) -> None:
        """Save the snapshots that are due after a body, and end the process if the ranks have voted to stop.

        Args:
            epochs_done: after the body of a complete epoch; else None.
        """
        steps_done = self._state.steps_done
        services = self._services
        stopping = services.stopping
        snapshotter = services.snapshotter
        if self.step is not None:
            self._on.end_body(self.step)
        self._prepared.replicas.compare_if_due(steps_done, epochs_done)
        # Over local sockets, ranks that continue with a step notice in its exchange that another one waits here.
        if epochs_done is not None:
            wait_for_call(self._context.group, stopping.call, snapshotter.take_asked())
        elif stopping.call == Call.STOP:
            wait_for_call(self._context.group, Call.STOP)
        ending = stopping.is_ending
        due = snapshotter.take_due(step=steps_done, epochs_done=epochs_done, numbered=not self.is_cut, ending=ending)
        if due:
            services.watchdog.enter("saving", steps_done)
            snapshotter.wait_until_written()
            snapshotter.save(self._build_training_state(epochs_done), steps_done, due, ending=ending)
            services.watchdog.enter("script", steps_done)
        # A run that is complete, or ended by run.stop(), is not interrupted.
        if stopping.signal and not self._state.stop_reason and steps_done < self._state.loop.last_step:
            self._exit_after_signal()

    def _build_training_state(self, epochs_done: int | None) -> TrainingState:
        """Return the content of a snapshot. `epochs_done`: as for `_end_body`."""
        state = self._state
        prepared = self._prepared
        epoch = self._plan.epoch_of(state.steps_done) if epochs_done is None else epochs_done
        position = state.build_position(epoch, self._feed.data, self._feed.gather_lanes())
        divided = prepared.divided if self._context.location.is_divided else None
        objects, share = (prepared.collect_states(), WHOLE) if divided is None else divided.outline()
        self._services.metrics.complete_checksums()
        return prepared.replicas.build_training_state(
            prepared.contents.build(position, state.script, objects),
            state.build_notes(),
            state.steps_done,
            share,
        )

    # --- the end ----------------------------------------------------------------------------------------------

    def _exit_after_signal(self) -> None:
        """End the process, since all ranks have voted to stop after a signal."""
        stopping = self._services.stopping
        context = self._context
        steps_done = self._state.steps_done
        is_saved = self._services.snapshotter.saved_step == steps_done
        saved = f", saved in {context.location.named}: the same command continues from there" if is_saved else ""
        context.say(f"stopped by a signal after step {steps_done}{saved}")
        stopping.signals.ignore_further()
        self._end("stopped", f"stopped by {signal.Signals(stopping.signal).name}")
        if self._unsaved_error is not None:
            raise self._unsaved_error
        self._report(Outcome.STOPPED)
        # Not 0, so that a shell does not treat the run as complete. A launcher would treat this rank as failed.
        is_launched = context.environment.launcher != "python"
        raise SystemExit(0 if is_launched else find_exit_code(Outcome.STOPPED, stopping.signals.heard))

    def _finish(self) -> None:
        """End a loop without steps left, so that the code after it draws the same numbers in a later start."""
        state = self._state
        if not state.loop.is_past:
            reason = state.stop_reason
            if reason:
                self._context.say(f"stopped at step {state.steps_done}: {reason}")
            self._end("stopped" if reason else "done", reason)
            self._report(Outcome.FINISHED)
        state.end_loop(self._plan)
        self._seed_body("after", state.steps_done)

    def _report(self, outcome: Outcome) -> None:
        """Report to samestep's launcher which run a restart continues."""
        context = self._context
        environment = context.environment
        run = None
        if context.location.path is not None and environment.local_rank == 0:  # ranks may compute different names
            run = BegunRun(context.location.shown, environment.run_number, outcome is Outcome.FINISHED)
        report(LoopState(outcome, run))

    def _end(self, status: str, reason: str) -> None:
        context = self._context
        services = self._services
        steps_done = self._state.steps_done
        self._state.leave_loop()
        self._feed.close()
        services.watchdog.enter("saving", steps_done)
        services.metrics.complete_checksums()
        # On all ranks: if the launcher of one node ended with START_AGAIN, srun would return it for all nodes.
        problems = context.group.gather(services.snapshotter.end(steps_done))
        if failure := next(filter(None, problems), ""):
            status = "failed"
            reason = f"{failure}; fix this, and start the same command again"
            self._unsaved_error = Error(reason, rank=problems.index(failure), code="SS417")
        services.watchdog.enter("script", steps_done)
        rows, measured = services.metrics.sum_up(services.watchdog.spent_s())
        end = None if failure else {"steps": steps_done, "measured": measured}
        if context.group.can_heal:  # If rank 0 dies before this, another one writes it, or all start again.
            context.group.once(context.location.write_status, status, reason, end)
        else:  # each node that keeps a copy of the run writes it
            context.location.write_status(status, reason, end)
        services.watchdog.close()
        services.metrics.finish(rows, status)
        services.stopping.signals.restore()

    def check_not_left(self) -> None:
        """Raise Error if the script left one of the loops before its end."""
        if self._left_error is not None:
            raise self._left_error

    def find_end(self) -> tuple[int, int]:
        """Return the step and the epoch at which the next loop begins. Raises Error before this loop has ended."""
        if self._state.is_in_loop:
            raise UsageError(
                "this run is inside another loop: call run.epochs() or run.steps() after that loop, not inside it "
                "or before it has begun",
                code="SS220",
            )
        return self._state.steps_done, self._plan.next_epoch(self._state.steps_done)

    def conclude(self) -> Error | None:
        """At the end of the process: return why the run has not ended correctly."""
        if self._state.is_in_loop and self.step is not None:  # the script has kept the iterator, which is still open
            self._leave()
        return self._left_error or self._unsaved_error

    @contextmanager
    def _noting_if_left(self) -> Iterator[None]:
        """The loop is left if it raises an error, which the script may catch, or if Python closes its generator."""
        try:
            yield
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        """The script has left the loop."""
        self._services.watchdog.leave()
        self._feed.close()
        self._services.snapshotter.leave()
        if self._context.environment.launcher == "python":  # a rank of a launcher may still get its signals
            self._services.stopping.signals.restore()
        if self._state.is_in_loop and self._left_error is None:
            self._left_error = UsageError(
                f"the loop was left by break (or return, or an error) at run.steps_done={self._state.steps_done}, so "
                "that what came after the last snapshot is lost: to end early, call run.stop() and continue the loop",
                code="SS217",
            )
            if (directory := self._context.location.directory) is not None:
                directory.write_status("failed", str(self._left_error))
            self._services.note(self._left_error)
