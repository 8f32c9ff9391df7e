"""Builds models whose parameters are never whole on a rank: `Run.sharded_init`.

Inside the block, a module that creates a parameter gets it on torch's meta device, without memory. `Run.prepare` gives
memory to one block of the model after the other, and calls `reset_parameters` of each module with a generator that is
seeded by the run's seed and the module's number. So the initial values depend neither on the number of ranks nor on
`shard`.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from samestep.errors import UsageError
from samestep.plan.order import derive
from samestep.torch_internals import read_version

_ORIGIN = "_samestep_origin"  # the attribute of a module with its `_Origin`, of which a copy of the module has a copy


@dataclass
class _Origin:
    """Where the initial values of a module's parameters come from.

    Attributes:
        number: the number of the module, in the order of construction.
        created: names of the parameters that the module has created. It shares the others, such as tied weights.
    """

    number: int
    created: set[str] = field(default_factory=set)


class ShardedInit:
    """Creates parameters without memory, and initializes them later. See the module.

    Args:
        seed: seed of the run.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_modules = 0

    @contextmanager
    def building(self) -> Iterator[None]:
        """Create the parameters inside the block without memory."""
        with register_module_parameter_registration_hook(self._replace):  # type: ignore[arg-type]
            yield

    def _replace(self, module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        origin = vars(module).get(_ORIGIN)
        if param.is_meta:  # that of another module, such as a tied weight
            if origin is not None:
                origin.created.discard(name)
            return None
        if origin is None:
            self._num_modules += 1
            origin = vars(module)[_ORIGIN] = _Origin(self._num_modules)
        origin.created.add(name)
        return nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)

    def fill(self, module: nn.Module, skipped: Collection[nn.Module] = ()) -> list[nn.Parameter]:
        """Give memory on the host, and initial values, to all parameters of a module that have no memory.

        Args:
            skipped: modules inside of it that stay as they are.

        Returns:
            These parameters. They are the same objects as before.

        Raises:
            UsageError: a module cannot initialize its parameters, or other code has initialized them.
        """
        filled: list[nn.Parameter] = []
        own = [each for each in module.modules() if each not in skipped]
        num_writes = {param: read_version(param) for param in module.parameters() if param.is_meta}
        with torch.random.fork_rng(devices=()):
            for child in reversed(own):  # inner ones first
                origin = vars(child).pop(_ORIGIN, None)
                if origin is not None and origin.created:
                    filled += self._initialize(child, origin)
        left = {param for each in own for param in each.parameters(recurse=False)}
        for name, param in module.named_parameters():
            if param.is_meta and param in left:
                raise UsageError(
                    f"{name} is on the meta device, and no module has created it in run.sharded_init: build it there, "
                    "or on a device with memory",
                    code="SS611",
                )
            if num_writes.get(param, 0) > read_version(param):  # both count the calls of reset_parameters
                raise UsageError(
                    f"{name} was set in run.sharded_init by other code than reset_parameters of its module, where it "
                    "has no memory: set it in reset_parameters, or build the model outside of the block",
                    code="SS611",
                )
        return filled

    def _initialize(self, child: nn.Module, origin: _Origin) -> list[nn.Parameter]:
        """Give memory and initial values to the parameters that a module has created."""
        reset = getattr(child, "reset_parameters", None) or getattr(child, "_reset_parameters", None)
        if reset is None or isinstance(child, nn.RNNBase):
            raise UsageError(
                f"{type(child).__name__} has the parameter {min(origin.created)} and no reset_parameters that "
                "run.sharded_init can use: add this method to its class, or build the model outside of the block",
                code="SS611",
            )
        params = dict(child.named_parameters(recurse=False))
        own = [param for name, param in params.items() if name in origin.created]
        for param in own:
            whole = nn.Parameter(torch.empty_like(param, device="cpu"), param.requires_grad)
            torch.utils.swap_tensors(param, whole)  # optimizers refer to `param`
        shared = [param for name, param in params.items() if name not in origin.created and not param.is_meta]
        kept = [param.detach().clone() for param in shared]
        torch.default_generator.manual_seed(derive(self._seed, "init", step=origin.number))
        reset()
        with torch.no_grad():
            for param, values in zip(shared, kept, strict=True):
                param.copy_(values)
        return own


def is_partial(thing: Any) -> bool:
    """Return whether a parameter, or one of a model, has no memory yet."""
    if isinstance(thing, nn.Module):
        return any(param.is_meta for param in thing.parameters())
    return isinstance(thing, Tensor) and thing.is_meta
