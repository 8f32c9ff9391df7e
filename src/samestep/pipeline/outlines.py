"""The shapes that a model computes on torch's meta device, each computed once."""

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Outlines(TorchFunctionMode):
    """While it is active, a function of tensors on the meta device returns the shapes of an earlier call alike.

    torch computes shapes by code in Python, which takes up to 1 ms for a linear layer. The results have no graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Hashable, Any] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given: list[Tensor] = []
        key = func, _describe(args, given), _describe(kwargs, given)
        if func.__name__ == "__get__" or not given or not all(each.is_meta for each in given) or not _is_hashable(key):
            return func(*args, **kwargs)
        if key in self._known:
            return tree_map_only(Tensor, Tensor.clone, self._known[key])
        result = func(*args, **kwargs)
        found = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        # A function that writes to an argument, and returns it, may change more than its shape.
        if found and not any(each is one for each in found for one in given):
            self._known[key] = tree_map_only(Tensor, Tensor.detach, result)
        return result


def _describe(value: Any, found: list[Tensor]) -> Any:
    """Return what the shape of a function's result depends on. Adds the tensors in `value` to `found`."""
    if isinstance(value, Tensor):
        found.append(value)
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return type(value), *(_describe(each, found) for each in value)
    if isinstance(value, dict):
        return tuple((key, _describe(each, found)) for key, each in value.items())
    return type(value), value


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
