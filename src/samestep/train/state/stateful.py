"""The objects passed to `run.prepare`: checks, descriptions and lists of their tensors."""

import gc
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from samestep.engine.buffers import check_module, spread_buffers
from samestep.errors import InvalidType, InvalidValue, UsageError
from samestep.hashing import hash_bytes
from samestep.torch_internals import get_local
from samestep.train.state.names import (
    Names,
    list_named,
    list_params,
    name_params,
    naming,
    save_module,
    save_optimizer,
    strip_compiled,
)

MAX_PARTS = 2_000  # most parts of prepared objects to look into
Objects = Mapping[str, Any]
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


def unwrap(thing: Any) -> Any:
    """Return the module inside a torch.compile wrapper; its keys have no prefix."""
    return getattr(thing, "_orig_mod", thing) if isinstance(thing, nn.Module) else thing


def name_optimizers(objects: Objects) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers among the objects, by name."""
    return {name: thing for name, thing in objects.items() if isinstance(thing, torch.optim.Optimizer)}


def find_parts(objects: Objects, *, in_schedules: bool) -> list[Any]:
    """Return what prepared objects hold in attributes, lists and dicts, such as the optimizers of a wrapper.

    Args:
        in_schedules: whether to look into learning rate schedulers, too. They save the schedulers that they hold, but
            not their optimizer.
    """
    things = [*objects.values()]
    seen = {id(thing) for thing in objects.values()}
    for thing in things:  # grows during the loop
        if isinstance(thing, nn.Module) or (isinstance(thing, LRScheduler) and not in_schedules):
            continue
        held = [*getattr(thing, "__dict__", {}).values()]
        if isinstance(thing, dict | list | tuple):
            held = [*(thing.values() if isinstance(thing, dict) else thing), *held]
        for part in held:
            is_looked_into = hasattr(part, "__dict__") or isinstance(part, dict | list | tuple)
            if is_looked_into and id(part) not in seen and not isinstance(part, torch.Tensor | type):
                seen.add(id(part))
                things.append(part)
        if len(things) > MAX_PARTS:
            break
    return things[len(objects) :]


def find_held_optimizers(objects: Objects) -> list[torch.optim.Optimizer]:
    """Return the optimizers that prepared objects hold, such as those of a wrapper."""
    return [part for part in find_parts(objects, in_schedules=False) if isinstance(part, torch.optim.Optimizer)]


def refuse_held(objects: Objects, held: Iterable[torch.optim.Optimizer], what: str) -> None:
    """Raise InvalidValue if one of the optimizers is not itself an object. `what`: the beginning of the message."""
    if any(each not in objects.values() for each in held):
        raise InvalidValue(
            f"{what} an optimizer inside another object of run.prepare: pass the optimizer itself, or leave shard out",
            code="SS606",
        )


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


def find_saved(objects: Objects, parts: Iterable[Any]) -> set[int]:
    """Return the ids of those optimizers and schedulers whose state_dict is called to build the objects' states."""
    asked: set[int] = set()

    def watch(part: Any) -> Callable[[], Any]:
        build = part.state_dict

        def state_dict() -> Any:
            asked.add(id(part))
            return build()

        return state_dict

    with ExitStack() as stack:
        for part in parts:
            own = {name: value for name, value in vars(part).items() if name == "state_dict"}
            stack.callback(vars(part).update, own)
            part.state_dict = watch(part)
            stack.callback(vars(part).pop, "state_dict")
        states(objects)
    return asked


def learning_rates(objects: Objects) -> dict[str, float]:
    """Return the learning rate of each optimizer's first parameter group, by its name in a row of metrics."""
    groups = {name: optimizer.param_groups[0] for name, optimizer in name_optimizers(objects).items()}
    rates = {name: float(group["lr"]) for name, group in groups.items() if "lr" in group}
    return {"train/learning_rate" if len(rates) == 1 else f"train/learning_rate/{name}": rates[name] for name in rates}


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


def states(objects: Objects) -> dict[str, Any]:
    """Return every object's state_dict, with the names of parameters, see `names`."""
    names = name_params(objects)
    with naming(find_held_optimizers(objects), names):
        return {name: _save(thing, names) for name, thing in objects.items()}


def _save(thing: Any, names: Names) -> Any:
    if isinstance(thing, nn.Module):
        return save_module(thing)
    state = thing.state_dict()
    return save_optimizer(thing, state, names) if isinstance(thing, torch.optim.Optimizer) else state


def list_checked(objects: Objects) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that training must not make infinite or nan, with names for messages.

    These are parameters (of a sharded one, this rank's shard) and BatchNorm's statistics. Other buffers, such as masks,
    may be infinite. An optimizer's state may be, too, or hold memory that is never read; what it spoils shows in the
    parameters after the next update.
    """
    found: list[tuple[str, torch.Tensor]] = []
    for name, thing in objects.items():
        if isinstance(thing, nn.Module):
            found += [(f"{name}.{path}", get_local(param)) for path, param in list_named(thing)]
            found += [
                (f"{name}.{strip_compiled(path)}.{key}", buffer)
                for path, part in unwrap(thing).named_modules()
                if isinstance(part, _BatchNorm)
                for key, buffer in part.named_buffers(recurse=False)
            ]
    return found


def list_stable(objects: Objects) -> list[torch.Tensor]:
    """Return the tensors that change only in or after an update: parameters and the optimizers' state."""
    modules = [unwrap(thing) for thing in objects.values() if isinstance(thing, nn.Module)]
    tensors = [param for module in modules for param in module.parameters()]
    tensors += [value for optimizer in name_optimizers(objects).values() for value in _state_tensors(optimizer)]
    return [get_local(tensor) for tensor in tensors]


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
