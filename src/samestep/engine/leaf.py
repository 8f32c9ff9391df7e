"""The gradients of one rank: the backward pass of a micro-batch, the sums of several along the canonical tree, and what
a script must not change meanwhile.

The gradients of all parameters are read by functions in C: a call in Python per parameter would cost more than a step
of a small model. A tensor per parameter, None for a parameter that was not used.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import compress, repeat
from operator import attrgetter, is_, is_not
from typing import Any, NoReturn

import torch
from torch import Tensor

from samestep.errors import UsageError
from samestep.plan.tree import Layout, list_merges
from samestep.torch_internals import (
    add_all,
    get_grad_hooks,
    get_local,
    is_sharded,
    multiply_all,
    read_version,
    run_backward,
)

Grads = list[Tensor | None]
RunBackward = Callable[[Sequence[Tensor], Any, float | Tensor], None]  # parameters, loss, factor of the loss
NONE = repeat(None)

read_grad: Callable[[Tensor], Tensor | None] = attrgetter("grad")
read_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")


def drop_grads(params: Sequence[Tensor]) -> None:
    """Set the gradients of parameters to None."""
    for param in params:
        param.grad = None


class GradientHooks:
    """Passes on the gradient of each parameter, as soon as a backward pass has computed it.

    A hook that a script has registered itself on a parameter runs before, and may change the gradient.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        # Registering hooks and removing them takes ten times as long as adding them to torch's own dicts.
        self._hooks = [(get_grad_hooks(param), partial(self._pass_on, i)) for i, param in enumerate(params)]
        self._receive: Callable[[int, Tensor], object] | None = None

    @contextmanager
    def passing_to(self, receive: Callable[[int, Tensor], object]) -> Iterator[None]:
        """Call `receive` with the number and the gradient of each parameter that gets one in the block."""
        self._receive = receive
        for hooks, hook in self._hooks:
            hooks[self] = hook
        try:
            yield
        finally:
            for hooks, _ in self._hooks:
                hooks.pop(self, None)
            self._receive = None

    def _pass_on(self, i: int, param: Tensor) -> None:
        # An autograd.Function may have returned no gradient, or a hook removed it: the same as unused.
        if self._receive is not None and param.grad is not None:
            self._receive(i, param.grad)


def run_backward_alone(params: Sequence[Tensor], loss: Tensor, factor: float | Tensor) -> None:
    """Run the backward pass of `factor * loss`, which leaves its gradients in `.grad`.

    Raises:
        UsageError: a parameter has a gradient, which is of another backward pass.
    """
    if any(map(is_not, map(read_grad, params), NONE)):
        refuse_other_backward()
    if isinstance(factor, Tensor):
        seed = factor.to(loss).view_as(loss)
    else:  # a new one each time, because an autograd.Function may write to its grad_output
        seed = torch.full(loss.shape, factor, dtype=loss.dtype, device=loss.device)
    run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def refuse_other_backward() -> NoReturn:
    """Raise UsageError for a gradient that step.backward has not left."""
    raise UsageError(
        "loss.backward() was called inside the micro-batch loop: call step.backward(loss), which weights the loss and "
        "sums over ranks; for an input's gradient, torch.autograd.grad(loss, x)",
        code="SS201",
    )


# What changes with a write to parameters. `param.data = ...` changes the address, but not the version.
Marks = tuple[list[int], list[int], list[bool]]  # versions, addresses, `requires_grad`


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
        if self._marks[1] == before[1]:
            return
        for name, param, kind in zip(self._names, self._params, self._kinds, strict=True):
            if (param.shape, param.dtype) != kind:
                raise UsageError(
                    f"{name} was converted or given another shape in the loop: change the model before run.prepare",
                    code="SS208",
                )

    def check(self) -> None:
        """Raise UsageError if weights were changed, frozen or unfrozen since the pass began."""
        marks = self._read_marks()
        if marks == self._marks:
            return
        for name, then, now in zip(self._names, zip(*self._marks, strict=True), zip(*marks, strict=True), strict=True):
            if now != then:
                raise UsageError(
                    f"{name} was changed inside the micro-batch loop (by requires_grad, the model's forward, as "
                    "nn.Embedding(max_norm=...) does, or by assigning .data?), so that the gradient depends on the "
                    "rank: change weights after the loop; if it is a data-dependent initialization (ActNorm), run one "
                    "forward pass after run.prepare, before the loop",
                    code="SS208",
                )

    def _read_marks(self) -> Marks:
        params = [*map(get_local, self._params)] if self._are_sharded else self._params
        return (
            [*map(read_version, params)],
            [*map(Tensor.data_ptr, params)],
            [*map(read_requires_grad, self._params)],
        )


class PartialSums:
    """The sums of this rank's micro-batches so far, along the canonical tree.

    Attributes:
        layout: which micro-batches the ranks have.
        held: this rank's leaves of the tree: its micro-batches, or its workers.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.held = layout.leaves[rank]
        self._merges = list_merges(layout.num_micro_batches // layout.leaf_size, self.held)
        self._sums: list[Grads] = []

    def fold(self, v: int, grads: Grads) -> None:
        """Add the gradients of micro-batch v: the sums that it completes become one."""
        for _ in range(self._merges[self.held.index(v)]):
            grads = add_grads(self._sums.pop(), grads)
        self._sums.append(grads)

    @cached_property
    def _split(self) -> tuple[list[Grads], list[Grads]]:
        """The sums that the last micro-batch leaves as they are, and those that become one with it, in order."""
        num_stay = len(self._sums) - self._merges[-1]
        return self._sums[:num_stay], self._sums[num_stay:][::-1]

    def pack(self, i: int, grad: Tensor | None, views: Sequence[Tensor]) -> Tensor:
        """Copy the sums of parameter i to `views`, and add `grad`, of the last micro-batch. Returns the last view."""
        stay, merged = self._split
        for grads, view in zip(stay, views, strict=False):
            put(grads[i], view)
        view = views[len(stay)]
        for grads in merged[:-1]:
            grad = add(grads[i], grad)
        left = merged[-1][i] if merged else None
        if left is not None and grad is not None:
            torch.add(left, grad, out=view)
        else:
            put(grad if left is None else left, view)
        return view

    def complete(self, grads: Grads) -> Grads:
        """Return the sum of everything and `grads`, of the last micro-batch, if there is no other rank."""
        for left in reversed(self._sums):
            grads = add_grads(left, grads)
        return grads


def add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return left + right, computed in left. An absent gradient counts as zero."""
    if left is None:
        return right
    return left if right is None else left.add_(right)


def add_grads(left: Grads, right: Grads) -> Grads:
    """Return the sums of pairs, see `add`."""
    if not left or any(map(is_, (*left, *right), NONE)):
        return [*map(add, left, right)]
    add_all(left, right)
    return left


def average(sums: Grads, used: bytes, inverse: float) -> Grads:
    """Return `sum * inverse`, computed in the sum; None for a parameter that no micro-batch of the step used."""
    if not all(used):
        sums = [grad if is_used else None for grad, is_used in zip(sums, used, strict=True)]
    present = list_present(sums)
    if present and inverse != 1.0:
        multiply_all(present, inverse)
    return sums


def list_present(grads: Grads) -> list[Tensor]:
    """Return the gradients of the parameters that were used."""
    present: list[Any] = [*compress(grads, map(is_not, grads, NONE))]
    return present


def put(grad: Tensor | None, view: Tensor) -> None:
    """Copy a gradient into a view. An absent one becomes -0.0, which changes no sum."""
    if grad is None:
        view.zero_().neg_()
    else:
        view.copy_(grad)
