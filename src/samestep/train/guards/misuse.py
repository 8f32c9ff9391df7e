"""Detects mistakes of a script at its calls of optimizers, such as an update from an incomplete gradient."""

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import Any
from weakref import WeakMethod, WeakSet, finalize, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from samestep.errors import UsageError
from samestep.train.state.names import list_named, list_params
from samestep.train.state.stateful import Objects, find_saved, name_optimizers
from samestep.train.step.steps import Step, StepObserver

Signature = list[tuple[str, int, Any]]


class Phase(Enum):
    """Where the script is in its run."""

    BEFORE_LOOP = auto()
    IN_LOOP = auto()
    AFTER_LOOP = auto()


class MisuseChecks(StepObserver):
    """Observes one run's loop, its prepared objects, and the updates of all optimizers of the process.

    With several ranks, it is an observer of steps. The hook that sees the updates holds no reference to this object,
    and is removed with it.

    Args:
        held: the optimizers that prepared objects hold.
    """

    def __init__(self, objects: Objects, modules: Mapping[str, nn.Module], held: Iterable[Optimizer]) -> None:
        self._objects = objects
        self._modules = modules
        self._optimizers: WeakSet[Optimizer] = WeakSet([*name_optimizers(objects).values(), *held])
        self._signature = self._sign()
        self._names = {number: path for path, number, _ in self._signature}
        self._phase = Phase.BEFORE_LOOP
        self._step: Step | None = None
        self._first_step = 0  # of the loop
        self._unreduced: dict[int, ref[Tensor]] = {}  # by id: what the first step's losses use of no prepared model
        self._partial: list[ref[Tensor]] = []  # the gradients that the last pass has left in them
        self._watch_updates()

    def _watch_updates(self) -> None:
        find_check = WeakMethod(self._check_update)

        def check(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (check_update := find_check()) is not None:
                check_update(optimizer, has_closure=len(args) > 1 or bool(kwargs))

        self._stop_watching = finalize(self, register_optimizer_step_pre_hook(check).remove)

    def begin_loop(self, first_step: int) -> None:
        """A loop begins with this step. Checks that the models are the prepared ones.

        Raises:
            UsageError: a model is not the one that was prepared.
        """
        for (path, *there), (now_path, *here) in zip(self._signature, self._sign(), strict=False):
            if path != now_path or there != here:
                raise UsageError(
                    f"{now_path} was replaced or converted after run.prepare: change the model before it", code="SS216"
                )
        if len(self._signature) != len(self._sign()):
            raise UsageError(
                "a model got or lost parameters after run.prepare: change the model before it", code="SS216"
            )
        if self._phase is Phase.AFTER_LOOP:
            self._watch_updates()
        self._phase = Phase.IN_LOOP
        self._first_step = first_step
        self._unreduced.clear()

    def begin_step(self, step: Step) -> None:
        """A step begins."""
        self._step = step

    def close(self) -> None:
        """End the checks, with the loop."""
        self._phase = Phase.AFTER_LOOP
        self._step = None
        self._partial.clear()
        self._stop_watching()

    def backward(self, step: Step, loss: Tensor, weight: float | Tensor | None, model: nn.Module | None) -> None:
        if step.number != self._first_step:
            return
        for leaf in _find_leaves(loss) if isinstance(loss, Tensor) else ():
            if id(leaf) not in self._names:
                self._unreduced[id(leaf)] = ref(leaf)

    def reduced(self, step: Step) -> None:
        leaves = [leaf() for leaf in self._unreduced.values()]
        self._partial = [ref(leaf.grad) for leaf in leaves if leaf is not None and leaf.grad is not None]

    def _check_update(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        if self._phase is Phase.BEFORE_LOOP:
            if optimizer in self._optimizers:
                _refuse_early(optimizer, has_closure=has_closure)
            return
        name = None if optimizer in self._optimizers else self._find_ours(optimizer)
        if (step := self._step) is not None and (optimizer in self._optimizers or name is not None):
            step.refuse_inside("optimizer.step()", "its gradient is not complete there; dedent it by one level")
        if name is not None:
            raise UsageError(
                f"an optimizer ({type(optimizer).__name__}) that was not passed to run.prepare updates {name}: pass "
                "it, so that its state is part of the snapshots",
                code="SS215",
            )
        if step is not None and self._partial and not step.is_open:
            self._refuse_partial(optimizer, step.number)

    def _refuse_partial(self, optimizer: Optimizer, number: int) -> None:
        """Raise UsageError for an update from a gradient that holds this rank's micro-batches only."""
        partial = {id(grad()) for grad in self._partial}
        for param in list_params(optimizer):
            if param.grad is not None and id(param.grad) in partial:
                raise UsageError(
                    f"an optimizer ({type(optimizer).__name__}) that was not passed to run.prepare updates a parameter "
                    f"of shape {tuple(param.shape)} in step {number}, whose gradient is of this rank's micro-batches "
                    "only: pass the optimizer and the module of the parameter to run.prepare",
                    code="SS215",
                )

    def _find_ours(self, optimizer: Optimizer) -> str | None:
        """Return a prepared parameter of an unprepared optimizer, unless a prepared object saves the optimizer."""
        ids = map(id, list_params(optimizer))
        name = next((self._names[number] for number in ids if number in self._names), None)
        if name is not None and find_saved(self._objects, [optimizer]):
            self._optimizers.add(optimizer)
            return None
        return name

    def _sign(self) -> Signature:
        return [
            (f"{name}.{path}", id(param), (param.dtype, param.device))
            for name, module in self._modules.items()
            for path, param in list_named(module)
        ]


class ScheduleChecks(StepObserver):
    """Refuses a step of a learning rate schedule inside the loop over micro-batches."""

    def __init__(self, schedules: Mapping[str, LRScheduler]) -> None:
        self._schedules = schedules
        self._positions: dict[str, int] = {}  # when the pass began

    def begin_pass(self, step: Step) -> None:
        self._positions = self._read()

    def exchange(self, step: Step) -> None:
        for name, now in self._read().items():
            if now != self._positions[name]:
                raise UsageError(
                    f"{name}.step() inside the micro-batch loop of step {step.number}: each rank calls it as often as "
                    "it has micro-batches; dedent it by one level",
                    code="SS211",
                )

    def _read(self) -> dict[str, int]:
        return {name: getattr(schedule, "last_epoch", 0) for name, schedule in self._schedules.items()}


def _find_leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors in which a backward pass of `loss` accumulates gradients."""
    stack: list[Any] = [loss.grad_fn]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        stack += [source for source, _ in node.next_functions]


def _refuse_early(optimizer: Optimizer, *, has_closure: bool) -> None:
    """Refuse an update before the loop. Without a gradient, and a closure to compute one, it does nothing."""
    if has_closure or any(param.grad is not None for param in list_params(optimizer)):
        raise UsageError(
            "optimizer.step() was called before the loop of the run: each rank trains alone there, on the whole data "
            "set, and nothing is saved; iterate over run.epochs(...) or run.steps(...)",
            code="SS214",
        )
