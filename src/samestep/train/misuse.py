"""Detects mistakes of a script in a step, such as an update from an incomplete gradient."""

from collections.abc import Mapping
from itertools import chain
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from samestep.engine.gradient_pass import GradientPass
from samestep.errors import UsageError
from samestep.train.steps import Step, StepObserver

Signature = list[tuple[str, int, Any]]


class MisuseChecks(StepObserver):
    """Observes one run's loop, its prepared objects, and all optimizers of the process."""

    def __init__(self, objects: Mapping[str, Any], modules: Mapping[str, nn.Module], gradients: GradientPass) -> None:
        self._objects, self._modules, self._gradients = objects, modules, gradients
        self._optimizers: WeakSet[Optimizer] = WeakSet(o for o in objects.values() if isinstance(o, Optimizer))
        self._schedules = [(name, thing) for name, thing in objects.items() if isinstance(thing, LRScheduler)]
        self._signature = self._sign()
        self._names = {number: path for path, number, _ in self._signature}
        self._unused_step: int | None = None  # computed gradients, and no optimizer of the run was called since
        self._step: Step | None = None
        self._read: list[int] = []  # position of each schedule when the pass began
        self._hook: Any = None
        self._early_hooks = [optimizer.register_step_pre_hook(_refuse_early) for optimizer in self._optimizers]

    def watch(self) -> None:
        """Check the models at the beginning of a loop.

        Raises:
            UsageError: a model is not the one that was prepared.
        """
        for (path, *there), (now_path, *here) in zip(self._signature, self._sign(), strict=False):
            if path != now_path or there != here:
                raise UsageError(f"{now_path} was replaced or converted after run.prepare: change the model before it")
        if len(self._signature) != len(self._sign()):
            raise UsageError("a model got or lost parameters after run.prepare: change the model before it")
        for hook in self._early_hooks:
            hook.remove()
        self._hook = register_optimizer_step_pre_hook(self._check_update)

    def close(self) -> None:
        """The loop has ended."""
        self._step = None
        if self._hook is not None:
            self._hook.remove()

    def begin_step(self, step: Step) -> None:
        self._step = step

    def begin_pass(self, step: Step) -> None:
        if step.num_passes == 0:
            self._check_used()
        self._read = self.read_schedules()

    def exchange(self, step: Step) -> None:
        for (name, _), was, now in zip(self._schedules, self._read, self.read_schedules(), strict=True):
            if was != now:
                raise UsageError(
                    f"{name}.step() inside the micro-batch loop of step {step.number}: each rank calls it as often as "
                    "it has micro-batches; dedent it by one level"
                )

    def reduced(self, step: Step) -> None:
        if step.has_gradients and step.num_passes == 1:
            self._unused_step = step.number

    def read_schedules(self) -> list[int]:
        """Return the position of each learning rate schedule."""
        return [getattr(schedule, "last_epoch", 0) for _, schedule in self._schedules]

    def _check_used(self) -> None:
        """Check that an optimizer has used the gradients of the previous step, before this step drops them.

        A step without an update is correct if the script has dropped the gradients or set them to 0, if a gradient
        scaler skips non-finite ones, or if weights are updated without an optimizer of torch.

        Raises:
            UsageError: no optimizer has used them.
        """
        number, self._unused_step = self._unused_step, None
        reducer = self._gradients.reducer
        if number is None or not self._optimizers or reducer.has_new_weights():
            return
        left = [param.grad for param in reducer.params if param.grad is not None]
        if any(bool(grad.any()) for grad in left) and all(bool(grad.isfinite().all()) for grad in left):
            raise UsageError(
                f"the gradients of step {number} were not used by an optimizer.step() before the next step: call it "
                "after the inner loop of every step; to accumulate more samples per update, raise batch_size, since "
                "each step sums all of its micro-batches; to skip an update, call optimizer.zero_grad() after the "
                "inner loop"
            )

    def _check_update(self, optimizer: Optimizer, *_: Any) -> None:
        is_known = optimizer in self._optimizers
        name = None if is_known else self._find_ours(optimizer)
        if (step := self._step) is not None and (is_known or name is not None):
            step.refuse_inside("optimizer.step()", "its gradient is not complete there; dedent it by one level")
            self._unused_step = None
            own = (param for group in optimizer.param_groups for param in group["params"])
            others = (param for module in self._modules.values() for param in module.parameters())
            if step.has_gradients and all(param.grad is None for param in chain(own, others)):
                raise UsageError(
                    f"optimizer.step() finds no gradient in step {step.number}: zero_grad() after the micro-batch loop "
                    "drops the gradients of the loop; remove it"
                )
        if name is not None:
            raise UsageError(
                f"an optimizer ({type(optimizer).__name__}) that was not passed to run.prepare updates {name}: pass "
                "it, so that its state is part of the snapshots"
            )

    def _find_ours(self, optimizer: Optimizer) -> str | None:
        """Return a prepared parameter of an unprepared optimizer, unless the optimizer is part of a prepared object."""
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


def _refuse_early(*_: Any) -> None:
    raise UsageError(
        "optimizer.step() was called before the loop of the run: each rank trains alone there, on the whole data set, "
        "and nothing is saved; iterate over run.epochs(...) or run.steps(...)"
    )
