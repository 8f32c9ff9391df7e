"""Measures the sizes of a run's parameters and of their optimizers' state, for `plan/memory.py`."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.plan.memory import OUTSIDE, ParamSize
from samestep.train.state.names import list_params
from samestep.train.state.sharded_state import Blocks, find_blocks
from samestep.train.state.stateful import Objects, name_optimizers


def measure_sizes(objects: Objects, modules: Mapping[str, nn.Module], blocks: Blocks | None) -> list[ParamSize]:
    """Return the sizes of the models' parameters, undivided.

    Call it after an update, which allocates the optimizers' state.

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
    state = optimizer.state.get(param, {})
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    of_shape = sum(_count_bytes(each) for each in tensors if each.shape == param.shape)
    return of_shape, sum(map(_count_bytes, tensors)) - of_shape


def _count_bytes(tensor: Tensor) -> int:
    """Return the bytes of the whole tensor, also of one that is sharded."""
    return tensor.numel() * tensor.element_size()
