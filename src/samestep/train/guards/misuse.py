"""Detects mistakes of a script at its calls of optimizers, such as an update from an incomplete gradient."""

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakMethod, WeakSet, finalize

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from samestep.errors import UsageError
from samestep.torch_internals import read_version
from samestep.train.state.objects import Objects, list_params
from samestep.train.state.run_state import RunState
from samestep.train.step.steps import Step, StepObserver


class MisuseChecks(StepObserver):
    """Observes one run's loop, its prepared objects, and the updates of all optimizers of the process.

    The hook that sees the updates holds no reference to this object, and is removed with it.

    Args:
        optimizers: those of the run.
        divides: whether the gradients of this rank's micro-batches are not those of the batch.
    """

    def __init__(self, objects: Objects, optimizers: Iterable[Optimizer], state: RunState, *, divides: bool) -> None:
        self._objects = objects
        self._state = state
        self._divides = divides
        self._optimizers = WeakSet(optimizers)
        self._signature = self._sign()
        self._names = {number: name for name, (number, *_) in self._signature.items()}
        self._step: Step | None = None
        self._others: WeakSet[Optimizer] = WeakSet()  # were not passed, and have updated something in the loop
        # Gradients of their parameters, with the number of writes to each: when the last pass began, and those that
        # it has changed.
        self._before: dict[Tensor, int] = {}
        self._partial: dict[Tensor, int] = {}
        find_check = WeakMethod(self._check_update)

        def check(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (check_update := find_check()) is not None:
                check_update(optimizer)

        finalize(self, register_optimizer_step_pre_hook(check).remove)

    def begin_loop(self) -> None:
        """A loop begins. Raises UsageError if a model is not the one that was prepared."""
        before, now = self._signature, self._sign()
        if changed := next((name for name in before | now if before.get(name) != now.get(name)), ""):
            raise UsageError(
                f"{changed} was added, removed, replaced or converted after run.prepare: change the model before it",
                code="SS216",
            )

    def begin_step(self, step: Step) -> None:
        self._step = step

    def begin_pass(self, step: Step) -> None:
        if self._others:
            self._before = self._read_grads()

    def reduced(self, step: Step) -> None:
        if self._others:
            grads = self._read_grads()
            self._partial = {grad: count for grad, count in grads.items() if self._before.get(grad) != count}

    def _read_grads(self) -> dict[Tensor, int]:
        params = [param for optimizer in self._others for param in list_params(optimizer)]
        return {param.grad: read_version(param.grad) for param in params if param.grad is not None}

    def _check_update(self, optimizer: Optimizer) -> None:
        is_ours = optimizer in self._optimizers
        if not self._state.is_in_loop:
            if is_ours and self._state.is_before_loops:
                _refuse_early(optimizer)
            return
        ids = () if is_ours else map(id, list_params(optimizer))
        name = next((self._names[number] for number in ids if number in self._names), None)
        if (step := self._step) is not None and (is_ours or name is not None):
            step.refuse_inside("optimizer.step()", "its gradient is not complete there; dedent it by one level")
        if name is not None:
            raise UsageError(
                f"an optimizer ({type(optimizer).__name__}) that was not passed to run.prepare updates {name}: pass "
                "it, so that its state is part of the snapshots",
                code="SS215",
            )
        if self._divides and not is_ours:
            self._others.add(optimizer)
            if step is not None and not step.is_open:
                self._refuse_partial(optimizer, step.number)

    def _refuse_partial(self, optimizer: Optimizer, number: int) -> None:
        """Raise UsageError for an update from a gradient that holds this rank's micro-batches only."""
        for param in list_params(optimizer):
            if param.grad is not None and self._partial.get(param.grad) == read_version(param.grad):
                raise UsageError(
                    f"an optimizer ({type(optimizer).__name__}) that was not passed to run.prepare updates a parameter "
                    f"of shape {tuple(param.shape)} in step {number}, whose gradient is of this rank's micro-batches "
                    "only: pass the optimizer and the module of the parameter to run.prepare",
                    code="SS215",
                )

    def _sign(self) -> dict[str, tuple[int, Any, Any]]:
        """Return what identifies each parameter, by name."""
        return {name: (id(param), param.dtype, param.device) for name, param in self._objects.name_params().items()}


class ScheduleChecks(StepObserver):
    """Observes the schedules of a run that has some."""

    def __init__(self, schedules: Mapping[str, LRScheduler]) -> None:
        self._schedules = schedules
        self._positions: dict[str, int] = {}  # when the pass began

    def begin_pass(self, step: Step) -> None:
        self._positions = self._read_positions()

    def reduced(self, step: Step) -> None:
        for name, now in self._read_positions().items():
            if now != self._positions[name]:
                raise UsageError(
                    f"{name}.step() inside the micro-batch loop of step {step.number}: each rank calls it as often as "
                    "it has micro-batches; dedent it by one level",
                    code="SS211",
                )

    def _read_positions(self) -> dict[str, int]:
        return {name: getattr(schedule, "last_epoch", 0) for name, schedule in self._schedules.items()}


def _refuse_early(optimizer: Optimizer) -> None:
    """Refuse an update before the loop. Without a gradient it does nothing."""
    if any(param.grad is not None for param in list_params(optimizer)):
        raise UsageError(
            "optimizer.step() was called before the loop of the run: each rank trains alone there, on the whole data "
            "set, and nothing is saved; iterate over run.epochs(...) or run.steps(...)",
            code="SS214",
        )
