"""Checks of the objects that `run.prepare` got, and their descriptions."""

import gc
import json
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from samestep.engine.buffers import check_module, spread_buffers
from samestep.errors import InvalidType, InvalidValue, UsageError
from samestep.hashing import hash_bytes
from samestep.torch_internals import get_local
from samestep.train.state.objects import (
    Objects,
    list_named,
    list_params,
    name_optimizers,
    save,
    strip_compiled,
    unwrap,
)

HOOKS = "_optimizer_state_dict_pre_hooks"  # the attribute of an optimizer with the hooks of its state_dict
OldParams = dict[int, ref[nn.Parameter]]


def find_params() -> OldParams:
    """Return the parameters, by id, that exist when the run is created."""
    return {id(thing): ref(thing) for thing in gc.get_objects() if type(thing) is nn.Parameter}


def check_objects(objects: Objects, old_params: OldParams) -> dict[str, nn.Module]:
    """Check the objects. Return the modules among them, without wrappers of torch.compile.

    Raises:
        Error: see `Run.prepare`.
    """
    modules: dict[str, nn.Module] = {}
    for name, thing in objects.items():
        if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
            raise InvalidType(
                f"run.prepare got {name}, a {type(thing).__name__} without state_dict and load_state_dict", code="SS601"
            )
        if isinstance(thing, DistributedDataParallel | DataParallel):
            raise InvalidType(
                f"{name} is wrapped in {type(thing).__name__}: pass the bare model, samestep reduces gradients",
                code="SS601",
            )
        if isinstance(thing, GradScaler):
            raise InvalidType(
                f"{name} is a GradScaler: leave it out, samestep.Run(precision='fp16') scales the loss itself",
                code="SS601",
            )
        if isinstance(thing, torch.optim.SparseAdam):
            raise InvalidValue(
                f"{name} is SparseAdam, and samestep makes sparse gradients dense: use Adam or AdamW", code="SS601"
            )
        if not isinstance(thing, nn.Module):
            continue
        check_module(name, thing)
        for path, tensor in [*thing.named_parameters(), *thing.named_buffers()]:
            if is_lazy(tensor):
                raise UsageError(
                    f"{name}.{path} has no shape yet: run a batch through the model before run.prepare", code="SS601"
                )
        spread_buffers(thing)
        if any(id(param) in old_params and old_params[id(param)]() is param for param in thing.parameters()):
            raise UsageError(
                f"{name} was built before samestep.Run(...), so its initial weights do not follow from the run's seed: "
                "build it after the Run",
                code="SS602",
            )
        modules[name] = unwrap(thing)
    known = {id(param) for module in modules.values() for param in module.parameters()}
    for name, optimizer in name_optimizers(objects).items():
        if any(id(param) not in known for param in list_params(optimizer)):
            raise InvalidValue(
                f"{name} holds parameters of a model that was not passed: pass it too, run.prepare(model=...); put a "
                "parameter of no model into one, such as nn.ParameterList([parameter])",
                code="SS603",
            )
    return modules


def find_held_optimizers(objects: Objects) -> list[Optimizer]:
    """Return the optimizers that are no objects themselves, but that one asks for their state, such as a wrapper."""
    own = {id(thing) for thing in objects.values()}
    # A class that does not call torch's __init__ has no hooks.
    others = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), Optimizer) and id(each) not in own and HOOKS in vars(each)
    ]
    held: list[Optimizer] = []
    with ExitStack() as stack:
        for each in others:
            stack.callback(each.register_state_dict_pre_hook(held.append).remove)
        if others:
            save(objects)
    return held


def refuse_overlaps(modules: Mapping[str, nn.Module]) -> None:
    """Raise InvalidValue if two parameters share memory, so that the ranks cannot update them apart."""
    params = [(param, f"{name}.{path}") for name, module in modules.items() for path, param in list_named(module)]
    ranges = []
    for param, name in {id(param): (param, name) for param, name in reversed(params)}.values():
        local = get_local(param)
        if local.numel() and not local.is_meta:
            last = sum((length - 1) * stride for length, stride in zip(local.shape, local.stride(), strict=True))
            ranges.append((local.data_ptr(), local.data_ptr() + (last + 1) * local.element_size(), name, local.device))
    ranges.sort(key=lambda each: (str(each[3]), *each[:2]))
    for (_, end, first, device), (start, _, second, other) in pairwise(ranges):
        if start < end and device == other:
            one, two = sorted([first, second])
            raise InvalidValue(
                f"{two} shares memory with {one}, and is another parameter, so with shard= two ranks would update the "
                "memory: make them one parameter, as in b.weight = a.weight, or leave out shard",
                code="SS607",
            )


def describe_models(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return each model's number of parameters, with a hash of their names, shapes and dtypes."""
    described = {}
    for name, module in modules.items():
        params = [(path, list(param.shape), str(param.dtype)) for path, param in list_named(module)]
        num_values = sum(param.numel() for param in module.parameters())
        mark = hash_bytes(json.dumps(params).encode())[:12]
        described[name] = f"{len(params)} parameters, {num_values} values, {mark}"
    return described


def outline(objects: Objects, modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return what must be the same on all ranks before they exchange tensors."""
    buffers = {
        f"the buffers of {name}": [
            (strip_compiled(path), tuple(buffer.shape)) for path, buffer in module.named_buffers()
        ]
        for name, module in modules.items()
    }
    kinds = ", ".join(f"{name} ({type(thing).__name__})" for name, thing in objects.items())
    return {"what run.prepare got": kinds, **describe_models(modules), **buffers}
