"""Refuses what a script must not change while the gradient of a step is computed."""

from collections.abc import Sequence

from torch import Tensor

from samestep.errors import UsageError
from samestep.torch_internals import get_local, read_version


class ParameterGuard:
    """Refuses changes of parameters inside the micro-batch loop, and conversions before it."""

    def __init__(self, names: Sequence[str], params: Sequence[Tensor]) -> None:
        self._names = names
        self._params = params
        self._kinds = [(param.shape, param.dtype) for param in params]
        self._places = self._find_places()
        self._marks = self._read_marks()

    def begin(self) -> None:
        """Begin a pass: accept what the script has changed since the last one.

        Raises:
            UsageError: it has converted or reshaped a parameter.
        """
        self._marks = self._read_marks()
        places = self._find_places()
        if places == self._places:
            return
        self._places = places
        for name, param, kind in zip(self._names, self._params, self._kinds, strict=True):
            if (param.shape, param.dtype) != kind:
                raise UsageError(
                    f"{name} was converted or given another shape in the loop: change the model before run.prepare",
                    code="SS208",
                )

    def check(self) -> None:
        """Raise UsageError if weights were changed, frozen or unfrozen since the pass began."""
        marks = self._read_marks()
        places = self._find_places()
        if marks == self._marks and places == self._places:
            return
        has_moved = map(int.__ne__, self._places, places)
        for name, before, now, moved in zip(self._names, self._marks, marks, has_moved, strict=True):
            if before[0] != now[0] or moved:
                raise UsageError(
                    f"{name} was changed inside the micro-batch loop (by the model's forward, as nn.Embedding(max_norm="
                    "...) does, or by assigning .data?), so that the gradient depends on the rank: change "
                    "weights after the loop; if it is a data-dependent initialization (ActNorm), run one forward pass "
                    "after run.prepare, before the loop",
                    code="SS208",
                )
            if before[1] != now[1]:
                raise UsageError(
                    f"requires_grad of {name} was changed inside the micro-batch loop, so that the gradient depends on "
                    "the rank: change it before or after the loop",
                    code="SS208",
                )

    def _read_marks(self) -> list[tuple[int, bool]]:
        return [(read_version(get_local(param)), param.requires_grad) for param in self._params]

    def _find_places(self) -> list[int]:
        """Return the address of each parameter, because `param.data = ...` does not change its version."""
        return [get_local(param).data_ptr() for param in self._params]


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
            f"the gradient of {names[i]} was changed in micro-batch {v} (by zero_grad, clipping, or a hook "
            "registered after run.prepare?), while it is only a partial sum: change it after the micro-batch loop",
            code="SS207",
        )
