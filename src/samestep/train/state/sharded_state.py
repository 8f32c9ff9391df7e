"""Models, averaged models and optimizers whose tensors are sharded among the ranks: `Run(shard="fsdp2")`.

torch's `fully_shard` (FSDP2) keeps 1/W of each parameter on each rank, and gathers a block of the model when it runs.
The optimizers then update shards. Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded data parallel".
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.utils._pytree import tree_map

from samestep.engine.sharded_unit import ShardedModels, ShardedUnit
from samestep.errors import InvalidValue
from samestep.snapshot.serialization import SavedState
from samestep.torch_internals import (
    find_first_row,
    gather_whole,
    get_local,
    is_sharded,
    shard_like,
)
from samestep.train.state.divided_state import DividedState
from samestep.train.state.objects import STATE, Objects, save_module
from samestep.train.state.sharded_init import ShardedInit
from samestep.world.group import Group
from samestep.world.host import find_block_size

# They compute each element of a parameter from the same elements of its gradient and state.
ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, ASGD)
Blocks = Sequence[type[nn.Module]]


def _take_rows(whole: Tensor, first: int, num_rows: int) -> Tensor:
    return whole[first : first + num_rows]


def shard_as(param: Any, value: Any, read_rows: Callable[[Tensor, int, int], Tensor] = _take_rows) -> Any:
    """Return a tensor with the shape of a sharded one with the same sharding; any other value as it is.

    Args:
        read_rows: returns some rows of it: value, first row, number of rows -> tensor.
    """
    if not is_sharded(param) or not isinstance(value, Tensor) or is_sharded(value) or value.shape != param.shape:
        return value
    own = read_rows(value, find_first_row(param), len(get_local(param)))
    return shard_like(param, own.to(param.device, copy=True))


class ShardedState(DividedState):
    """The prepared objects of a run whose models are sharded.

    Shards the models, and with them the state of their optimizers.

    Args:
        blocks: classes of modules that are gathered one at a time. None: see `find_blocks`.
        init: has built models, or children of them.

    Attributes:
        models: the models.

    Raises:
        InvalidValue: a model cannot be sharded.
    """

    def __init__(self, objects: Objects, blocks: Blocks | None, group: Group, init: ShardedInit) -> None:
        super().__init__(objects, group)
        whole = objects.name_params()
        self.models = _shard(objects.modules, blocks, group, init)
        named = objects.name_params()
        sharded = {id(param): named[name] for name, param in whole.items()}
        for optimizer in objects.optimizers.values():
            _replace_params(optimizer, sharded)
            optimizer.register_step_post_hook(lambda *_: self.models.free_gathered())

    def collect(self) -> Callable[[], dict[str, Any]]:
        """Gather the objects' states. On all ranks.

        Returns:
            A function that returns them. Ranks other than 0, which have one whole tensor at a time, get empty ones.
        """
        self._prepare()
        whole = tree_map(partial(_gather, is_kept=self._group.rank == 0), self._objects.save())
        return lambda: whole

    def check_optimizers(self) -> None:
        """Raise InvalidValue if an optimizer, with the settings that it has now, cannot be sharded."""
        for name, optimizer in self._objects.optimizers.items():
            if type(optimizer) not in ELEMENTWISE:
                raise InvalidValue(
                    f'{name} is {type(optimizer).__name__}, which may need whole tensors, and shard="fsdp2" gives it '
                    'shards: use an optimizer of torch.optim that works element by element, or shard="optimizer"',
                    code="SS606",
                )
            if any(group.get("fused") for group in optimizer.param_groups):
                raise InvalidValue(
                    f"{name} has fused=True, whose bits depend on the bounds of the shards: leave it out with "
                    'shard="fsdp2"; a run that began with it continues with shard="optimizer"',
                    code="SS606",
                )

    def outline(self) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the objects' states, with sharded tensors. On all ranks.

        Raises:
            InvalidValue: an optimizer was not called alike on all ranks.
        """
        self._prepare()
        return self._objects.save

    def _prepare(self) -> None:
        """Check that the ranks' states belong together, and leave each rank its own shards only."""
        self._check_alike()
        self.models.free_gathered()  # of a forward pass between two steps

    def is_mine(self, tensor: Tensor) -> bool:
        """Return whether this rank stores a tensor, or its rows of it."""
        return is_sharded(tensor) or self._group.rank == 0

    def select(self, saved: SavedState) -> dict[str, Any]:
        """Return the objects' states in a snapshot, with this rank's shards."""
        objects = dict(saved.contents["objects"])
        for name, module in self._objects.modules.items():
            now = save_module(module)
            objects[name] = copy(objects[name])  # with the versions of the modules
            for key, value in objects[name].items():
                objects[name][key] = shard_as(now.get(key), value, saved.read_rows)
        for name in self._objects.optimizers:
            params = self._objects.name_updated(name)
            state = {
                path: {key: shard_as(params.get(path), value, saved.read_rows) for key, value in of_one.items()}
                for path, of_one in objects[name][STATE].items()
            }
            objects[name] = {**objects[name], STATE: state}
        return objects


def find_blocks(module: nn.Module, blocks: Blocks | None) -> list[nn.Module]:
    """Return the modules to gather one at a time, inner ones first, without the model itself.

    Args:
        blocks: classes of modules. None: the modules in each `nn.ModuleList` that have a forward.
    """
    children = [child for child in module.modules() if child is not module][::-1]
    if blocks is None:
        listed = {each for child in module.modules() if isinstance(child, nn.ModuleList) for each in child}
        return [child for child in children if child in listed and _has_forward(child)]
    return [child for child in children if isinstance(child, tuple(blocks))]


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _check_models(modules: Mapping[str, nn.Module], blocks: Blocks) -> None:
    """Raise InvalidValue if a model cannot be sharded, or no module is of a block's class."""
    seen: set[nn.Parameter] = set()
    for name, module in modules.items():
        own = {*module.parameters()}
        dtypes = {str(param.dtype) for param in own if param.requires_grad}
        problems = {
            "has no forward": not _has_forward(module),
            "shares parameters with another model": bool(seen & own),
            f"trains parameters of {' and '.join(sorted(dtypes))}": len(dtypes) > 1,
        }
        if problem := next((each for each, is_there in problems.items() if is_there), ""):
            raise InvalidValue(
                f'{name} {problem}, and shard="fsdp2" needs models with forward and one dtype, which share nothing: '
                'change it, or use shard="optimizer"',
                code="SS607",
            )
        seen |= own
    children = [child for module in modules.values() for child in module.modules()]
    for block in blocks:
        if not any(isinstance(child, block) for child in children):
            kinds = ", ".join(dict.fromkeys(type(child).__name__ for child in children))
            raise InvalidValue(
                f"shard_blocks holds {block.__name__}, but the models consist of {kinds}: name some of these",
                code="SS101",
            )


def _shard(modules: Mapping[str, nn.Module], blocks: Blocks | None, group: Group, init: ShardedInit) -> ShardedModels:
    """Shard models: their parameters are replaced."""
    from torch.distributed.device_mesh import DeviceMesh

    _check_models(modules, blocks or ())
    mesh = DeviceMesh(group.device.type, range(group.world_size))
    units: list[ShardedUnit] = []
    for name, module in modules.items():
        paths = {child: f"{name}.{path}" if path else name for path, child in module.named_modules()}
        for child in [*find_blocks(module, blocks), module]:
            filled = init.fill(child)
            try:
                units.append(ShardedUnit(paths[child], child, mesh))
            except (ValueError, RuntimeError) as error:  # RuntimeError: also NotImplementedError
                raise InvalidValue(
                    f"{paths[child]} cannot be sharded ({' '.join(str(error).split())}): change the model, or use "
                    'shard="optimizer"',
                    code="SS607",
                ) from None
            for param in filled:  # free the whole one, which the optimizers refer to
                param.data = param.data.new_empty(0)
    stream = torch.cuda.Stream(group.device) if group.device.type == "cuda" else None
    return ShardedModels(units, mesh.get_group(), find_block_size(group.gather_hosts()), stream)


def _replace_params(optimizer: Optimizer, sharded: Mapping[int, nn.Parameter]) -> None:
    """Let an optimizer update sharded parameters, with the state that it has for the whole ones."""
    for param_group in optimizer.param_groups:
        param_group["params"] = [sharded[id(param)] for param in param_group["params"]]
    states = [*optimizer.state.items()]
    optimizer.state.clear()
    for param, state in states:
        new = sharded[id(param)]
        optimizer.state[new] = {key: shard_as(new, value) for key, value in state.items()}


def _gather(value: Any, *, is_kept: bool) -> Any:
    """Return a sharded tensor as a whole, in host memory, or else empty; any other value as it is."""
    if not is_sharded(value):
        return value
    whole = gather_whole(value)
    return whole.cpu() if is_kept else whole.new_empty(0)
