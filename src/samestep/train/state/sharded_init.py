"""Builds models whose parameters are never whole on a rank: `Run.sharded_init`.

Inside the block, parameters are created without memory, on torch's meta device. `Run.prepare` gives them memory, block
by block, and calls `reset_parameters` of each module with a generator that is seeded by the run's seed and the module's
number. So the initial values depend neither on the number of ranks nor on `shard`.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from samestep.errors import InvalidValue, UsageError
from samestep.plan.seeds import derive
from samestep.torch_internals import get_buffers, read_version, swap_param

_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_ORIGIN = "_samestep_origin"  # the attribute of a module with its `_Origin`, which a copy of the module has, too


@dataclass
class _Origin:
    """Where the initial values of a module's parameters come from.

    Attributes:
        number: the number of the module, in the order of construction.
        created: names of the parameters that the module has created. It may hold those of other modules, too.
        rows: name -> this rank's rows of loaded weights, and the number of the first one.
        is_copy: whether the module is a copy of another one.
    """

    number: int
    created: set[str] = field(default_factory=set)
    rows: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    is_copy: bool = False

    def __deepcopy__(self, memo: Mapping[int, Any]) -> "_Origin":
        return _Origin(self.number, {*self.created}, {**self.rows}, is_copy=True)


class ShardedInit:
    """Creates parameters without memory, and initializes them later. See the module.

    Args:
        seed: seed of the run.
        rank, world_size: which rows of loaded weights this rank keeps; (0, 1) for all of them.
    """

    def __init__(self, seed: int, rank: int, world_size: int) -> None:
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._num_modules = 0

    @contextmanager
    def building(self) -> Iterator[None]:
        """Create the parameters inside the block without memory."""
        handle = register_module_parameter_registration_hook(self._take)  # type: ignore[arg-type]
        try:
            with _SkippedWrites():
                yield
        finally:
            handle.remove()

    def _take(self, module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        origin = vars(module).get(_ORIGIN)
        if is_partial(param):  # that of another module, such as a tied weight
            if origin is not None:
                origin.created.discard(name)
            return None
        if type(param) is not nn.Parameter or param.layout is not torch.strided:
            return None
        if origin is None:
            self._num_modules += 1
            origin = vars(module)[_ORIGIN] = _Origin(self._num_modules)
        origin.created.add(name)
        return nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)

    def load(self, model: nn.Module, read: Mapping[int, Callable[[int, int], Tensor]]) -> None:
        """Replace the initial values of parameters without memory.

        Args:
            read: id of a parameter -> function that returns its elements between two numbers, in row-major order.
        """
        for part in model.modules():
            for name, param in part.named_parameters(recurse=False):
                origin = vars(part).get(_ORIGIN)
                if origin is not None and name in origin.created and id(param) in read:
                    num_rows = len(param) if param.dim() else 1
                    height = ceil(num_rows / self._world_size)
                    first, last = (min(height * rank, num_rows) for rank in (self._rank, self._rank + 1))
                    width = prod(param.shape[1:])
                    values = read[id(param)](first * width, last * width).clone()
                    origin.rows[name] = first, values.view(last - first, *param.shape[1:])

    def fill(self, module: nn.Module) -> list[nn.Parameter]:
        """Give memory on the host, and initial values, to all parameters of a module that have no memory.

        Returns:
            These parameters. They are the same objects as before. Of loaded weights, only this rank's rows are set.

        Raises:
            UsageError: initial values do not come from `reset_parameters`.
        """
        built = [part for part in _list_inner_first(module) if _ORIGIN in vars(part)]
        created = [_Created(part, name, param) for part in built for name, param in _list_created(part)]
        with _SkippedWrites():
            for part in built:
                _reset(part)
        for each in created:
            each.check()
        with torch.random.fork_rng(devices=()):
            for part in built:
                for _, param in _list_created(part):
                    swap_param(part, param, nn.Parameter(torch.empty_like(param, device="cpu"), param.requires_grad))
                torch.default_generator.manual_seed(derive(self._seed, "init", step=vars(part)[_ORIGIN].number))
                _reset(part)
        for each in created:
            each.set_rows()
        for part in built:
            del vars(part)[_ORIGIN]
        for name, param in module.named_parameters():
            if is_partial(param):
                raise UsageError(
                    f"{name} is on the meta device and was not built in run.sharded_init: build it there, or on a "
                    "device with memory",
                    code="SS611",
                )
        return [each.param for each in created]


class _SkippedWrites(TorchFunctionMode):
    """Lets a write that `torch.nn.init` skips, because a tensor has no memory, count as one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == _IS_META and result and sys._getframe(1).f_globals["__name__"] == "torch.nn.init":
            increment_version(args[0])
        return result


class _Created:
    """A parameter that has no memory yet, and is about to get it.

    Args:
        part: the module that has created it.
        name: its name there.
    """

    def __init__(self, part: nn.Module, name: str, param: nn.Parameter) -> None:
        self.param = param
        self._part = part
        self._name = name
        self._num_writes = read_version(param)

    def check(self) -> None:
        """Raise UsageError if not only `reset_parameters` has written to it. Call it after another `reset_parameters`.

        The constructor of the module has called it, too. It was not called for a copy of a module.
        """
        origin = vars(self._part)[_ORIGIN]
        num_now = read_version(self.param) - self._num_writes
        if self._num_writes != (0 if origin.is_copy else num_now) and self._name not in origin.rows:
            raise UsageError(
                f"{type(self._part).__name__}.{self._name} was set inside run.sharded_init by other code than "
                "reset_parameters of its module (such as model.apply), which has no effect there: write a class with "
                "this reset_parameters, or build the model outside of the block",
                code="SS611",
            )

    def set_rows(self) -> None:
        """Set the rows of loaded weights, if there are any."""
        if loaded := vars(self._part)[_ORIGIN].rows.get(self._name):
            first, rows = loaded
            whole = self.param.detach()
            own = whole[first : first + len(rows)] if whole.dim() else whole
            own.copy_(rows.view_as(own))


def _list_created(part: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that a module has created and that have no memory, with their names."""
    created = vars(part)[_ORIGIN].created
    own = part.named_parameters(recurse=False)
    return [(name, param) for name, param in own if name in created]


def _reset(part: nn.Module) -> None:
    """Set the parameters that a module has created to initial values, and leave those of other modules alone.

    Raises:
        UsageError: the module has no `reset_parameters`.
    """
    own = dict(_list_created(part))
    if not own or own.keys() <= vars(part)[_ORIGIN].rows.keys():
        return
    reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
    if reset is None:
        raise UsageError(
            f"{type(part).__name__} has the parameter {min(own)} and no method reset_parameters, which "
            "run.sharded_init needs to initialize it: add one that sets the module's own parameters",
            code="SS611",
        )
    others = {name: param for name, param in part.named_parameters(recurse=False) if name not in own}
    for name, param in others.items():
        setattr(part, name, nn.Parameter(torch.empty(param.shape, dtype=param.dtype), param.requires_grad))
    reset()
    for name, param in others.items():
        setattr(part, name, param)


def is_partial(thing: Any) -> bool:
    """Return whether a parameter, or one of a model, has no memory yet."""
    if isinstance(thing, nn.Module):
        return any(param.is_meta for param in thing.parameters())
    return isinstance(thing, Tensor) and thing.is_meta


def check_states(objects: Mapping[str, Any]) -> None:
    """Refuse optimizers whose state was built from parameters without memory. Raises InvalidValue."""
    for name, thing in objects.items():
        states = thing.state.values() if isinstance(thing, Optimizer) else ()
        if any(is_partial(value) for state in states for value in state.values()):
            raise InvalidValue(
                f"{name} is {type(thing).__name__}, which builds its state from the parameters, and those of "
                "run.sharded_init have no memory yet: use another optimizer, or build the model outside of the block",
                code="SS606",
            )


def move(module: nn.Module, device: torch.device) -> None:
    """Move a model to a device, without parameters that have no memory yet."""
    if not is_partial(module):
        module.to(device)
        return
    for part in module.modules():
        for param in part.parameters(recurse=False):
            if not is_partial(param):
                param.data = param.data.to(device)
        buffers = get_buffers(part)
        buffers |= {name: each.to(device) for name, each in buffers.items() if each is not None}


def _list_inner_first(module: nn.Module) -> list[nn.Module]:
    """Return the modules, each after those inside it."""
    return [*dict.fromkeys([each for child in module.children() for each in _list_inner_first(child)]), module]
