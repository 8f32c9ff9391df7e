"""Backward passes whose gradients go to a receiver."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from samestep.errors import UsageError
from samestep.torch_internals import run_backward

Receive = Callable[[int, Tensor], None]  # gets the number of a parameter, and its gradient


class GradientHooks:
    """Runs backward passes. Hooks on the parameters, if attached, pass on each gradient as soon as it is there.

    Within a micro-batch, gradients of other backward passes are refused.

    Attributes:
        failure: the type of the error that a backward pass of the open micro-batch has raised; "" for none.
    """

    def __init__(self, names: Sequence[str], params: Sequence[Tensor]) -> None:
        self._names = names
        self._params = params
        self._handles: dict[int, RemovableHandle] = {}
        self._receive: Receive | None = None
        self._is_open = False
        self.failure = ""

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

    def open(self) -> None:
        """Begin a micro-batch."""
        self._is_open = True
        self.failure = ""

    def close(self) -> None:
        """End the micro-batch."""
        self._is_open = False

    def backward(self, loss: Tensor, factor: float | Tensor, receive: Receive | None) -> None:
        """Run the backward pass of `factor * loss`, which leaves its gradients in `.grad`.

        Args:
            receive: is called with each gradient, as soon as it is in `.grad`; needs hooks. None: nothing is called.
        """
        if not self._handles:
            self.check_empty(self._params)
        self._receive = _ignore if receive is None else receive
        try:
            run_backward(
                (loss,), (build_seed(factor, loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        except BaseException as error:
            self.failure = type(error).__name__
            raise
        finally:
            self._receive = None

    @staticmethod
    def check_empty(params: Sequence[Tensor]) -> None:
        """Raise UsageError if a parameter has a gradient, which is of another backward pass."""
        if [param for param in params if param.grad is not None]:
            raise UsageError(
                "loss.backward() was called inside the micro-batch loop: call step.backward(loss), which weights the "
                "loss and sums over ranks; for an input's gradient, torch.autograd.grad(loss, x)",
                code="SS201",
            )

    def _build_hook(self, i: int) -> Callable[[Tensor], None]:
        def on_grad(param: Tensor) -> None:
            receive = self._receive
            grad = param.grad
            if receive is None:
                if self._is_open:
                    self.check_empty([param])
                return
            if (
                receive is _ignore or grad is None
            ):  # an autograd.Function returned none, or a hook removed it: same as unused
                return
            if grad.layout is not torch.strided:
                param.grad = grad = grad.to_dense()  # a sparse one has other rows on each rank
            receive(i, grad)

        return on_grad


def _ignore(i: int, grad: Tensor) -> None:
    pass


def build_seed(factor: float | Tensor, loss: Tensor) -> Tensor:
    """Return the initial gradient for a backward pass of `factor * loss`."""
    if isinstance(factor, Tensor):
        return factor.to(loss).view_as(loss)
    # A new one each time, because an autograd.Function may write to its grad_output.
    return torch.full(loss.shape, factor, dtype=loss.dtype, device=loss.device)
