"""Mixed precision: the context of `run.autocast()`, and the loss scale for float16."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from samestep.torch_internals import get_total_norm
from samestep.world.group import Group

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GROWTH_STEPS = 2000  # without an overflow, after which the loss scale is doubled


class MixedPrecision:
    """float32 with or without TF32, autocast to bfloat16, or to float16 with a dynamic loss scale.

    The scale (Micikevicius et al. 2018, "Mixed precision training") is a power of two, so it changes no bit of a
    gradient that does not overflow. The reduced gradient decides whether there was an overflow, so all ranks agree.
    Such a step makes no update, and the scale is halved.

    Args:
        name: "fp32", "tf32", "bf16" or "fp16".
        device: for autocast.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._dtype = AUTOCAST_DTYPES.get(name)
        self._device_type = device.type
        self._is_scaled = self._dtype is torch.float16
        self.scale = 2.0**16 if self._is_scaled else 1.0
        self._good_steps = 0

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device_type, dtype=self._dtype)

    def accepts(self, gradients: Sequence[Tensor | None], group: Group | None = None) -> bool:
        """Return whether an update may use the reduced gradients.

        Args:
            gradients: those that this rank has, and None for other parameters.
            group: the ranks, if the gradients are divided among them.
        """
        if not self._is_scaled:
            return True
        # The largest absolute value, because a sum of squares may overflow. One read-back for all gradients.
        largest = get_total_norm([each for each in gradients if each is not None and each.numel()], math.inf)
        good = bool(largest.isfinite())
        if group is not None:
            good = all(group.gather_number(good))
        self._good_steps = self._good_steps + 1 if good else 0
        if not good:
            self.scale /= 2
        elif self._good_steps == GROWTH_STEPS:
            self.scale *= 2
            self._good_steps = 0
        return good

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a snapshot."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`, unless it is of a run in fp16 that this one continues without it."""
        if self._is_scaled:
            self.scale = state["scale"]
            self._good_steps = state["good_steps"]
