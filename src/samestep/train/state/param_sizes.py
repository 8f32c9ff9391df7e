"""Measures the sizes of a run's parameters and of their optimizers' state, for `plan/memory.py`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.plan.memory import OUTSIDE, ParamSize
from samestep.train.state.sharded_state import Blocks, find_blocks
from samestep.train.state.stateful import Objects, list_params, name_optimizers


def measure_sizes(objects: Objects, modules: Mapping[str, nn.Module], blocks: Blocks | None) -> list[ParamSize]:
    """Return the sizes of the models' parameters, undivided.

    An optimizer that has not allocated its state yet is tried on a small parameter.

    Args:
        blocks: as `shard_blocks` of `Run.prepare`.
    """
    states = {
        id(param): _measure_state(param, optimizer)
        for optimizer in name_optimizers(objects).values()
        for param in list_params(optimizer)
    }
    homes: dict[int, int] = {}
    params: dict[int, nn.Parameter] = {}
    num_blocks = OUTSIDE
    for module in modules.values():
        for block in find_blocks(module, blocks):
            num_blocks += 1
            for param in block.parameters():
                homes.setdefault(id(param), num_blocks)
        params |= {id(param): param for param in module.parameters()}
    return [
        ParamSize(
            num_bytes=_count_bytes(param),
            num_rows=param.shape[0] if param.dim() else 1,
            gradient_bytes=_count_bytes(param) if param.requires_grad else 0,
            state_bytes=states.get(key, (0, 0))[0],
            small_bytes=states.get(key, (0, 0))[1],
            block=homes.get(key, OUTSIDE),
        )
        for key, param in params.items()
    ]


def _measure_state(param: Tensor, optimizer: Optimizer) -> tuple[int, int]:
    """Return the bytes of the tensors of the parameter's shape in its state, and of other tensors."""
    if not param.requires_grad:
        return 0, 0
    found = _list_tensors(optimizer.state.get(param, {}))
    if found:
        of_shape = sum(_count_bytes(each) for each in found if each.shape == param.shape)
        return of_shape, sum(_count_bytes(each) for each in found) - of_shape
    share, small = _try_optimizer(optimizer, param.dtype)
    return int(share * _count_bytes(param)), small


def _try_optimizer(optimizer: Optimizer, dtype: torch.dtype) -> tuple[float, int]:
    """Return the bytes of state per byte of a parameter, and those that do not depend on its size, by a small one."""
    small = nn.Parameter(torch.zeros(2, 3, dtype=dtype))
    small.grad = torch.zeros_like(small)
    kind: Any = type(optimizer)
    try:
        trial = kind([small], **optimizer.defaults)
        trial.step()
    except Exception:  # a class of the script, with other arguments
        return 0.0, 0
    found = _list_tensors(trial.state.get(small, {}))
    of_shape = sum(_count_bytes(each) for each in found if each.shape == small.shape)
    return of_shape / _count_bytes(small), sum(_count_bytes(each) for each in found) - of_shape


def _list_tensors(state: Any) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)] if isinstance(state, Mapping) else []


def _count_bytes(tensor: Tensor) -> int:
    """Return the bytes of the whole tensor, also of one that is sharded."""
    return tensor.numel() * tensor.element_size()
