"""The gradients of one micro-batch, and what a script must not change while they are computed.

The gradients of all parameters are read by functions in C: a call in Python per parameter would cost more than a step
of a small model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress, count, repeat
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from samestep.engine.reduction_plan import ReductionPlan
from samestep.errors import UsageError
from samestep.torch_internals import get_local, get_storage, is_sharded, list_storages, read_version, run_backward

Inspect = Callable[[int, Tensor], None]  # gets the number of a parameter, and its gradient
NONE = repeat(None)

read_grad: Callable[[Tensor], Tensor | None] = attrgetter("grad")
read_layout: Callable[[Tensor], torch.layout] = attrgetter("layout")
read_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")


def drop_grads(params: Sequence[Tensor]) -> None:
    """Set the gradients of parameters to None."""
    for param in params:
        param.grad = None


class GradientHooks:
    """Hooks on parameters, which pass on each gradient as soon as it is there."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._receive: Inspect | None = None
        self._params = params
        self._handles: dict[int, RemovableHandle] = {}

    def attach(self) -> None:
        """Add the hooks that are missing: a script may unfreeze a parameter at any step."""
        for i, param in enumerate(self._params):
            if param.requires_grad and i not in self._handles:
                handle = param.register_post_accumulate_grad_hook(self._build_hook(i))  # type: ignore[no-untyped-call]
                self._handles[i] = handle

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    @contextmanager
    def passing_to(self, receive: Inspect) -> Iterator[None]:
        """Call `receive` with each gradient of the backward passes in this block."""
        self._receive = receive
        try:
            yield
        finally:
            self._receive = None

    def _build_hook(self, i: int) -> Callable[[Tensor], None]:
        def on_grad(param: Tensor) -> None:
            # An autograd.Function may have returned no gradient, or a hook removed it: the same as unused.
            if self._receive is not None and param.grad is not None:
                self._receive(i, param.grad)

        return on_grad


class OpenMicroBatch:
    """A micro-batch whose body runs: its backward pass, and the gradients that this has left in `.grad`.

    Args:
        inspect: is called with each gradient, before it is added to others; None: nothing is.

    Attributes:
        v: its number.
        grads: what step.backward has left in `.grad`, in the order of the plan.
    """

    def __init__(self, plan: ReductionPlan, v: int, inspect: Inspect | None) -> None:
        self.v = v
        self.grads: list[Any] = [None] * len(plan.params)
        self.inspect = inspect
        self._plan = plan
        self._versions: dict[int, int] = {}  # of the gradients, by the number of the parameter

    def run_backward(self, loss: Tensor, factor: float | Tensor) -> None:
        """Run the backward pass of `factor * loss`, which leaves its gradients in `.grad`.

        Raises:
            UsageError: a parameter has a gradient, which is of another backward pass.
        """
        if any(map(is_not, map(read_grad, self._plan.params), NONE)):
            _refuse_other_backward()
        run_backward(
            (loss,), (build_seed(factor, loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    def note(self, i: int, grad: Tensor) -> None:
        """Note the gradient that the backward pass has left in `.grad` of parameter i."""
        if i in self._versions:
            raise UsageError(
                f"{self._plan.names[i]} got two gradients in one micro-batch (reentrant activation checkpointing?): "
                "use torch.utils.checkpoint with use_reentrant=False",
                code="SS209",
            )
        self.grads[i] = grad
        self._versions[i] = read_version(grad)

    def note_all(self, wanted: set[int] | None) -> None:
        """Note all gradients after the backward pass, as dense tensors that share no memory.

        Args:
            wanted: numbers of the parameters whose gradients are kept; None: all.
        """
        params = self._plan.params
        if wanted is not None:
            drop_grads([param for i, param in enumerate(params) if i not in wanted])
        grads: list[Any] = [*map(read_grad, params)]
        numbers = [*compress(count(), map(is_not, grads, NONE))]
        present = [*map(grads.__getitem__, numbers)]
        storages = list_storages(present) if {*map(read_layout, present)} == {torch.strided} else []
        if len({*storages}) < len(present):
            self._separate(grads, numbers)
        if self.inspect is not None:
            for i in numbers:
                self.inspect(i, grads[i])
        self.grads = grads
        self._versions = dict(zip(numbers, map(read_version, map(grads.__getitem__, numbers)), strict=True))

    def _separate(self, grads: list[Any], numbers: Sequence[int]) -> None:
        """Make gradients dense, and copy those that share memory with another one. `numbers`: those present."""
        seen = set[int]()
        for i in numbers:
            grad = grads[i]
            if grad.layout is not torch.strided:
                grad = grad.to_dense()  # a sparse one has other rows on each rank
            elif get_storage(grad) in seen:  # one tensor for two parameters, or views that may overlap
                grad = grad.clone()
            seen.add(get_storage(grad))
            self._plan.params[i].grad = grads[i] = grad

    def close(self) -> list[Any]:
        """End the micro-batch. Returns its gradients.

        Raises:
            UsageError: the script has removed, replaced or changed one.
        """
        grads: list[Any] = [*map(read_grad, self._plan.params)]
        versions = [*map(read_version, map(self.grads.__getitem__, self._versions))]
        if versions != [*self._versions.values()] or not all(map(is_, grads, self.grads)):
            self._refuse_changes(grads)
        return grads

    def _refuse_changes(self, grads: Sequence[Tensor | None]) -> None:
        for i, (name, grad) in enumerate(zip(self._plan.names, grads, strict=True)):
            if i not in self._versions:
                if grad is not None:
                    _refuse_other_backward()
            elif grad is None:
                raise UsageError(
                    f"the gradient of {name} is None at the end of micro-batch {self.v}: remove zero_grad(), which is "
                    "not needed",
                    code="SS207",
                )
            elif grad is not self.grads[i] or read_version(grad) != self._versions[i]:
                raise UsageError(
                    f"the gradient of {name} was changed in micro-batch {self.v} (by loss.backward(), zero_grad, "
                    "clipping, or a hook registered after run.prepare?), while it is only a partial sum: change it "
                    "after the micro-batch loop",
                    code="SS207",
                )


def _refuse_other_backward() -> NoReturn:
    raise UsageError(
        "loss.backward() was called inside the micro-batch loop: call step.backward(loss), which weights the loss and "
        "sums over ranks; for an input's gradient, torch.autograd.grad(loss, x)",
        code="SS201",
    )


def build_seed(factor: float | Tensor, loss: Tensor) -> Tensor:
    """Return the initial gradient for a backward pass of `factor * loss`."""
    if isinstance(factor, Tensor):
        return factor.to(loss).view_as(loss)
    # A new one each time, because an autograd.Function may write to its grad_output.
    return torch.full(loss.shape, factor, dtype=loss.dtype, device=loss.device)


class Marks(NamedTuple):
    """What changes with a write to parameters.

    Attributes:
        versions: count writes.
        places: addresses, because `param.data = ...` does not change the version.
        trained: `requires_grad`.
    """

    versions: list[int]
    places: list[int]
    trained: list[bool]


class ParameterGuard:
    """Refuses changes of parameters inside the micro-batch loop, and conversions before it."""

    def __init__(self, names: Sequence[str], params: Sequence[Tensor]) -> None:
        self._names = names
        self._params = params
        self._are_sharded = any(map(is_sharded, params))
        self._kinds = [(param.shape, param.dtype) for param in params]
        self._marks = self._read_marks()

    def begin(self) -> None:
        """Begin a pass: accept what the script has changed since the last one.

        Raises:
            UsageError: it has converted or reshaped a parameter.
        """
        before = self._marks
        self._marks = self._read_marks()
        if self._marks.places == before.places:
            return
        for name, param, kind in zip(self._names, self._params, self._kinds, strict=True):
            if (param.shape, param.dtype) != kind:
                raise UsageError(
                    f"{name} was converted or given another shape in the loop: change the model before run.prepare",
                    code="SS208",
                )

    def check(self) -> None:
        """Raise UsageError if weights were changed, frozen or unfrozen since the pass began."""
        before = self._marks
        marks = self._read_marks()
        if marks == before:
            return
        for i, name in enumerate(self._names):
            if (marks.versions[i], marks.places[i]) != (before.versions[i], before.places[i]):
                raise UsageError(
                    f"{name} was changed inside the micro-batch loop (by the model's forward, as nn.Embedding(max_norm="
                    "...) does, or by assigning .data?), so that the gradient depends on the rank: change "
                    "weights after the loop; if it is a data-dependent initialization (ActNorm), run one forward pass "
                    "after run.prepare, before the loop",
                    code="SS208",
                )
            if marks.trained[i] != before.trained[i]:
                raise UsageError(
                    f"requires_grad of {name} was changed inside the micro-batch loop, so that the gradient depends on "
                    "the rank: change it before or after the loop",
                    code="SS208",
                )

    def _read_marks(self) -> Marks:
        params = [*map(get_local, self._params)] if self._are_sharded else self._params
        trained = [*map(read_requires_grad, self._params)]
        return Marks([*map(read_version, params)], [*map(Tensor.data_ptr, params)], trained)
