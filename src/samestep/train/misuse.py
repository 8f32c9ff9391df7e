"""What a script must not do to a step whose gradient is not complete: caught where it is done."""

import dis
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from samestep.engine.reducer import Reducer
from samestep.errors import Error

if TYPE_CHECKING:
    from samestep.train.loop import Loop

Signature = list[tuple[str, int, Any]]


class MisuseChecks:
    """Watches over one run's loop, what it prepared, and all optimizers of the process.

    Attributes:
        unused_step: the step that has left gradients since an optimizer of the run was last called.
    """

    def __init__(self, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        self._objects, self._modules = objects, modules
        self._optimizers: WeakSet[Optimizer] = WeakSet(o for o in objects.values() if isinstance(o, Optimizer))
        self._schedules = [(name, thing) for name, thing in objects.items() if isinstance(thing, LRScheduler)]
        self._signature = self._sign()
        self.unused_step: int | None = None
        self._names = {number: path for path, number, _ in self._signature}
        self._loop: Loop | None = None
        self._hook: Any = None

    def watch(self, loop: "Loop") -> None:
        """The loop begins.

        Raises:
            Error: a model is not the one that was prepared.
        """
        for (path, *there), (now_path, *here) in zip(self._signature, self._sign(), strict=False):
            if path != now_path or there != here:
                raise Error(f"{now_path} was replaced or converted after run.prepare: change the model before it")
        if len(self._signature) != len(self._sign()):
            raise Error("a model got or lost parameters after run.prepare: change the model before it")
        self._loop = loop
        self._hook = register_optimizer_step_pre_hook(self._check_update)

    def close(self) -> None:
        """The loop has ended."""
        self._loop = None
        if self._hook is not None:
            self._hook.remove()

    def refuse_in_step(self, what: str, instead: str) -> None:
        """Raises Error inside the micro-batch loop of a step."""
        step = None if self._loop is None else self._loop.step
        if step is not None and step.open:
            step.check_not_left()
            raise Error(f"{what} inside the micro-batch loop of step {step.number}: {instead}")

    def read_schedules(self) -> list[int]:
        """How far each learning rate schedule is."""
        return [getattr(schedule, "last_epoch", 0) for _, schedule in self._schedules]

    def check_schedules(self, before: list[int], step: int) -> None:
        """Raises Error where a schedule was moved on within the micro-batch loop."""
        for (name, _), was, now in zip(self._schedules, before, self.read_schedules(), strict=True):
            if was != now:
                raise Error(
                    f"{name}.step() inside the micro-batch loop of step {step}: each rank calls it as often as it has "
                    "micro-batches; dedent it by one level"
                )

    def check_used(self, reducer: Reducer) -> None:
        """Called before a step drops the gradients that the step before it has left.

        Some steps rightly have no update: the script has dropped the gradients or set them to 0, a gradient scaler
        skips what is not finite, or weights change without one of torch's optimizers.

        Raises:
            Error: no optimizer has used them.
        """
        number, self.unused_step = self.unused_step, None
        if number is None or not self._optimizers or reducer.has_new_weights():
            return
        left = [param.grad for param in reducer.params if param.grad is not None]
        if any(bool(grad.any()) for grad in left) and all(bool(grad.isfinite().all()) for grad in left):
            raise Error(
                f"step {number} left gradients, and no optimizer.step() came before the next step: call it after the "
                "inner loop of every step; to accumulate more samples per update, raise batch_size, since each step "
                "adds up all of its micro-batches; to skip an update, call optimizer.zero_grad() after the inner loop"
            )

    def _check_update(self, optimizer: Optimizer, *_: Any) -> None:
        is_known = optimizer in self._optimizers
        name = None if is_known else self._find_ours(optimizer)
        if is_known or name is not None:
            self.refuse_in_step("optimizer.step()", "its gradient is not complete there; dedent it by one level")
            self.unused_step = None
            step = None if self._loop is None else self._loop.step
            if (
                step is not None
                and step.has_gradients
                and not _has_gradient(optimizer)  # or else there is no need to look at all of them
                and all(param.grad is None for param in self._params())
            ):
                raise Error(
                    f"optimizer.step() finds no gradient in step {step.number}: zero_grad() after the micro-batch loop "
                    "takes away what the loop has left; leave it out"
                )
        if name is not None:
            raise Error(
                f"an optimizer ({type(optimizer).__name__}) that run.prepare did not get updates {name}: pass it too, "
                "or its state is in no snapshot"
            )

    def _params(self) -> Iterator[nn.Parameter]:
        return (param for module in self._modules.values() for param in module.parameters())

    def _find_ours(self, optimizer: Optimizer) -> str | None:
        """A parameter of ours that a strange optimizer holds, unless it is part of something that was prepared."""
        things = [thing for thing in self._objects.values() if not isinstance(thing, LRScheduler)]
        if any(value is optimizer for thing in things for value in getattr(thing, "__dict__", {}).values()):
            self._optimizers.add(optimizer)
            return None
        params = (param for group in optimizer.param_groups for param in group["params"])
        return next((self._names[id(param)] for param in params if id(param) in self._names), None)

    def _sign(self) -> Signature:
        return [
            (f"{name}.{path}", id(param), (param.dtype, param.device))
            for name, module in self._modules.items()
            for path, param in module.named_parameters()
        ]


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])


def refuse_unpacking(frame: FrameType, what: str, instead: str) -> None:
    """Raises Error if the current line of `frame` assigns to several names, as `for x, y in epoch` does."""
    if dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("UNPACK"):
        raise Error(
            f"{what} was unpacked like a batch: loop over it first, `{instead}`; the loops are run.epochs() (or "
            "run.steps()), `for step in epoch`, and `for x, y in step`"
        )
