"""Checks of the objects that `run.prepare` got, and their descriptions."""

import gc
import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from weakref import ref

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from samestep.engine.buffers import check_module, spread_buffers
from samestep.errors import InvalidType, InvalidValue, UsageError
from samestep.hashing import hash_bytes
from samestep.snapshot.serialization import encode
from samestep.torch_internals import is_sharded
from samestep.train.state.objects import Objects, list_tensors, strip_compiled
from samestep.train.state.sharded_init import is_partial

HOOKS = "_optimizer_state_dict_pre_hooks"  # the attribute of an optimizer with the hooks of its state_dict
WRAPPED = "pass the bare model, samestep reduces gradients"
REFUSED = {
    DistributedDataParallel: WRAPPED,
    DataParallel: WRAPPED,
    GradScaler: "leave it out, samestep.Run(precision='fp16') scales the loss itself",
}
OldParams = dict[int, ref[nn.Parameter]]


def find_params() -> OldParams:
    """Return the parameters, by id, that exist when the run is created."""
    return {id(thing): ref(thing) for thing in gc.get_objects() if type(thing) is nn.Parameter}


def check_objects(objects: Objects, old_params: OldParams) -> None:
    """Check the objects. Raises Error, see `Run.prepare`."""
    for name, thing in objects.by_name.items():
        if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
            raise InvalidType(
                f"run.prepare got {name}, a {type(thing).__name__} without state_dict and load_state_dict", code="SS601"
            )
        for kind, advice in REFUSED.items():
            if isinstance(thing, kind):
                raise InvalidType(f"{name} is a {kind.__name__}: {advice}", code="SS601")
    for name, module in objects.modules.items():
        check_module(name, module)
        spread_buffers(module)
        if any(is_sharded(param) for param in module.parameters()):
            raise InvalidValue(
                f'{name} was given to fully_shard by the script: leave that to samestep.Run(shard="fsdp2") and '
                "run.prepare(shard_blocks=[...])",
                code="SS607",
            )
        if any(id(param) in old_params and old_params[id(param)]() is param for param in module.parameters()):
            raise UsageError(
                f"{name} was built before samestep.Run(...), so its initial weights do not follow from the run's seed: "
                "build it after the Run",
                code="SS602",
            )
    for name, optimizer in objects.optimizers.items():
        objects.name_updated(name)
        if any(map(is_partial, list_tensors([*optimizer.state.values()]))):
            raise InvalidValue(
                f"{name} is {type(optimizer).__name__}, which builds its state from the parameters, and those of "
                "run.sharded_init have no memory yet: use another optimizer, or build the model outside of the block",
                code="SS606",
            )


def check_states(objects: Objects, *, are_saved: bool) -> list[Optimizer]:
    """Return the optimizers that an object asks for its own state, such as a wrapper.

    Args:
        are_saved: whether the run saves the states. Then one that a snapshot cannot hold is an InvalidType now, not
            after the first epoch.
    """
    own = {*map(id, objects.optimizers.values())}
    inner: list[Optimizer] = []
    with ExitStack() as stack:
        for each in gc.get_objects():
            # A class that does not call torch's __init__ has no hooks.
            if issubclass(type(each), Optimizer) and id(each) not in own and HOOKS in vars(each):
                stack.callback(each.register_state_dict_pre_hook(inner.append).remove)
        states = objects.save()
    if are_saved:
        encode({name: state for name, state in states.items() if not is_partial(objects.by_name[name])})
    return inner


def refuse_shared_memory(objects: Objects) -> None:
    """Raise InvalidValue if two parameters share memory, so that the ranks cannot update them apart."""
    names: dict[tuple[str, int], str] = {}
    for name, param in objects.name_params().items():
        first = names.setdefault((str(param.device), param.data_ptr()), name)
        if first != name and param.numel() and not param.is_meta:
            raise InvalidValue(
                f"{name} shares memory with {first}, and is another parameter, so with shard= two ranks would update "
                "the memory: make them one parameter, as in b.weight = a.weight, or leave out shard",
                code="SS607",
            )


def describe_models(objects: Objects) -> dict[str, str]:
    """Return each model's number of parameters, with a hash of their names, shapes and dtypes."""
    described = {}
    for name, module in objects.modules.items():
        params = [
            (strip_compiled(path), list(param.shape), str(param.dtype)) for path, param in module.named_parameters()
        ]
        num_values = sum(param.numel() for param in module.parameters())
        mark = hash_bytes(json.dumps(params).encode())[:12]
        described[name] = f"{len(params)} parameters, {num_values} values, {mark}"
    return described


def outline(objects: Objects, models: Mapping[str, str]) -> dict[str, Any]:
    """Return what must be the same on all ranks before they exchange tensors. `models`: see `describe_models`."""
    kinds = ", ".join(f"{name} ({type(thing).__name__})" for name, thing in objects.by_name.items())
    buffers = {
        f"the buffers of {name}": [
            (strip_compiled(path), tuple(buffer.shape)) for path, buffer in module.named_buffers()
        ]
        for name, module in objects.modules.items()
    }
    return {"what run.prepare got": kinds, **models, **buffers}
