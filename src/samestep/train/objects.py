"""The objects that `run.prepare` got: their states under the names of parameters, and checks of them.

A name is the object's, and the path in the module without the wrappers of `torch.compile`: "model.layers.0.weight".
torch identifies the parameters in an optimizer's state by their order, which may differ between two starts or ranks.
"""

import gc
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_structure

from samestep.engine.buffers import check_module, spread_buffers
from samestep.errors import Error, InvalidType, InvalidValue, RunDirectoryError, UsageError
from samestep.hashing import hash_bytes
from samestep.nested import find_tensors
from samestep.snapshot.serialization import encode
from samestep.torch_internals import is_sharded, rename_state
from samestep.train.sharded_init import is_partial

MAX_SHOWN = 600
STATE = "state"  # the key of the parameters' states in an optimizer's state_dict
GROUPS = "param_groups"
_COMPILED = "_orig_mod"  # the attribute in which a wrapper of torch.compile keeps the module


def strip_compiled(path: str) -> str:
    """Return a path in a module without the wrappers of `torch.compile`.

    Example::

        >>> strip_compiled("encoder._orig_mod.weight")
        'encoder.weight'
    """
    return ".".join(name for name in path.split(".") if name != _COMPILED) if _COMPILED in path else path


def list_params(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def save_module(module: nn.Module) -> dict[str, Any]:
    """Return the state_dict of a module, with the names of the uncompiled one."""
    return rename_state(module.state_dict(), strip_compiled)


class Objects:
    """Models, optimizers and everything else that has a state, by the names that the script gave them.

    Attributes:
        by_name: all objects.
        modules: the models, those in a wrapper of `torch.compile` without it.
        optimizers: the optimizers.
    """

    def __init__(self, by_name: Mapping[str, Any]) -> None:
        self.by_name = by_name
        self.modules: dict[str, nn.Module] = {
            name: getattr(thing, _COMPILED, thing) for name, thing in by_name.items() if isinstance(thing, nn.Module)
        }
        self.optimizers = {name: thing for name, thing in by_name.items() if isinstance(thing, Optimizer)}

    def name_params(self) -> dict[str, nn.Parameter]:
        """Return the parameters of all models by name, each once, in the order of the models."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for name, module in self.modules.items():
            for path, param in module.named_parameters():
                found.setdefault(id(param), (f"{name}.{strip_compiled(path)}", param))
        return dict(found.values())

    def name_updated(self, name: str) -> dict[str, nn.Parameter]:
        """Return the parameters of an optimizer by name, in its order. Raises InvalidValue if one is of no model."""
        params = {id(param): (path, param) for path, param in self.name_params().items()}
        updated = [*map(id, list_params(self.optimizers[name]))]
        if not params.keys() >= {*updated}:
            raise InvalidValue(
                f"{name} holds parameters of a model that was not passed: pass it too, run.prepare(model=...); put a "
                "parameter of no model into one, such as nn.ParameterList([parameter])",
                code="SS603",
            )
        return dict(params[number] for number in updated)

    def save(self) -> dict[str, Any]:
        """Return every object's state_dict, with the names of parameters."""
        states: dict[str, Any] = {}
        for name, thing in self.by_name.items():
            if isinstance(thing, nn.Module):
                states[name] = save_module(thing)
            else:
                states[name] = self.save_optimizer(name) if name in self.optimizers else thing.state_dict()
        return states

    def save_optimizer(self, name: str) -> Any:
        """Return an optimizer's state_dict, with the names of parameters."""
        state = self.optimizers[name].state_dict()
        if not _identifies_by(int, state):  # that of a class with a state_dict of its own
            return state
        return _name_state([*self.name_updated(name)], state)

    def add_groups(self, saved: Mapping[str, Any]) -> None:
        """Add the parameter groups that only a snapshot has, because the loop has added them. For `load`."""
        params = self.name_params()
        for name, optimizer in self.optimizers.items():
            with _explaining(name):
                own = {*map(id, list_params(optimizer))}
                groups = saved[name][GROUPS] if _identifies_by(str, saved[name]) else []
                for group in groups[len(optimizer.param_groups) :]:
                    added = [params[path] for path in group["params"] if path in params and id(params[path]) not in own]
                    optimizer.add_param_group({"params": added})

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore every object's state. Raises Error if an object rejects it."""
        for name, thing in self.by_name.items():
            with _explaining(name):
                if isinstance(thing, nn.Module):
                    _load_module(thing, saved[name])
                elif isinstance(thing, Optimizer) and _identifies_by(str, saved[name]):
                    self.load_optimizer(name, saved[name])
                else:
                    thing.load_state_dict(saved[name])

    def load_optimizer(self, name: str, saved: Mapping[str, Any]) -> None:
        """Restore the state that `save_optimizer` has returned. Raises Error, or what torch raises."""
        optimizer = self.optimizers[name]
        params = self.name_updated(name)
        paths = [*params]
        groups = optimizer.state_dict()[GROUPS]
        own = [sorted(paths[number] for number in group["params"]) for group in groups]
        if own != [group["params"] for group in saved[GROUPS]]:
            raise RunDirectoryError(
                f"the parameter groups of {name} are not those in the snapshot: give the optimizer the groups with "
                "which the run began",
                code="SS412",
            )
        # torch adds defaults when it loads, but not to the groups.
        settings = optimizer.defaults.keys() & optimizer.param_groups[0].keys()
        groups = [{**was, "params": group["params"]} for was, group in zip(saved[GROUPS], groups, strict=True)]
        numbers = {path: number for number, path in enumerate(paths)}
        states = {numbers.get(key, key): value for key, value in saved[STATE].items()}
        optimizer.load_state_dict({**saved, STATE: states, GROUPS: groups})
        for path, param in params.items():
            if param in optimizer.state:
                now, was = optimizer.state[param], saved[STATE].get(path)
                if tree_structure(now) == tree_structure(was):
                    optimizer.state[param] = tree_map(_with_dtype, now, was)
        # torch loads the state of another kind of optimizer without an error, and would fail in the next update.
        if missing := sorted(settings - optimizer.param_groups[0].keys()):
            raise RunDirectoryError(
                f"{name} is a {type(optimizer).__name__}, but its state in the snapshot has no {missing[0]}: pass the "
                f"kind of optimizer that the run began with; if {missing[0]} is a new setting of this class, add it to "
                "the param_groups in the class's __setstate__",
                code="SS412",
            )


def _load_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `save_module` has returned, also if other modules inside are compiled now. Errors as torch's."""
    paths = [*module.state_dict(keep_vars=True), *(path for path, _ in module.named_modules())]
    own = {strip_compiled(path): path for path in paths}
    module.load_state_dict(rename_state(state, lambda path: own.get(path, path)))


def _name_state(named: Sequence[str], state: Any) -> Any:
    """Return a state_dict of an optimizer with the names of its parameters in place of numbers, sorted."""
    states = {named[key] if isinstance(key, int) else key: value for key, value in state[STATE].items()}
    groups = []
    for group in state[GROUPS]:
        options = {key: value for key, value in group.items() if key != "param_names"}
        groups.append(options | {"params": sorted(named[number] for number in group["params"])})
    return {**state, STATE: {key: states[key] for key in sorted(states, key=str)}, GROUPS: groups}


def _identifies_by(kind: type, state: Any) -> bool:
    """Return whether a state is an optimizer's, with numbers or names of parameters."""
    if not (isinstance(state, Mapping) and {STATE, GROUPS} <= state.keys()):
        return False
    return all(isinstance(param, kind) for group in state[GROUPS] for param in group["params"])


@contextmanager
def _explaining(name: str) -> Iterator[None]:
    """Raise RunDirectoryError for what an object, or torch, raises for a state that does not fit."""
    try:
        yield
    except Error:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = textwrap.shorten(str(error), MAX_SHOWN, placeholder=" ...")
        raise RunDirectoryError(f"{name} does not take its state from the snapshot: {why}", code="SS412") from error


def _with_dtype(now: Any, was: Any) -> Any:
    """Undo torch's cast of a parameter's state to the dtype of the parameter (bfloat16, for example)."""
    if isinstance(now, Tensor) and isinstance(was, Tensor) and now.dtype != was.dtype:
        return was.to(now.device, copy=True)
    return now


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
        if isinstance(thing, type):
            raise InvalidType(f"run.prepare got {name}, the class {thing.__name__}: pass an object of it", code="SS601")
        if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
            raise InvalidType(
                f"run.prepare got {name}, a {type(thing).__name__} without state_dict and load_state_dict", code="SS601"
            )
        for kind, advice in REFUSED.items():
            if isinstance(thing, kind):
                raise InvalidType(f"{name} is a {kind.__name__}: {advice}", code="SS601")
    for name, module in objects.modules.items():
        if lazy := [path for path, param in module.named_parameters() if is_lazy(param)]:
            raise InvalidValue(
                f"{name}.{lazy[0]} has no shape before the first batch: pass a batch through {name} before run.prepare",
                code="SS601",
            )
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
        if any(map(is_partial, find_tensors([*optimizer.state.values()]))):
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
