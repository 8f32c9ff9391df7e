"""A model that is cut into stages: which module is in which stage, and what a rank has of them."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import InvalidValue
from samestep.torch_internals import get_buffers


class StagedModel:
    """A model that is cut before some of its modules, each of which begins the next stage.

    Modules belong to stages in the order in which the model has registered them. `Pipeline` checks that its forward
    calls them so.

    Args:
        name: its name in `run.prepare`.
        cuts: paths of modules.
        within: the path of the model in what `run.prepare` got, such as an `AveragedModel`.

    Attributes:
        cuts: the modules at which it is cut, by path.
        stages: the stage of each module.
        tied: the parameters of several stages: stage -> the modules there, with the parameter's name.
        paths: the path of each module, for messages.

    Raises:
        InvalidValue: a module is not there, in another order, or shares a buffer with another stage.
    """

    def __init__(self, name: str, model: nn.Module, cuts: Sequence[str], num_stages: int, within: str = "") -> None:
        self.name = name
        self.model = model
        self.num_stages = num_stages
        named = dict(model.named_modules())
        if len(cuts) != num_stages - 1:
            raise InvalidValue(
                f"the run has pipeline={num_stages}, and run.prepare got {len(cuts)} names in stages: name the "
                f"{num_stages - 1} modules of {name} that begin the next stage",
                code="SS613",
            )
        if unknown := next((path for path in cuts if not path or path not in named), None):
            raise InvalidValue(
                f"stages of run.prepare names {unknown!r}, which is no module of {name}: choose from "
                "dict(model.named_modules())",
                code="SS613",
            )
        self.cuts = {path: named[path] for path in cuts}
        self.stages: dict[nn.Module, int] = {}
        self.paths = {module: ".".join(filter(None, (name, within, path))) for path, module in named.items()}
        number = 0
        for path, module in named.items():
            if path in cuts[number : number + 1]:
                number += 1
            self.stages[module] = number
        if number < len(cuts):
            raise InvalidValue(
                f"stages of run.prepare names {cuts[number]!r} after a module that follows it in {name}: give them in "
                "the order in which the model has registered them, which must be that of its forward",
                code="SS613",
            )
        self.tied = self._find_tied()

    def __deepcopy__(self, memo: Any) -> "StagedModel":
        return self  # a copy of the model has its hooks

    def _find_tied(self) -> dict[nn.Parameter, dict[int, list[tuple[nn.Module, str]]]]:
        found: dict[Any, dict[int, list[tuple[nn.Module, str]]]] = {}
        for module, stage in self.stages.items():
            for key, tensor in list_tensors(module):
                found.setdefault(tensor, {}).setdefault(stage, []).append((module, key))
        tied = {tensor: uses for tensor, uses in found.items() if len(uses) > 1}
        for tensor, uses in tied.items():
            if not isinstance(tensor, nn.Parameter):
                first, last = (f"{self.paths[module]}.{key}" for (module, key), *_ in [*uses.values()][:2])
                raise InvalidValue(
                    f"{first} and {last} are one buffer, and in two stages of the pipeline: give each stage a buffer "
                    "of its own, or cut the model so that both are in one stage",
                    code="SS613",
                )
        return tied

    def list_foreign(self, held: range) -> list[nn.Module]:
        """Return the modules that are in none of these stages."""
        return [module for module, stage in self.stages.items() if stage not in held]

    def list_params(self, stages: range) -> list[nn.Parameter]:
        """Return the parameters of some stages, without tied ones."""
        return [
            param
            for module, stage in self.stages.items()
            if stage in stages
            for param in module.parameters(recurse=False)
            if param not in self.tied
        ]

    def map_tensors(self) -> dict[Tensor, int]:
        """Return the stage of each parameter and buffer that is in one stage only."""
        return {
            tensor: stage
            for module, stage in self.stages.items()
            for _, tensor in list_tensors(module)
            if tensor not in self.tied
        }

    @contextmanager
    def keep_buffers(self) -> Iterator[None]:
        """At the end of the block, give all buffers the values that they have now."""
        kept = [
            (buffers, name, buffer, buffer.clone())
            for buffers in map(get_buffers, self.stages)
            for name, buffer in buffers.items()
            if buffer is not None
        ]
        yield
        for buffers, name, buffer, values in kept:
            buffers[name] = buffer
            buffer.data.copy_(values)

    def list_shared(self) -> list[list[str]]:
        """Return the names of each parameter and buffer that has several names in the model."""
        names: dict[Tensor, list[str]] = {}
        start = len(f"{self.name}.")
        for module in self.stages:
            for key, tensor in list_tensors(module):
                names.setdefault(tensor, []).append(f"{self.paths[module]}.{key}"[start:])
        return [each for each in names.values() if len(each) > 1]

    def list_kept(self, held: range) -> set[nn.Parameter]:
        """Return the tied parameters that one of these stages uses."""
        return {param for param, uses in self.tied.items() if any(stage in held for stage in uses)}


def list_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the module's own parameters and buffers by name."""
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def give_up(module: nn.Module, kept: Collection[nn.Parameter]) -> None:
    """Free the memory of a module's own parameters, except for some, and buffers, which other ranks have."""
    for param in module.parameters(recurse=False):
        if not param.is_meta and param.numel() and param not in kept:
            outline = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
            torch.utils.swap_tensors(param, outline)  # optimizers refer to `param`
    buffers = get_buffers(module)
    for name, buffer in buffers.items():
        buffers[name] = buffer.to("meta") if buffer is not None and buffer.numel() else buffer


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module's own parameters and buffers to a device, unless another rank has them."""
    for param in module.parameters(recurse=False):
        if not param.is_meta:
            param.data = param.data.to(device)
    buffers = get_buffers(module)
    for name, buffer in buffers.items():
        buffers[name] = buffer if buffer is None or buffer.is_meta else buffer.to(device)
