"""Detects mistakes of a script at its calls of optimizers, such as an update from an incomplete gradient."""

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from itertools import zip_longest
from typing import Any
from weakref import WeakMethod, WeakSet, finalize, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from samestep.errors import UsageError
from samestep.train.state.objects import Objects, list_named, list_params, name_optimizers
from samestep.train.step.steps import Step, StepObserver

Signature = list[tuple[str, int, Any]]


class Phase(Enum):
    """Where the script is in its run."""

    BEFORE_LOOP = auto()
    IN_LOOP = auto()
    AFTER_LOOP = auto()


class MisuseChecks(StepObserver):
    """Observes one run's loop, its prepared objects, and the updates of all optimizers of the process.

    The hook that sees the updates holds no reference to this object, and is removed with it.

    Args:
        held: the optimizers that prepared objects hold.
        divides: whether the gradients of this rank's micro-batches are not those of the batch.
    """

    def __init__(
        self, objects: Objects, modules: Mapping[str, nn.Module], held: Iterable[Optimizer], *, divides: bool
    ) -> None:
        self._modules = modules
        self._divides = divides
        self._optimizers: WeakSet[Optimizer] = WeakSet([*name_optimizers(objects).values(), *held])
        self._signature = self._sign()
        self._names = {number: path for path, number, _ in self._signature}
        self._phase = Phase.BEFORE_LOOP
        self._step: Step | None = None
        self._first_step = 0  # of the loop
        self._unreduced: dict[int, ref[Tensor]] = {}  # by id: what the first step's losses use of no prepared model
        self._partial: list[ref[Tensor]] = []  # the gradients that the last pass has left in them
        find_check = WeakMethod(self._check_update)

        def check(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (check_update := find_check()) is not None:
                check_update(optimizer, has_closure=len(args) > 1 or bool(kwargs))

        finalize(self, register_optimizer_step_pre_hook(check).remove)

    def begin_loop(self, first_step: int) -> None:
        """A loop begins with this step. Checks that the models are the prepared ones.

        Raises:
            UsageError: a model is not the one that was prepared.
        """
        pairs = zip_longest(self._signature, self._sign())
        if changed := next((before or now for before, now in pairs if before != now), None):
            raise UsageError(
                f"{changed[0]} was added, removed, replaced or converted after run.prepare: change the model before it",
                code="SS216",
            )
        self._phase = Phase.IN_LOOP
        self._first_step = first_step
        self._unreduced.clear()

    def begin_step(self, step: Step) -> None:
        self._step = step

    def close(self) -> None:
        """End the checks, with the loop."""
        self._phase = Phase.AFTER_LOOP
        self._step = None
        self._partial.clear()

    def backward(self, step: Step, loss: Tensor, weight: float | Tensor | None, model: nn.Module | None) -> None:
        if not self._divides or step.number != self._first_step:
            return
        for leaf in _find_leaves(loss) if isinstance(loss, Tensor) else ():
            if id(leaf) not in self._names:
                self._unreduced[id(leaf)] = ref(leaf)

    def reduced(self, step: Step) -> None:
        if not self._unreduced:
            return
        leaves = [leaf() for leaf in self._unreduced.values()]
        self._partial = [ref(leaf.grad) for leaf in leaves if leaf is not None and leaf.grad is not None]

    def _check_update(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        is_ours = optimizer in self._optimizers
        if is_ours and self._phase is Phase.BEFORE_LOOP:
            _refuse_early(optimizer, has_closure=has_closure)
        if self._phase is not Phase.IN_LOOP:
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

    def _sign(self) -> Signature:
        return [
            (f"{name}.{path}", id(param), (param.dtype, param.device))
            for name, module in self._modules.items()
            for path, param in list_named(module)
        ]


class ScheduleChecks(StepObserver):
    """Observes the schedules of a run that has some."""

    def __init__(self, schedules: Mapping[str, LRScheduler]) -> None:
        self._schedules = schedules
        self._positions: dict[str, int] = {}  # when the pass began

    def begin_pass(self, step: Step) -> None:
        self._positions = self._read_positions()

    def end_micro_batch(self, step: Step) -> None:
        for name, now in self._read_positions().items():
            if now != self._positions[name]:
                raise UsageError(
                    f"{name}.step() inside the micro-batch loop of step {step.number}: each rank calls it as often as "
                    "it has micro-batches; dedent it by one level",
                    code="SS211",
                )

    def _read_positions(self) -> dict[str, int]:
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
