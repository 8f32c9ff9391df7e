"""The initial gradient of a backward pass, and checks of its graph."""

from functools import lru_cache

import torch
from torch import Tensor


def build_seed(factor: float | Tensor, loss: Tensor) -> Tensor:
    """Return the initial gradient for a backward pass of `factor * loss`."""
    if isinstance(factor, Tensor):
        return factor.to(loss).view_as(loss)
    return _build_constant(factor, loss.dtype, loss.device, loss.shape)


@lru_cache(maxsize=32)
def _build_constant(value: float, dtype: torch.dtype, device: torch.device, shape: torch.Size) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)


def has_reentrant_checkpoint(loss: Tensor) -> bool:
    """Return whether the graph of `loss` contains a reentrant activation checkpoint."""
    stack, seen = [loss.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return True
        stack += [source for source, _ in node.next_functions]
    return False
