"""Runs the script's function of a micro-batch stage by stage, on the rank that holds each stage.

Every rank calls the function. Up to its own stages, the model computes on torch's meta device, without values. The hook
of the module at the cut replaces its inputs by those of the rank before. After its own stages, a rank sends what
crosses the next cut, and leaves the function by an exception. So the rank of the last stage gets the result.

A rank cuts the graph also between two stages of its own, and passes the gradient on itself. So each stage runs alike
wherever it is: in the same order, from contiguous tensors, with the random numbers of its own seed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.loader import seed_all
from samestep.engine.leaf import NONE, drop_grads, read_grad, run_backward_alone
from samestep.errors import Error, PeerFailed, UsageError
from samestep.nested import find_tensors, map_tensors
from samestep.pipeline.messages import Messages
from samestep.pipeline.outlines import Outlines
from samestep.pipeline.schedule import Kind, build_schedule, find_held, list_positions
from samestep.pipeline.stage_check import StageCheck
from samestep.pipeline.stages import StagedModel, list_tensors
from samestep.pipeline.tied import TiedWeights
from samestep.torch_internals import run_backward
from samestep.world.group import Group


class _Leave(BaseException):
    """Leaves the script's function after the last stage of this rank, or since another rank is gone."""


@dataclass
class _Flight:
    """A micro-batch on its way through the stages of this rank.

    Attributes:
        seed: returns the seed of a stage.
        check: of a micro-batch that is computed for it only, up to the end of the model.
        staged: the model that the function calls; None before it does.
        stage: the one that computes; -1 before the model is called.
        inputs: stage -> the tensors at which its graph begins.
        outputs: stage -> the tensors that cross the next cut, and get gradients.
        failure: the error of a message, which the script's function must not catch; "" if there was none.
    """

    seed: Callable[..., int]
    check: StageCheck | None
    staged: StagedModel | None = None
    stage: int = -1
    inputs: dict[int, list[Tensor]] = field(default_factory=dict)
    outputs: dict[int, list[Tensor]] = field(default_factory=dict)
    failure: str = ""


class Pipeline:
    """Runs functions of micro-batches on the ranks of a pipeline, or on one rank.

    Args:
        models: the model, and averages of it, which are cut alike. A function calls one of them.

    Attributes:
        held: the stages of this rank.
        has_results: whether it gets the functions' results.
        tied: the weights that several stages use.
    """

    def __init__(self, models: Sequence[StagedModel], group: Group) -> None:
        self._models = models
        self._staged = staged = models[0]
        self._group = group
        self._generation = group.generation
        self._num_ranks = group.ranks_per_replica
        self._messages = Messages(group)
        self._position = self._messages.position
        self.held = find_held(self._position, self._num_ranks, staged.num_stages)
        self.has_results = self.held.stop == staged.num_stages
        self._outlines = Outlines()
        self._modes: ExitStack = ExitStack()
        self._checked = set[bool]()  # a micro-batch with gradients, and one without
        self._flight: _Flight | None = None  # of the function that runs
        self._waiting: dict[int, _Flight] = {}  # for their backward passes
        self._returning: _Flight | None = None  # in its backward pass
        # A module that is compiled may begin a stage, and these hooks are no part of its code.
        enter, cross = map(torch.compiler.disable, (self._enter, self._cross))
        for each in models:
            each.model.register_forward_hook(self._end)
            each.model.register_forward_pre_hook(partial(enter, each), with_kwargs=True)
            for stage, cut in enumerate(each.cuts.values(), start=1):
                cut.register_forward_pre_hook(partial(cross, each, stage), with_kwargs=True)
            for module in each.stages:
                if list_tensors(module) and module is not each.model:
                    module.register_forward_pre_hook(partial(self._check_stage, each))
        positions = list_positions(self._num_ranks, staged.num_stages)
        # After the hooks above: its own are of the stage that a module begins.
        self.tied, *_ = [
            TiedWeights(each, self.held, positions, self._messages, lambda: self._flight is not None) for each in models
        ]
        # What the backward pass of a stage must not reach.
        self._foreign = {
            stage: [*staged.list_params(range(self.held.start, stage)), *self.tied.weights] for stage in self.held
        }

    def __deepcopy__(self, memo: Any) -> "Pipeline":
        """A copy of the model has its hooks, which see that another one runs."""
        return self

    @property
    def waited_s(self) -> float:
        """Seconds in which this rank has waited for others."""
        return self._messages.waited_s

    def run_pass(
        self, micro_batches: Sequence[int], forward: Callable[[int], None], backward: Callable[[int], None]
    ) -> None:
        """Call `forward` and `backward` with each micro-batch, in the order of this rank.

        Raises:
            PeerFailed: another rank is gone.
        """
        self._waiting.clear()  # of a pass that has failed
        drop_grads(self.tied.weights)
        for kind, v in build_schedule(self._position, self._num_ranks, micro_batches):
            if kind is Kind.FORWARD:
                forward(v)
            else:
                self._returning = self._waiting.pop(v)
                backward(v)
        self._returning = None
        self._messages.finish()

    def finish(self) -> None:
        """Wait until the other ranks have got what `score` has sent. Raises PeerFailed if one is gone."""
        self._messages.finish()

    def rehearse(self, function: Callable[[Any], Any], batch: Any, seed: Callable[..., int]) -> None:
        """Before the first micro-batch with gradients, and the first one without, run the model to check it.

        Nothing of it is kept: while it is checked, some modules of torch compute in another way. If other ranks form
        the pipeline since one has died, what the ones before knew is forgotten.
        """
        if self._generation != self._group.generation:
            self._generation = self._group.generation
            self._checked.clear()
            self._messages.begin()
        if torch.is_grad_enabled() in self._checked:
            return
        self._checked.add(torch.is_grad_enabled())
        with ExitStack() as kept:
            for each in self._models:
                kept.enter_context(each.keep_buffers())
            self._run(function, deepcopy(batch), seed, StageCheck(self._models))

    def forward(self, v: int, function: Callable[[Any], Any], batch: Any, seed: Callable[..., int]) -> Any:
        """Run a function of micro-batch v. `backward` follows. Arguments and result as for `score`."""
        self._waiting[v], result = self._run(function, batch, seed)
        return result

    def score(self, function: Callable[[Any], Any], batch: Any, seed: Callable[..., int]) -> Any:
        """Run a function without gradients.

        Args:
            seed: returns the seed of a stage, `stage=...`.

        Returns:
            Its result, on the rank with the last stage; else None.

        Raises:
            UsageError: the function, or the model, does what a pipeline does not support.
            PeerFailed: another rank is gone.
        """
        self.rehearse(function, batch, seed)
        return self._run(function, batch, seed)[1]

    def _run(
        self, function: Callable[[Any], Any], batch: Any, seed: Callable[..., int], check: StageCheck | None = None
    ) -> tuple[_Flight, Any]:
        self._flight = flight = _Flight(seed, check)
        seed_all(seed(stage=0))
        result = None
        try:
            with self._explaining():
                result = function(batch)
                self._check_end(flight)
                if any(each.is_meta for each in find_tensors(result)):
                    raise RuntimeError("the result is on the meta device")
        except _Leave:
            pass
        finally:
            self._flight = None
            self._modes.close()
        if flight.failure:
            raise PeerFailed(flight.failure)
        return flight, result

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Explain torch's errors about tensors without values."""
        try:
            yield
        except RuntimeError as error:  # NotImplementedError is one, too
            if isinstance(error, Error) or self._num_ranks == 1 or "meta" not in str(error):
                raise
            held = f"{len(self.held)} of {self._staged.num_stages} stages"
            raise UsageError(
                f"rank {self._group.rank} has {held}, and what it uses of the others has no values there "
                f"({' '.join(str(error).split())}): a stage gets values by what crosses its "
                "cut and from its own modules only, no line of the script may read values of the model before its end, "
                "and forward creates tensors with device=; see docs/pipeline.md",
                code="SS224",
            ) from error

    def _check_end(self, flight: _Flight) -> None:
        """Raise UsageError if a function has returned without its last stage on this rank."""
        if not self.has_results and self.held.stop - 1 in flight.outputs:
            raise UsageError(
                "the function of step.run has caught a BaseException, by which a pipeline leaves it: catch Exception",
                code="SS224",
            )
        if flight.stage != self._staged.num_stages - 1:
            missing = self._staged.name
            if flight.staged is not None:
                missing = self._name_cut(flight.stage + 1, flight.staged)
            raise UsageError(
                f"the function of step.run did not call {missing} in a micro-batch: with pipeline, it calls the whole "
                "model once",
                code="SS224",
            )

    def _name_cut(self, stage: int, staged: StagedModel) -> str:
        return f"{staged.name}.{[*staged.cuts][stage - 1]}"

    # --- forward ----------------------------------------------------------------------------------------------

    def _enter(self, staged: StagedModel, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A model is called: without values, unless the first stage is here."""
        flight = self._find_flight(staged)
        if flight is None:
            return None
        if flight.staged is not None:
            raise UsageError(
                f"the function of step.run or run.evaluate calls {staged.name} after {flight.staged.name} in a "
                "micro-batch: with pipeline, call one model once",
                code="SS224",
            )
        flight.staged = staged
        flight.stage = 0
        if self.held.start:
            self._modes.enter_context(self._outlines)
            return map_tensors(_outline, (args, kwargs))
        self._enter_check(flight, find_tensors((args, kwargs)))
        return None

    def _enter_check(self, flight: _Flight, inputs: Sequence[Tensor]) -> None:
        if flight.check is not None:
            flight.check.begin(flight.stage, inputs)
            self._modes.enter_context(flight.check)

    def _end(self, *_: Any) -> None:
        if self._flight is not None and self._flight.check is not None:
            self._flight.check.end()
            raise _Leave

    def _find_flight(self, staged: StagedModel) -> _Flight | None:
        """Return the micro-batch that a model computes. One rank can also use it elsewhere."""
        if self._flight is None and self._num_ranks > 1:
            raise UsageError(
                f"{staged.name} ran outside of step.run and run.evaluate (or again, in an activation checkpoint "
                "around a cut), and this rank has some of its stages only: call it in their functions",
                code="SS224",
            )
        return self._flight

    def _check_stage(self, staged: StagedModel, module: nn.Module, args: Any) -> None:
        flight = self._flight
        if flight is None:
            return
        stage = staged.stages[module]
        if flight.stage != stage:
            raise UsageError(
                f"{staged.paths[module]} is in stage {stage}, by the order in which {staged.name} has "
                f"registered its modules, and its forward calls it in stage {flight.stage}: register modules in the "
                "order in which forward calls them, and call each in one stage",
                code="SS224",
            )

    def _cross(self, staged: StagedModel, stage: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The module at a cut is called: the stage begins here, or this rank's part ends."""
        flight = self._find_flight(staged)
        if flight is None:
            return None
        if flight.stage != stage - 1:
            raise UsageError(
                f"{self._name_cut(stage, staged)} begins stage {stage}, and was called in stage {flight.stage}: call "
                "the modules in stages of run.prepare in this order in forward, each once",
                code="SS224",
            )
        if stage >= self.held.start:
            self._modes.close()
        tensors = find_tensors((args, kwargs))
        has_graph = torch.is_grad_enabled() and flight.check is None  # which sees whether a stage writes to them
        if stage - 1 in self.held:
            if flight.check is not None:
                flight.check.end()
                flight.check.refuse_foreign(tensors, self._name_cut(stage, staged))
            flight.outputs[stage - 1] = [each for each in tensors if has_graph and each.is_floating_point()]
        if stage == self.held.stop:
            with _leaving(flight):
                self._messages.send_on([*map(_separate, tensors)], self._position + 1)
            raise _Leave
        flight.stage = stage
        seed_all(flight.seed(stage=stage))  # what crosses the cut can depend on Python's random numbers
        if stage < self.held.start:
            return None
        if stage == self.held.start:
            with _leaving(flight):
                inputs = self._messages.receive_on(tensors, self._position - 1)
        else:
            inputs = [*map(_separate, tensors)]
        self._enter_check(flight, inputs)
        # Not as the outputs: their graph is known on the rank before only.
        flight.inputs[stage] = [each.requires_grad_() for each in inputs if has_graph and each.is_floating_point()]
        left = iter(inputs)
        return map_tensors(lambda _: next(left), (args, kwargs))

    # --- backward ---------------------------------------------------------------------------------------------

    def run_backward(self, params: Sequence[Tensor], loss: Any, factor: float | Tensor) -> None:
        """Run the backward pass of a micro-batch through the stages of this rank. See `RunBackward`."""
        flight = self._returning
        assert flight is not None  # in `run_pass`
        passed: list[Tensor] = []
        for stage in reversed(self.held):
            if stage == self._staged.num_stages - 1:
                with self._explaining():
                    run_backward_alone(params, loss, factor)
            else:
                outputs = flight.outputs[stage]
                if stage == self.held.stop - 1:
                    passed = self._messages.receive(outputs, self._position + 1)
                pairs = [(one, grad) for one, grad in zip(outputs, passed, strict=True) if one.requires_grad]
                if pairs:
                    ends, grads = zip(*pairs, strict=True)
                    with self._explaining():
                        run_backward(ends, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)
            self._check_reached(stage)
            inputs = flight.inputs.get(stage, ())
            passed = [torch.zeros_like(each) if each.grad is None else _separate(each.grad) for each in inputs]
        if self.held.start:
            self._messages.send(passed, self._position - 1)

    def _check_reached(self, stage: int) -> None:
        """Raise UsageError if the backward pass of a stage has computed gradients of another one."""
        if any(map(is_not, map(read_grad, self._foreign[stage]), NONE)):
            raise UsageError(
                f"the backward pass of stage {stage} of {self._staged.name} has reached a stage before it, or a weight "
                "that stages share outside of its modules: let what a stage uses cross its cut as an argument, with no "
                "residual around the cut, and use a parameter inside of its modules only",
                code="SS224",
            )


@contextmanager
def _leaving(flight: _Flight) -> Iterator[None]:
    """Leave the script's function if another rank is gone."""
    try:
        yield
    except PeerFailed as error:
        flight.failure = str(error)
        raise _Leave from None


def _outline(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def _separate(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor with the values, without the graph, as another rank would receive it."""
    own = tensor.detach().contiguous()
    return own.clone() if own.storage_offset() else own
