"""One optimizer step, over which the script iterates, and the classes of what listens to it and what changes it."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from samestep.data.loader import Loaded, locate_error, seed_all, to_device
from samestep.engine.control import MicroBatchReport, Value, Vote, average_batch, read_number
from samestep.engine.passes import Gradients, PassAttempt, Reduced
from samestep.errors import Error, InvalidType, NotHealed, PeerFailed, UsageError
from samestep.hashing import hash_content
from samestep.plan.ledger import combine
from samestep.plan.tree import Span
from samestep.train.context import RunContext
from samestep.watch.beats import PhaseClock


class StepObserver:
    """Base class of the observers of a run's steps, which listen and change nothing. Events do nothing by default.

    A step calls only the events that a subclass overrides, in the order of the list given to `Observers`. What changes
    a step is an `Interceptor` (`train/interception.py`), whose description shows all events in their order.
    """

    def begin_step(self, step: "Step") -> None:
        """The loop yields the step to the script."""

    def begin_pass(self, step: "Step") -> None:
        """The script begins to iterate over the step's micro-batches. `.grad` still has the previous gradients."""

    def forward(self, step: "Step", batch: Any) -> None:
        """The script gets a micro-batch next."""

    def backward(self, step: "Step", loss: Tensor, weight: float | Tensor | None, model: nn.Module | None) -> None:
        """The script has called step.backward."""

    def log(self, step: "Step", values: Mapping[str, Any]) -> None:
        """The script has called step.log."""

    def end_micro_batch(self, step: "Step") -> None:
        """The script's body for a micro-batch has completed."""

    def exchanged(self, step: "Step", reduced: Reduced) -> None:
        """All ranks' reports have arrived. `.grad` is not set yet, and an error of the pass is not raised yet."""

    def reduced(self, step: "Step") -> None:
        """The pass has completed: `.grad` is the gradient of the batch, or with `shard` what this rank has of it."""

    def end_step(self, step: "Step") -> None:
        """The script's body for the step has completed."""

    def end_body(self, step: "Step") -> None:
        """Like `end_step`, but for the last step of an epoch it is called after the epoch's body."""


class StepInterceptor(StepObserver):
    """What an `Interceptor` changes in the steps of a run. Every method changes nothing by default."""

    def borrow(self, step: int, num_micro_batches: int) -> Sequence[int]:
        """Return micro-batches of other ranks, which this rank computes before its own.

        The results change nothing; `forward` and `backward` see them. The result depends on the arguments only: it is
        also needed ahead of time, to load the samples.
        """
        return ()

    def probe(self, step: "Step") -> Iterator[Any]:
        """Return batches for which to run the script's body before the pass.

        The body runs without a micro-batch: observers are notified of its calls of step.backward and step.log, which do
        nothing else.
        """
        return iter(())

    def results(self) -> tuple[int, int]:
        """Return `computed` and `recomputed` of this rank's vote (`Vote`), which all ranks get before `after_exchange`.

        Only one interceptor of a run may return others than zeros.
        """
        return 0, 0

    def after_exchange(self, step: "Step", reduced: Reduced) -> Iterator[Any]:
        """All ranks' reports have arrived, and nothing is applied yet. Return batches of `Step.compute`, if any.

        The script's body runs for each of them.
        """
        return iter(())


def list_borrowed(interceptors: Sequence[StepInterceptor], step: int, num_micro_batches: int) -> list[int]:
    """Return the micro-batches that interceptors borrow, see `StepInterceptor.borrow`."""
    return [v for each in interceptors for v in each.borrow(step, num_micro_batches)]


read_fingerprint: Callable[[MicroBatchReport], int] = operator.attrgetter("fingerprint")


class Observers:
    """One function per event, which calls the observers that override it.

    Attributes:
        interceptors: what changes the steps, in this order.
    """

    def __init__(self, observers: Sequence[StepObserver], interceptors: Sequence[StepInterceptor]) -> None:
        def join(event: str) -> Callable[..., object]:
            default = getattr(StepObserver, event)
            calls = [getattr(each, event) for each in observers if getattr(type(each), event) is not default]

            def notify(*arguments: Any) -> None:
                for call in calls:
                    call(*arguments)

            if not calls:
                return "".format  # takes any arguments, and costs no call in Python
            return calls[0] if len(calls) == 1 else notify

        self.interceptors = interceptors
        self.begin_step = join("begin_step")
        self.begin_pass = join("begin_pass")
        self.forward = join("forward")
        self.end_micro_batch = join("end_micro_batch")
        self.backward = join("backward")
        self.log = join("log")
        self.exchanged = join("exchanged")
        self.reduced = join("reduced")
        self.end_step = join("end_step")
        self.end_body = join("end_body")


class PassRunner(Protocol):
    """Runs the script's functions of micro-batches in parts, such as those of a model that several ranks have.

    Attributes:
        has_results: whether this rank gets their results.
        waited_s: seconds in which this rank has waited for others.
    """

    has_results: bool

    @property
    def waited_s(self) -> float: ...

    def run_pass(
        self, micro_batches: Sequence[int], forward: Callable[[int], None], backward: Callable[[int], None]
    ) -> None:
        """Call `forward` and `backward` with each micro-batch, in any order of the micro-batches.

        Raises:
            PeerFailed: another rank is gone. Then the pass may be run again, by other ranks.
        """

    def rehearse(self, function: Callable[[Any], Any], batch: Any, seed: Callable[..., int]) -> None:
        """Check what a function does, if it is new. See `score`."""

    def forward(self, v: int, function: Callable[[Any], Any], batch: Any, seed: Callable[..., int]) -> Any:
        """Run a function of micro-batch v, in `forward` of `run_pass`. See `score`."""

    def score(self, function: Callable[[Any], Any], batch: Any, seed: Callable[..., int]) -> Any:
        """Run a function without gradients. Returns its result, or None if another rank gets it.

        Args:
            seed: returns the seed of a stage, `stage=...`.

        Raises:
            PeerFailed: another rank is gone.
        """

    def finish(self) -> None:
        """Wait until the other ranks have what they need of `score`. Raises PeerFailed if one is gone."""


@dataclass(frozen=True)
class StepParts:
    """What all steps of a loop share.

    Attributes:
        derive: `plan.order.derive` for the seed of the run.
        load: (step, micro-batch) -> the micro-batch. Called once for each of this rank's, in their order.
        gradients: computes the gradients of the run's models.
        observers: are notified of the events of a step.
        clock: times the phases of this rank.
        cast_vote: returns this rank's vote, for the exchange of a step.
        runner: runs the functions of `Step.run`; None: they are called.
    """

    context: RunContext
    derive: Callable[..., int]
    load: Callable[[int, int], Loaded]
    gradients: Gradients
    observers: Observers
    clock: PhaseClock
    cast_vote: Callable[[], Vote]
    runner: PassRunner | None


@dataclass
class StepResult:
    """What the passes over a step have left.

    Attributes:
        loss: over the whole batch in the last pass; None if no micro-batch counted.
        averages: name -> (value, weight), for the loss and the values of `Step.log`.
        fingerprints: of the samples, per micro-batch.
        checksums: per pass, returns the checksum of its gradient; only on ranks that write the run. If gradients are
            divided among the ranks, the next exchange adds that of the last pass.
        is_skipped: whether no pass left a gradient: no micro-batch had a weight above 0, or the gradient overflowed in
            fp16.
    """

    loss: float | None = None
    averages: dict[str, tuple[Value, float]] = field(default_factory=dict)
    fingerprints: list[int] = field(default_factory=list)
    checksums: list[Callable[[], int]] = field(default_factory=list)
    is_skipped: bool = True

    @property
    def gradient_checksum(self) -> int:
        """Checksum of the gradients of all passes, for the ledger. On a GPU, waits for the last one."""
        return combine([*map(operator.call, self.checksums)])


class StepPhase(Enum):
    """Where the script is in a step."""

    OUTSIDE = auto()  # of the loops over its micro-batches
    PROBE = auto()  # in the body, for a batch of an interceptor
    INSIDE = auto()
    LEFT = auto()  # the script has left the loop before its end


class Step:
    """One optimizer step. Iterate over it to get this rank's micro-batches, on the device.

    After the loop over the micro-batches, `.grad` of every parameter is the gradient of the whole batch, averaged by
    weight, the same on all ranks. Iterate again for a second pass over the same micro-batches with other random
    numbers (a GAN). `Run.epochs` and `Run.steps` create the steps.

    Attributes:
        number: number of the step, from 0, over the whole run.
        epoch: epoch in which the step begins.
        micro_batch: current micro-batch, from 0, over the micro-batches of all ranks.
        sizes: samples per micro-batch, over all ranks.
        num_samples: number of samples of the step, over all ranks.
        held: numbers of this rank's micro-batches.
        num_passes: number of complete iterations over the micro-batches.

    Example::

        >>> import samestep, torch
        >>> run = samestep.Run(None, batch_size=4, micro_batch_size=2)
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> run.prepare(model=model, optimizer=optimizer)
        >>> for step in run.steps(torch.ones(8, 1), 1):
        ...     for x in step:
        ...         step.backward(model(x).mean())
        ...     optimizer.step()
        ...
        >>> step.number, step.num_samples, step.is_open, model.weight.grad.item()
        (0, 4, False, 1.0)
    """

    def __init__(self, number: int, epoch: int, spans: Sequence[Span], parts: StepParts) -> None:
        self.number = number
        self.epoch = epoch
        self.sizes = [stop - start for start, stop in spans]
        self.num_samples = sum(self.sizes)
        self.held = range(0)
        interceptors = parts.observers.interceptors
        # The micro-batches of other ranks that this rank computes before its own, to compare the results.
        self.borrowed = list_borrowed(interceptors, number, len(self.sizes)) if interceptors else []
        self.micro_batch = 0
        self.num_passes = 0
        self.result = StepResult()  # of the passes so far
        self._parts = parts
        self._phase = StepPhase.OUTSIDE
        self._attempt: PassAttempt | None = None  # only in the loop over the micro-batches
        self._loaded: dict[int, Loaded] = {}
        self._num_ranks_before = 0  # the first pass
        self._num_ranks = 0  # in the newest attempt

    @property
    def is_open(self) -> bool:
        """Whether the script is inside a loop over the micro-batches.

        Example: see `Step`.
        """
        return self._phase is not StepPhase.OUTSIDE

    @property
    def loaded_fingerprint(self) -> int:
        """Fingerprint of the samples of the current micro-batch."""
        return self._loaded[self.micro_batch].fingerprint

    @property
    def loss(self) -> Tensor:
        """Loss, averaged by weight over the whole batch: a scalar tensor, the same on all ranks.

        It is nan if no micro-batch counts.

        Raises:
            UsageError: read before or inside the loop over micro-batches.

        Example: see `Step.metrics`.
        """
        self._check_is_over("step.loss")
        loss = self.result.loss
        return torch.tensor(math.nan if loss is None else loss, dtype=torch.float32, device=self._parts.context.device)

    @property
    def metrics(self) -> dict[str, float]:
        """Loss and values of `log` by name, averaged by weight over the whole batch: the same floats on all ranks.

        Values that were logged after the loop over micro-batches are returned as they were given.

        Raises:
            UsageError: read before or inside the loop over micro-batches.

        Example::

            >>> import samestep, torch
            >>> run = samestep.Run(None, batch_size=4, micro_batch_size=2)
            >>> model = torch.nn.Linear(1, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> run.prepare(model=model, optimizer=optimizer)
            >>> for step in run.steps(torch.ones(8, 1), 1):
            ...     for x in step:
            ...         step.backward(0 * model(x).mean() + 2)
            ...         step.log(samples=len(x))
            ...     optimizer.step()
            ...
            >>> step.metrics
            {'loss': 2.0, 'samples': 2.0}
            >>> step.loss
            tensor(2.)
        """
        self._check_is_over("step.metrics")
        return {name: float(value) for name, (value, _) in self.result.averages.items()}

    def _check_is_over(self, what: str) -> None:
        self.check_not_left()
        if self.is_open or not self.num_passes:
            raise UsageError(
                f"{what} of step {self.number} was read {'inside' if self.is_open else 'before'} the micro-batch loop: "
                "read it after the loop, when the values of all ranks have arrived",
                code="SS219",
            )

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's micro-batches, then set `.grad` to the gradient of the whole batch."""
        if self._parts.runner is not None:
            self._refuse_loop("for batch in step")
        return self._run_pass()

    def _run_pass(self, compute: Callable[[PassAttempt], str] | None = None) -> Iterator[Any]:
        """Run a pass. Yields batches for the script's body.

        Args:
            compute: computes this rank's micro-batches, in place of the script's body. Returns the error of a wait for
                another rank that is gone, or "".
        """
        parts = self._parts
        self._begin_pass()
        for each in parts.observers.interceptors:
            yield from each.probe(self)
        self._phase = StepPhase.INSIDE
        completed: list[Reduced] = []
        while not completed:  # else a rank has died, and the others compute its micro-batches, too
            attempt = self._begin_attempt()
            failure = ""
            if compute is not None:
                failure = compute(attempt)
            else:
                for v in (*self.borrowed, *attempt.held, *attempt.fillers):
                    yield from self.compute(v, self._load(v))
            parts.clock.enter("reducing", self.number)
            exchange = partial(self._exchange, attempt, parts.cast_vote(), failure)
            completed = parts.context.group.try_once(exchange, on_device=True, release=attempt.release)
        (reduced,) = completed
        for each in parts.observers.interceptors:
            yield from each.after_exchange(self, reduced)
        self._apply(attempt, reduced)

    def run(self, body: Callable[[Any], Tensor], *, weight: Callable[[Any], float | Tensor] | None = None) -> None:
        """Call a function with each micro-batch, and run the backward pass of the loss that it returns.

        It replaces a loop over the step that calls `backward`. Pipelines need it, see docs/pipeline.md.

        Args:
            body: gets a micro-batch, and returns its loss, see `backward`.
            weight: gets a micro-batch, and returns the weight of its loss. None: the number of samples.

        Raises:
            UsageError: called inside a loop over micro-batches, or a pipeline cannot run the function.
            InvalidValue: the loss or a weight cannot be used.

        Example::

            >>> import samestep, torch
            >>> run = samestep.Run(None, batch_size=4, micro_batch_size=2)
            >>> model = torch.nn.Linear(1, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> run.prepare(model=model, optimizer=optimizer)
            >>> for step in run.steps(torch.ones(8, 1), 1):
            ...     step.run(lambda x: model(x).mean())
            ...     optimizer.step()
            ...
            >>> model.weight.grad.item()
            1.0
        """
        runner = self._parts.runner
        if runner is None:
            for batch in self:
                self.backward(body(batch), weight=None if weight is None else weight(batch))
            return
        try:
            for _ in self._run_pass(partial(self._compute_in_parts, runner, body, weight)):
                raise UsageError("a tool runs a micro-batch alone, which a pipeline does not support", code="SS614")
        except BaseException:
            self._phase = StepPhase.LEFT
            self._parts.clock.enter("left", self.number)
            raise

    def _compute_in_parts(
        self,
        runner: PassRunner,
        body: Callable[[Any], Any],
        weight: Callable[[Any], float | Tensor] | None,
        attempt: PassAttempt,
    ) -> str:
        """Run the forward and backward passes in the order of a runner. A rank without results has no losses."""
        parts = self._parts
        on = parts.observers
        results: dict[int, tuple[Any, Any]] = {}  # losses and weights

        def forward(v: int) -> None:
            batch = self._load(v)
            waited_s = runner.waited_s
            parts.clock.enter("forward", self.number)
            on.forward(self, batch)
            seed = partial(parts.derive, "compute", step=self.number, pass_=self.num_passes, micro_batch=v)
            self._phase = StepPhase.PROBE  # step.log drops what it gets
            runner.rehearse(body, batch, seed)
            self._phase = StepPhase.INSIDE
            loss = runner.forward(v, body, batch, seed)
            results[v] = loss, None if weight is None else weight(batch)
            if runner.has_results:
                on.backward(self, *results[v], None)
                on.end_micro_batch(self)
            attempt.end_forward()
            parts.clock.move("forward", "reducing", runner.waited_s - waited_s)

        def backward(v: int) -> None:
            waited_s = runner.waited_s
            parts.clock.enter("backward", self.number)
            loss, own = results.pop(v)
            if runner.has_results:
                waited_s -= attempt.backward(v, loss, own, None)
            elif own is None or (isinstance(own, Tensor) and own.device.type != "cpu") or float(own):
                waited_s -= attempt.pass_back(v)
            attempt.end_backward(v)
            parts.clock.move("backward", "reducing", runner.waited_s - waited_s)

        try:
            runner.run_pass(attempt.held, forward, backward)
        except PeerFailed as error:
            return str(error)
        return ""

    def _refuse_loop(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} in step {self.number} of a run with pipeline, whose ranks compute parts of a micro-batch: call "
            "step.run(function), where the function gets a micro-batch and returns its loss",
            code="SS224",
        )

    def compute(self, v: int, batch: Any) -> Iterator[Any]:
        """Run the script's body on micro-batch v. The results are dropped unless this rank holds it."""
        parts = self._parts
        on = parts.observers
        attempt = self._attempt
        assert attempt is not None  # the loop over the micro-batches has begun
        self.micro_batch = v
        seed_all(parts.derive("compute", step=self.number, pass_=self.num_passes, micro_batch=v))
        parts.clock.enter("forward", self.number)
        on.forward(self, batch)
        try:
            yield batch
        except GeneratorExit:
            self._phase = StepPhase.LEFT
            parts.clock.enter("left", self.number)
            raise
        on.end_micro_batch(self)
        attempt.close(v)

    def _begin_pass(self) -> None:
        state = self._parts.context.state
        problem = ""
        if state.newest_step > self.number:
            problem = f"is over, since step {state.steps_done} has begun"
        elif self._phase is not StepPhase.OUTSIDE:
            problem = "is iterated over inside its own loop: use one loop after the other"
        if problem:
            self.check_not_left()
            raise UsageError(f"step {self.number} {problem}", code="SS218")
        num_ranks = self._parts.context.group.world_size
        if not self.num_passes:
            self._num_ranks_before = num_ranks
        elif num_ranks != self._num_ranks_before:
            # A list of this rank's results may have those of an interrupted pass, too.
            raise NotHealed(f"step {self.number} lost a rank, and has a further pass over its micro-batches")
        self._parts.observers.begin_pass(self)
        self._phase = StepPhase.PROBE

    def _begin_attempt(self) -> PassAttempt:
        if self._attempt is not None:  # it has failed
            self.borrowed = []
            self._load_again()
        layout = self._parts.context.divide_step(len(self.sizes))
        self._attempt = PassAttempt(self._parts.gradients, self.number, self.sizes, self.num_passes, layout)
        self._num_ranks = self._parts.context.group.world_size
        self.held = self._attempt.held
        return self._attempt

    def _load(self, v: int) -> Any:
        self.micro_batch = v
        context = self._parts.context
        if v not in self._loaded:
            self._parts.clock.enter("loading", self.number)
            try:
                self._loaded[v] = self._parts.load(self.number, v)
            except Error as error:
                raise locate_error(
                    error, context.location.logs, context.group.number, f"step {self.number}"
                ) from error.__cause__
        return to_device(self._loaded[v].batch, context.device, non_blocking=True)

    def _load_again(self) -> None:
        """Load batches for a repetition of the pass, since the script may have changed in place those that it got."""
        before = self._loaded
        self._loaded = {}
        for v in before if self.num_passes else ():  # an earlier pass may have changed those of the dead rank, too
            if hash_content(self._load(v)) != hash_content(before[v].batch):
                raise NotHealed(
                    f"a rank died in a further pass of step {self.number}, and the script changes batches in place"
                )

    def load_up_to(self, v: int) -> Any:
        """Load the micro-batches of `held` up to v. Returns the batch of v. For an interceptor that ends the run."""
        for each in (*self.borrowed, *self.held[: self.held.index(v)]):
            self._load(each)
        return self._load(v)

    def _exchange(self, attempt: PassAttempt, vote: Vote, failure: str) -> Reduced:
        """Exchange the gradients. `failure`: why there is nothing to exchange, see `_run_pass`; "" otherwise."""
        if failure:
            raise PeerFailed(failure)
        return attempt.exchange(vote, [self._loaded[v].fingerprint for v in self.held])

    def _apply(self, attempt: PassAttempt, reduced: Reduced) -> None:
        """Apply the result of a pass, and end it."""
        parts = self._parts
        parts.observers.exchanged(self, reduced)
        result = self.result
        if attempt.apply(reduced):
            result.is_skipped = False
        result.loss = reduced.loss
        if reduced.loss is not None:
            result.averages["loss"] = (reduced.loss, reduced.total_weight)
        if reduced.logged:
            result.averages |= average_batch(reduced.logged, reduced.reports, self.sizes)
        if self.num_passes == 0:
            result.fingerprints = [*map(read_fingerprint, reduced.reports)]
        seed_all(parts.derive("after", step=self.number, pass_=self.num_passes))
        self.num_passes += 1
        self._phase = StepPhase.OUTSIDE
        self._attempt = None
        parts.clock.enter("updating", self.number)
        parts.observers.reduced(self)

    def gather(self, values: Mapping[int, Any]) -> list[Any]:
        """Return the values of the micro-batches of all ranks, in order, on every rank. Call it on all ranks.

        Tensors in lists, tuples and dicts are detached and copied to the CPU.

        Args:
            values: number of a micro-batch of this rank (`micro_batch`) -> any value that can be pickled. A micro-batch
                may have none.

        Raises:
            UsageError: called inside the loop over micro-batches.
            InvalidType: a value cannot be pickled.
            PeerFailed: a rank died before it sent its values.

        Example::

            >>> import samestep, torch
            >>> run = samestep.Run(None, batch_size=4, micro_batch_size=2)
            >>> model = torch.nn.Linear(1, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> run.prepare(model=model, optimizer=optimizer)
            >>> for step in run.steps(torch.ones(4, 1), 1):
            ...     sums = {}
            ...     for x in step:
            ...         sums[step.micro_batch] = x.sum()
            ...         step.backward(model(x).mean())
            ...     optimizer.step()
            ...
            >>> step.gather(sums)
            [tensor(2.), tensor(2.)]
        """
        self.refuse_inside("step.gather was called", "call it after the loop, with a value for each micro-batch")
        group = self._parts.context.group
        mine = [(v, values[v]) for v in self.held if v in values]
        rows = group.gather(tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), mine))
        if len(rows) < self._num_ranks:
            raise NotHealed(f"a rank died before it sent the values of its micro-batches in step {self.number}")
        found = dict(pair for row in rows for pair in row)
        return [found[v] for v in sorted(found)]

    def refuse_inside(self, what: str, instead: str) -> None:
        """Raise Error inside the loop over the micro-batches."""
        if self._phase is not StepPhase.OUTSIDE:
            self.check_not_left()
            raise UsageError(f"{what} inside the micro-batch loop of step {self.number}: {instead}", code="SS211")

    def check_not_left(self) -> None:
        """Raise Error if the script left the loop over the micro-batches before its end, or caught an error of it."""
        if self._attempt is not None and self._attempt.failure is not None:
            raise self._attempt.failure
        if self._phase is StepPhase.LEFT:
            raise UsageError(
                f"the loop over the micro-batches of step {self.number} was left by break (or return, or an error), so "
                "its gradient is not complete: let it run to its end; to end early, call run.stop()",
                code="SS217",
            )

    def backward(self, loss: Tensor, *, weight: float | Tensor | None = None, model: nn.Module | None = None) -> None:
        """Run the backward pass of this micro-batch, and add its gradient to that of the batch.

        Args:
            loss: scalar, a mean over `weight` units of the micro-batch. For a sum of losses over different units, see
                `total`.
            weight: number of units that `loss` is a mean over, such as tokens. None: the samples of the micro-batch. 0:
                the micro-batch does not count. A tensor should be on the CPU; one on a GPU is copied to the host.
            model: the one prepared model that gets gradients. None: all models that the loss depends on.

        Raises:
            UsageError: called outside the loop over micro-batches, or twice in one micro-batch.
            InvalidValue: the loss is not a scalar or depends on no parameter, or a weight is negative.

        Example::

            >>> import samestep, torch
            >>> run = samestep.Run(None, batch_size=4, micro_batch_size=2)
            >>> model = torch.nn.Linear(1, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> run.prepare(model=model, optimizer=optimizer)
            >>> for step in run.steps(torch.ones(8, 1), 1):
            ...     for x in step:
            ...         step.backward(model(x).mean(), weight=step.micro_batch)  # 0, then 1
            ...     optimizer.step()
            ...
            >>> model.weight.grad.item()
            1.0
        """
        if self._parts.runner is not None:
            self._refuse_loop("step.backward")
        self._parts.observers.backward(self, loss, weight, model)
        if self._phase is StepPhase.PROBE:
            return
        if self._attempt is None:
            raise UsageError(
                "step.backward was called outside the micro-batch loop: call it inside `for batch in step` (list(step) "
                "ends the loop); for another pass, loop over the step again",
                code="SS202",
            )
        clock = self._parts.clock
        clock.enter("backward", self.number)
        waited_s = self._attempt.backward(self.micro_batch, loss, weight, model)
        clock.enter("forward", self.number)
        if waited_s:
            clock.move("backward", "reducing", waited_s)

    def total(self, count: Callable[[Any], float | Tensor]) -> float:
        """Return the sum of a number over the whole batch, equal on all ranks. Call it before the loop over the step.

        A loss that is a sum over units can then be divided by their number in the whole batch, see docs/losses.md. The
        call loads all micro-batches of this rank, and makes a short exchange.

        Args:
            count: gets each micro-batch as the loop does, with the random numbers of that loop, and returns the number.

        Raises:
            UsageError: called inside the loop over micro-batches.
            InvalidType: `count` returns something else than a number.
            PeerFailed: a rank died meanwhile.

        Example::

            >>> import samestep, torch
            >>> run = samestep.Run(None, batch_size=4, micro_batch_size=2)
            >>> model = torch.nn.Linear(1, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> run.prepare(model=model, optimizer=optimizer)
            >>> for step in run.steps(torch.tensor([[1.0], [0.0], [1.0], [1.0]]), 1):
            ...     num_positive = step.total(lambda x: (x > 0).sum())
            ...     for x in step:
            ...         loss = model(x[x > 0].unsqueeze(1)).sum() / (num_positive / step.num_samples * len(x))
            ...         step.backward(loss)
            ...     optimizer.step()
            ...
            >>> num_positive, model.weight.grad.item()
            (3.0, 1.0)
        """
        self.refuse_inside("step.total was called", "call it before the loop, with a function of a micro-batch")
        context = self._parts.context
        self.held = context.divide_step(len(self.sizes)).ranges[context.group.replica]
        self._num_ranks = context.world_size
        numbers = {}
        for v in self.borrowed:  # which the loader has before those of this rank
            self._load(v)
        for v in self.held:
            batch = self._load(v)
            seed_all(self._parts.derive("compute", step=self.number, pass_=self.num_passes, micro_batch=v))
            numbers[v] = float(read_number("the result of step.total's function", count(batch)))
        # The same on all ranks. Micro-batch 0 follows the loop.
        seed_all(self._parts.derive("after", step=self.number, pass_=self.num_passes, micro_batch=1))
        return math.fsum(self.gather(numbers))

    def log(self, values: Mapping[str, float | Tensor] | None = None, /, **named: float | Tensor) -> None:
        """Add values to the metrics of this step.

        Inside the loop over micro-batches, values are averaged over the batch with the weights of `backward`, without
        waiting for the device. A tensor with one value per sample of the micro-batch counts as their mean; `samestep
        replay --micro-batch` shows each of them. After the loop, values are recorded as they are.

        Args:
            values: name -> number or scalar tensor; further ones as keyword arguments.

        Raises:
            UsageError: called before the loop over micro-batches or after the step.
            InvalidType: a value is not a number.

        Example: see `Step.metrics`.
        """
        if self._parts.context.state.steps_done > self.number or not (self.is_open or self.num_passes):
            raise UsageError(
                f"step.log of step {self.number} was called outside of its body: call it in or after its micro-batch "
                "loop, or run.log elsewhere",
                code="SS219",
            )
        collected = collect_values("step.log", values, named)
        self._parts.observers.log(self, collected)
        if self._phase is StepPhase.PROBE:
            return
        for name, given in collected.items():
            value = read_number(f"{name} of step.log", given, self.sizes[self.micro_batch] if self.is_open else 1)
            if self._attempt is None:
                self.result.averages[name] = (value, self.num_samples)
            else:
                self._attempt.reports.log(self.micro_batch, name, value)


def collect_values(what: str, values: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a call such as `step.log({"a": 1}, b=2)`. Raises InvalidType if they cannot be logged."""
    if values is not None and not isinstance(values, Mapping):
        raise InvalidType(f"{what} takes a dict of name -> value or keyword arguments, not {values!r}", code="SS102")
    collected = {**(values or {}), **named}
    for name in collected:
        if not isinstance(name, str) or name == "step":
            raise InvalidType(
                f'{what} got a value named {name!r}: a name is a string, and not "step", which is the row\'s own',
                code="SS102",
            )
    return collected
