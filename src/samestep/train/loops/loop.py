"""The loop over epochs and steps."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial

from samestep.errors import Error, UsageError
from samestep.plan.seeds import derive
from samestep.train.context import RunContext
from samestep.train.loops.boundary import Boundary, Services
from samestep.train.loops.feed import Feed
from samestep.train.prepared import Prepared
from samestep.train.state.run_state import MetricsTally, RunState
from samestep.train.step.steps import Observers, Step, StepParts
from samestep.world.environment import advise


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

    def __init__(self, loop: "Loop", number: int, num_steps: int, end: int, tally: MetricsTally) -> None:
        self.number = number
        self.num_steps = num_steps
        self._loop = loop
        self._end = end
        self._tally = tally
        self._is_begun = False
        self.is_done = False

    def __iter__(self) -> Iterator[Step]:
        if self._is_begun:
            raise UsageError(
                f"the steps of epoch {self.number} can be iterated over once: take the next epoch", code="SS218"
            )
        self._is_begun = True
        yield from self._loop.run_steps_of_epoch(self._end)
        self.is_done = True

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
                "read it in the epoch's body, after the loop over its steps",
                code="SS219",
            )
        return self._tally.averages()


class Loop:
    """One loop of a run: what `run.epochs` or `run.steps` returns.

    What happens between the bodies of steps and epochs is in `Boundary`.

    Attributes:
        step: the current step, or the last one.
        repeats_head: whether the script's current lines already ran before the restart: the beginning of an epoch, or
            the lines after a complete loop.
        is_cut: whether the script is in the rest of the body of an epoch in which the run stopped. It will run again.
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
        self._services = services
        self._feed = feed
        self._plan = feed.plan
        self._on = observers
        self._replicas = prepared.replicas
        self._boundary = Boundary(context, state, prepared, services, feed, observers)
        cast_vote = self._boundary.cast_vote
        derive_seed = partial(derive, context.config.seed)
        self._parts = StepParts(
            context, state, derive_seed, feed.load, prepared.gradients, observers, services.watchdog, cast_vote
        )
        self.step: Step | None = None
        self.repeats_head = state.place.is_past
        self.is_cut = False
        self._left_error: Error | None = None  # the script left the loop before its end

    def run_epochs(self, num_epochs: int) -> Generator[Epoch, None, None]:
        """Yield the epochs from the run's position on."""
        with self._noting_if_left():
            yield from self._run_epochs(num_epochs)

    def _run_epochs(self, num_epochs: int) -> Iterator[Epoch]:
        state = self._state
        stopping = self._services.stopping
        self._boundary.begin()
        for number in range(self._plan.epoch_of(state.steps_done), self._plan.first_epoch + num_epochs):
            if stopping.is_ending:
                break
            self._feed.load_further()
            self._boundary.seed_body("epoch", number)
            state.begin_epoch()
            per_epoch = self._plan.steps_per_epoch
            end = self._plan.num_steps_until(number)
            self.repeats_head = state.steps_done > end - per_epoch
            epoch = Epoch(self, number, per_epoch, end, state.tally)
            yield epoch
            self.check_not_left()
            if not epoch.is_done:
                raise UsageError(
                    f"the steps of epoch {number} were not iterated over: its body needs `for step in epoch`; to end "
                    "early, call run.stop() and continue the loop",
                    code="SS218",
                )
            is_whole = state.steps_done == end
            self._services.watchdog.enter("script", state.steps_done)
            self.is_cut = False
            if not is_whole:  # the body of an interrupted epoch will run again, and will request its snapshots again
                self._services.snapshotter.drop_names("the run stopped within the epoch that asks for it")
            epochs_done = number + 1 if is_whole else None
            self._boundary.end_body(self.step, epochs_done=epochs_done, numbered=is_whole)
        self._boundary.finish()

    def run_steps_of_epoch(self, end: int) -> Iterator[Step]:
        """Yield the steps up to step `end`, in an epoch's body."""
        with self._noting_if_left():
            while self._state.steps_done < end and not self._services.stopping.is_ending:
                yield from self._run_step(is_last=self._state.steps_done + 1 == end)
            self.is_cut = self._state.steps_done < end

    def run_steps(self) -> Generator[Step, None, None]:
        """Yield the steps from the run's position on."""
        with self._noting_if_left():
            self._boundary.begin()
            while not self._services.stopping.is_ending:
                self._feed.load_further()
                yield from self._run_step(is_last=False)
            self._boundary.finish()

    def _run_step(self, *, is_last: bool) -> Iterator[Step]:
        """Yield the next step, and close it after its body. `is_last`: the body of the epoch continues after it."""
        number = self._state.steps_done
        self.repeats_head = False
        self._boundary.seed_body("step", number)
        self._state.begin_step()
        if self.step is None:
            self._replicas.watch(self._services.snapshotter)
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
        self._state.end_step()
        self._services.watchdog.enter("script", number + 1)
        self._on.end_step(step)
        if not is_last:
            self._boundary.end_body(step, epochs_done=None, numbered=True)

    def explain_end(self) -> tuple[str, str]:
        """Describe why the loop has no step left, and how to train it longer."""
        steps_done = self._state.steps_done
        last_step = self._state.place.last_step
        if steps_done < last_step:
            return f"run.stop() has ended it after step {steps_done}", f"start with {advise(resume=steps_done)}"
        is_cut = last_step == self._context.config.max_steps
        more = "a larger max_steps" if is_cut else "more steps" if self._plan.is_endless else "more epochs"
        return f"{steps_done} of {last_step} steps are done", f"ask for {more}"

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
        return self._left_error or self._boundary.failure

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
        self._services.watchdog.leave(self._state.steps_done)
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
            self._services.resources.note(self._left_error)
