"""Measures the sizes of a run's parameters and of their optimizers' state, for `plan/memory.py`."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.plan.memory import OUTSIDE, ParamSize
from samestep.train.state.names import list_params
from samestep.train.state.sharded_state import Blocks, find_blocks
from samestep.train.state.stateful import Objects, name_optimizers


def measure_sizes(objects: Objects, modules: Mapping[str, nn.Module], blocks: Blocks | None) -> list[ParamSize]:
    """Return the sizes of the models' parameters, undivided.

    An optimizer may not have allocated its state, or only a part of it. So each is also tried on a small parameter.

    Args:
        blocks: as `shard_blocks` of `Run.prepare`.
    """
    states = {
        id(param): _measure_state(param, optimizer, trial)
        for optimizer in name_optimizers(objects).values()
        for trial in [_try_optimizer(optimizer)]
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


def _measure_state(param: Tensor, optimizer: Optimizer, trial: tuple[float, int]) -> tuple[int, int]:
    """Return the bytes of the tensors of the parameter's shape in its state, and of other tensors."""
    if not param.requires_grad:
        return 0, 0
    found = _list_tensors(optimizer.state.get(param, {}))
    of_shape = sum(_count_bytes(each) for each in found if each.shape == param.shape)
    small = sum(_count_bytes(each) for each in found) - of_shape
    return max(of_shape, int(trial[0] * _count_bytes(param))), max(small, trial[1])


def _try_optimizer(optimizer: Optimizer) -> tuple[float, int]:
    """Return the bytes of state per byte of a parameter, and those that do not depend on its size, by a small one."""
    small = nn.Parameter(torch.zeros(2, 3))
    small.grad = torch.zeros_like(small)
    kind: Any = type(optimizer)
    try:
        names = inspect.signature(kind).parameters  # defaults hold more, such as decoupled_weight_decay of AdamW
        trial = kind([small], **{name: value for name, value in optimizer.defaults.items() if name in names})
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
