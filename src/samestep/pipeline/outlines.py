"""The shapes that a model computes on torch's meta device, each computed once."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.nested import find_tensors, map_tensors

MAX_KNOWN = 10_000  # results; numbers among the arguments may make each micro-batch's new


class Outlines(TorchFunctionMode):
    """While it is active, a function of tensors on the meta device returns the shapes of an earlier call alike.

    torch computes shapes by code in Python, which takes up to 1 ms for a linear layer. The results have no graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, Any] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        key = func, _describe(args), _describe(kwargs)
        try:
            known = self._known.get(key)
        except TypeError:  # an argument has no hash
            return func(*args, **kwargs)
        if known is not None:
            return map_tensors(Tensor.clone, known)
        result = func(*args, **kwargs)
        given, found = find_tensors((args, kwargs)), find_tensors(result)
        # A function that writes to an argument, and returns it, may change more than its shape.
        is_new = {*map(id, found)}.isdisjoint(map(id, given))
        if found and is_new and all(each.is_meta for each in given + found) and func.__name__ != "__get__":
            if len(self._known) == MAX_KNOWN:
                self._known.clear()
            self._known[key] = map_tensors(Tensor.detach, result)
        return result


def _describe(value: Any) -> Any:
    """Return what the shape of a function's result depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, tuple | list):
        return type(value), *map(_describe, value)
    if isinstance(value, dict):
        return (*((key, _describe(each)) for key, each in value.items()),)
    return type(value), value
