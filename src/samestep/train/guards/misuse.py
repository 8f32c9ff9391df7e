"""Detects mistakes of a script in a step, such as an update from an incomplete gradient."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from samestep.engine.gradient_averager import GradientAverager
from samestep.errors import UsageError
from samestep.torch_internals import get_local
from samestep.train.state.stateful import Objects, find_saved, list_params, name_optimizers
from samestep.train.step.steps import Step, StepObserver
from samestep.watch.replica_checksums import checksum, read_back

MAX_EMPTY = 4  # updates without a gradient, from the start on, that may be on purpose
Signature = list[tuple[str, int, Any]]


class MisuseChecks(StepObserver):
    """Observes one run's loop, its prepared objects, and all optimizers of the process.

    Args:
        held: the optimizers that prepared objects hold.
    """

    def __init__(
        self, objects: Objects, modules: Mapping[str, nn.Module], gradients: GradientAverager, held: Iterable[Optimizer]
    ) -> None:
        self._objects = objects
        self._modules = modules
        self._gradients = gradients
        self._optimizers: WeakSet[Optimizer] = WeakSet([*name_optimizers(objects).values(), *held])
        self._schedules = [(name, thing) for name, thing in objects.items() if isinstance(thing, LRScheduler)]
        self._signature = self._sign()
        self._names = {number: path for path, number, _ in self._signature}
        self._unused_step: int | None = None  # computed gradients, and no optimizer of the run was called since
        self._first_unused: int | None = None  # the first step whose gradients no optimizer used
        self._weights: list[int] | None = None  # checksums in the present step, once there is a first unused one
        self._is_updated_otherwise = False  # the script updates weights without an optimizer of torch
        self._empty_steps: set[int] | None = set()  # updates found no gradient; None: one has found some
        self._step: Step | None = None
        self._read: list[int] = []  # position of each schedule when the pass began
        self._hook: Any = None
        self._early_hooks = [optimizer.register_step_pre_hook(_refuse_early) for optimizer in self._optimizers]

    def watch(self) -> None:
        """Begin to check updates, at the beginning of a loop. Checks first that the models are the prepared ones.

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
        for hook in self._early_hooks:
            hook.remove()
        self._hook = register_optimizer_step_pre_hook(self._check_update)

    def close(self) -> None:
        """End the checks, with the loop."""
        self._step = None
        if self._hook is not None:
            self._hook.remove()

    def begin_step(self, step: Step) -> None:
        self._step = step

    def begin_pass(self, step: Step) -> None:
        if step.num_passes == 0:
            self._check_used()
        self._read = self._read_schedules()

    def exchange(self, step: Step) -> None:
        for (name, _), was, now in zip(self._schedules, self._read, self._read_schedules(), strict=True):
            if was != now:
                raise UsageError(
                    f"{name}.step() inside the micro-batch loop of step {step.number}: each rank calls it as often as "
                    "it has micro-batches; dedent it by one level",
                    code="SS211",
                )

    def reduced(self, step: Step) -> None:
        if step.has_gradients and step.num_passes == 1:
            self._unused_step = step.number
            if self._first_unused is not None and not self._is_updated_otherwise:
                self._weights = self._sum_weights()

    def _read_schedules(self) -> list[int]:
        """Return the position of each learning rate schedule."""
        return [getattr(schedule, "last_epoch", 0) for _, schedule in self._schedules]

    def _check_used(self) -> None:
        """Check that the gradients of the previous step were used, before this step drops them.

        A step without an update is correct if the script has dropped the gradients or set them to 0, if a gradient
        scaler skips non-finite ones, or if weights are updated without an optimizer of torch. torch does not count
        writes through `.data`, so the first unused step only begins a comparison of the weights.

        Raises:
            UsageError: no optimizer has used them, and no weight has changed.
        """
        number = self._unused_step
        self._unused_step = None
        weights = self._weights
        self._weights = None
        if number is None or not self._optimizers or self._is_updated_otherwise or self._gradients.has_new_weights():
            return
        left = [get_local(param.grad) for param in self._gradients.plan.params if param.grad is not None]
        if not any(bool(grad.any()) for grad in left) or not all(bool(grad.isfinite().all()) for grad in left):
            return
        if self._first_unused is None:
            self._first_unused = number
        elif weights != self._sum_weights():
            self._is_updated_otherwise = True
        else:
            raise UsageError(
                f"the gradients of step {self._first_unused} were not used by an optimizer.step() before the next "
                f"step, nor those of step {number}: call it after the inner loop of every step; to accumulate more "
                "samples per update, raise batch_size, since each step sums all of its micro-batches; to skip an "
                "update, call optimizer.zero_grad() after the inner loop",
                code="SS212",
            )

    def _sum_weights(self) -> list[int]:
        params = self._gradients.plan.params
        return [*read_back({str(i): checksum(get_local(param)) for i, param in enumerate(params)}).values()]

    def _check_update(self, optimizer: Optimizer, *_: Any) -> None:
        is_known = optimizer in self._optimizers
        name = None if is_known else self._find_ours(optimizer)
        if (step := self._step) is not None and (is_known or name is not None):
            step.refuse_inside("optimizer.step()", "its gradient is not complete there; dedent it by one level")
            self._unused_step = None
            if step.has_gradients:
                self._check_gradients(step, optimizer)
        if name is not None:
            raise UsageError(
                f"an optimizer ({type(optimizer).__name__}) that was not passed to run.prepare updates {name}: pass "
                "it, so that its state is part of the snapshots",
                code="SS215",
            )

    def _check_gradients(self, step: Step, optimizer: Optimizer) -> None:
        """Check that an update finds gradients. A script may drop those of a few steps, which skips their updates.

        Raises:
            UsageError: there were none in the first `MAX_EMPTY` steps of this start.
        """
        if self._empty_steps is None:
            return
        if self._gradients.plan.owners is not None:  # this rank may own no parameter of the optimizer
            return
        others = (param for module in self._modules.values() for param in module.parameters())
        if any(param.grad is not None for param in chain(list_params(optimizer), others)):
            self._empty_steps = None
            return
        self._empty_steps.add(step.number)
        if len(self._empty_steps) == MAX_EMPTY:
            steps = ", ".join(map(str, sorted(self._empty_steps)))
            raise UsageError(
                f"optimizer.step() found no gradient in steps {steps}: a call after the micro-batch loop, such as "
                "zero_grad(), drops them; remove it",
                code="SS213",
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
            for path, param in module.named_parameters()
        ]


def _refuse_early(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an update before the loop. Without a gradient, and a closure to compute one, it does nothing."""
    has_closure = len(args) > 1 or bool(kwargs)
    if has_closure or any(param.grad is not None for param in list_params(optimizer)):
        raise UsageError(
            "optimizer.step() was called before the loop of the run: each rank trains alone there, on the whole data "
            "set, and nothing is saved; iterate over run.epochs(...) or run.steps(...)",
            code="SS214",
        )
