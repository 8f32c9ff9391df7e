"""Mixed precision: the context of `run.autocast()`, and the loss scale for float16."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from samestep.errors import InvalidValue
from samestep.torch_internals import get_total_norm

PRECISIONS = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """float32 with or without TF32, or autocast to bfloat16. `ScaledPrecision` handles float16.

    Args:
        name: "fp32", "tf32", "bf16" or "fp16".
        device: device type for autocast.
    """

    scale = 1.0

    def __init__(self, name: str, device: torch.device) -> None:
        self._dtype = PRECISIONS[name]
        self._device_type = device.type

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device_type, dtype=self._dtype)

    def accepts(self, gradients: Sequence[Tensor | None], agree: Callable[[bool], bool] = bool) -> bool:
        """Return whether an update may use the reduced gradients.

        Args:
            gradients: those that this rank has, and None for other parameters.
            agree: returns whether the gradients of all ranks are finite, from whether those of this rank are.
        """
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a snapshot."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""


class ScaledPrecision(Precision):
    """float16 with a dynamic loss scale (Micikevicius et al. 2018, "Mixed precision training").

    The scale is a power of two, so it changes no bit of a gradient that does not overflow. The reduced gradient
    decides whether there was an overflow, so all ranks agree. Such a step makes no update, and the scale is halved.
    """

    growth_steps = 2000

    def __init__(self, device: torch.device) -> None:
        super().__init__("fp16", device)
        self.scale = 2.0**16
        self._good_steps = 0

    def accepts(self, gradients: Sequence[Tensor | None], agree: Callable[[bool], bool] = bool) -> bool:
        # The largest absolute value, because a sum of squares may overflow. One read-back for all gradients.
        largest = get_total_norm([each for each in gradients if each is not None and each.numel()], math.inf)
        good = agree(bool(largest.isfinite()))
        if good:
            self._good_steps += 1
            if self._good_steps == self.growth_steps:
                self.scale = self.scale * 2.0
                self._good_steps = 0
        else:
            self.scale = self.scale / 2.0
            self._good_steps = 0
        return good

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]
        self._good_steps = state["good_steps"]


def build_precision(name: str, device: torch.device) -> Precision:
    """Return the precision `name`. Raises Error if it is unknown."""
    if name not in PRECISIONS:
        raise InvalidValue(f"precision must be fp32, tf32, bf16 or fp16, not {name!r}", code="SS101")
    return ScaledPrecision(device) if name == "fp16" else Precision(name, device)
