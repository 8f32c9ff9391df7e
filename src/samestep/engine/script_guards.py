"""Refuses what a script must not change while the gradient of a step is computed."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from samestep.errors import UsageError
from samestep.torch_internals import get_local, is_sharded, read_version


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
        marks = self._read_marks()
        if marks == self._marks:
            return
        for i, name in enumerate(self._names):
            if (marks.versions[i], marks.places[i]) != (self._marks.versions[i], self._marks.places[i]):
                raise UsageError(
                    f"{name} was changed inside the micro-batch loop (by the model's forward, as nn.Embedding(max_norm="
                    "...) does, or by assigning .data?), so that the gradient depends on the rank: change "
                    "weights after the loop; if it is a data-dependent initialization (ActNorm), run one forward pass "
                    "after run.prepare, before the loop",
                    code="SS208",
                )
            if marks.trained[i] != self._marks.trained[i]:
                raise UsageError(
                    f"requires_grad of {name} was changed inside the micro-batch loop, so that the gradient depends on "
                    "the rank: change it before or after the loop",
                    code="SS208",
                )

    def _read_marks(self) -> "Marks":
        params = [*map(get_local, self._params)] if self._are_sharded else self._params
        return Marks(
            [*map(read_version, params)],
            [param.data_ptr() for param in params],
            [param.requires_grad for param in self._params],
        )


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


def check_gradients(
    names: Sequence[str], params: Sequence[Tensor], found: Sequence[tuple[int, Tensor, int]], v: int
) -> None:
    """Refuse changes of gradients in micro-batch v.

    Args:
        found: of each gradient that the micro-batch has left in `.grad`, the number of the parameter, the tensor and
            its version.

    Raises:
        UsageError: a gradient was removed, replaced or written to.
    """
    for i, grad, version in found:
        if params[i].grad is grad and read_version(grad) == version:
            continue
        if params[i].grad is None:
            raise UsageError(
                f"the gradient of {names[i]} is None at the end of micro-batch {v}: remove zero_grad(), which is not "
                "needed",
                code="SS207",
            )
        raise UsageError(
            f"the gradient of {names[i]} was changed in micro-batch {v} (by loss.backward(), zero_grad, clipping, or a "
            "hook registered after run.prepare?), while it is only a partial sum: change it after the micro-batch loop",
            code="SS207",
        )
