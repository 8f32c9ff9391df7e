"""Finds what several ranks could not compute, on each map of stages to ranks, also on one rank."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from samestep.errors import UsageError
from samestep.nested import find_tensors
from samestep.pipeline.stages import StagedModel
from samestep.torch_internals import read_version

READERS = frozenset(
    ["item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "is_nonzero", "equal", "allclose"]
)


class StageCheck(TorchFunctionMode):
    """While it is active, the functions of torch get only tensors of the stage that computes.

    These are its inputs, parameters and buffers, and what a function has returned in it. With a tensor that has no
    values, such as that of another rank, some functions return anything, without an error.
    """

    def __init__(self, models: Sequence[StagedModel]) -> None:
        super().__init__()
        self._name = models[0].name
        self._last = models[0].num_stages - 1
        self._stage = 0
        self._inputs: list[tuple[Tensor, int]] = []  # of the stage, with their versions
        self._stages: Any = WeakTensorKeyDictionary()
        for each in models:
            self._stages.update(each.map_tensors())

    def begin(self, stage: int, inputs: Sequence[Tensor]) -> None:
        """Begin a stage."""
        self._stage = stage
        self._inputs = [(each, read_version(each)) for each in inputs]
        self._add(inputs)

    def end(self) -> None:
        """End a stage. Raise UsageError if it has written to its inputs, of which other ranks have copies."""
        if any(read_version(each) != version for each, version in self._inputs):
            raise UsageError(
                f"stage {self._stage} of {self._name} writes to a tensor among its inputs, and other ranks do not see "
                "that: return a new tensor, by x * 2 for x.mul_(2), or by inplace=False",
                code="SS224",
            )

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for each in tensors:
            self._stages[each] = self._stage

    def refuse_foreign(self, tensors: Sequence[Tensor], name: str) -> None:
        """Raise UsageError if a function with this name got tensors of another stage."""
        if any(each.is_meta or self._stages.get(each, self._stage) != self._stage for each in tensors):
            raise UsageError(
                f"stage {self._stage} of {self._name} passes a tensor of another stage to {name}: let what a stage "
                "uses cross its cut as an argument, with no residual around the cut, and use a parameter inside of its "
                "modules only",
                code="SS224",
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)  # the compiled code must be that of later micro-batches
        name = func.__name__
        given = find_tensors((args, kwargs))
        if given and name in READERS and self._stage < self._last:
            raise UsageError(
                f"stage {self._stage} of {self._name} reads values of a tensor ({name}), which the ranks of later "
                "stages do not have: no line of the script may read values of the model before its end",
                code="SS224",
            )
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            self.refuse_foreign(given, name)
            raise
        made = find_tensors(result)
        if made:
            self.refuse_foreign(given, name)
        self._add(made)
        return result
