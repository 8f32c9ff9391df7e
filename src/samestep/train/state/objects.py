"""The states of the objects that `run.prepare` got, under the names of parameters: `save` and `load`.

A name is the object's, and the path in the module without the wrappers of `torch.compile`: "model.layers.0.weight".
torch identifies the parameters in an optimizer's state by their order, which may differ between two starts or ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_structure

from samestep.errors import Error, InvalidValue, RunDirectoryError
from samestep.torch_internals import rename_state

MAX_SHOWN = 600
STATE = "state"  # the key of the parameters' states in an optimizer's state_dict
GROUPS = "param_groups"
_COMPILED = "_orig_mod"  # the attribute in which a wrapper of torch.compile holds the module

Names = dict[int, str]  # id of a parameter -> its name
Objects = Mapping[str, Any]


def strip_compiled(path: str) -> str:
    """Return a path in a module without the wrappers of `torch.compile`.

    Example::

        >>> strip_compiled("encoder._orig_mod.weight")
        'encoder.weight'
    """
    return ".".join(part for part in path.split(".") if part != _COMPILED) if _COMPILED in path else path


def find_modules(objects: Objects) -> dict[str, nn.Module]:
    """Return the modules among the objects, those inside a wrapper of `torch.compile` without it."""
    return {name: unwrap(thing) for name, thing in objects.items() if isinstance(thing, nn.Module)}


def unwrap(thing: Any) -> Any:
    """Return the module inside a wrapper of `torch.compile`; its keys have no prefix."""
    return getattr(thing, _COMPILED, thing) if isinstance(thing, nn.Module) else thing


def find_named_params(objects: Objects) -> dict[str, nn.Parameter]:
    """Return the parameters of all modules among the objects, each once, by name, in the order of the modules."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, module in find_modules(objects).items():
        for path, param in module.named_parameters():
            found.setdefault(id(param), (f"{name}.{strip_compiled(path)}", param))
    return dict(found.values())


def name_params(objects: Objects) -> Names:
    """Return the names of the parameters of all modules among the objects, in the order of the modules."""
    return {id(param): name for name, param in find_named_params(objects).items()}


def name_optimizers(objects: Objects) -> dict[str, Optimizer]:
    """Return the optimizers among the objects, by name."""
    return {name: thing for name, thing in objects.items() if isinstance(thing, Optimizer)}


def list_params(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def list_by_name(name: str, optimizer: Optimizer, names: Names) -> dict[str, Tensor]:
    """Return the parameters of an optimizer by name, in its order. Raises InvalidValue if one is of no module."""
    params = list_params(optimizer)
    if any(id(param) not in names for param in params):
        raise InvalidValue(
            f"{name} holds parameters of a model that was not passed: pass it too, run.prepare(model=...); put a "
            "parameter of no model into one, such as nn.ParameterList([parameter])",
            code="SS603",
        )
    return {names[id(param)]: param for param in params}


def save_module(module: nn.Module) -> dict[str, Any]:
    """Return the state_dict of a module, with the names of the uncompiled one."""
    return rename_state(module.state_dict(), strip_compiled)


def _load_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `save_module` has returned, also for a module that is compiled in other parts. Errors as torch's."""
    paths = [*module.state_dict(keep_vars=True), *(path for path, _ in module.named_modules())]
    own = {strip_compiled(path): path for path in paths}
    module.load_state_dict(rename_state(state, lambda path: own.get(path, path)))


def save(objects: Objects) -> dict[str, Any]:
    """Return every object's state_dict, with the names of parameters."""
    names = name_params(objects)
    states = {
        name: save_module(thing) if isinstance(thing, nn.Module) else thing.state_dict()
        for name, thing in objects.items()
    }
    for name, optimizer in name_optimizers(objects).items():
        if _identifies_by(int, states[name]):  # not that of a class with a state_dict of its own
            states[name] = _name_state([*list_by_name(name, optimizer, names)], states[name])
    return states


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
        why = " ".join(str(error).split())
        why = why if len(why) <= MAX_SHOWN else f"{why[: MAX_SHOWN - 4]} ..."
        raise RunDirectoryError(f"{name} does not take its state from the snapshot: {why}", code="SS412") from error


def add_groups(objects: Objects, saved: Mapping[str, Any]) -> None:
    """Add the parameter groups that only a snapshot has, because the loop has added them. `load` restores the rest."""
    params = find_named_params(objects)
    for name, optimizer in name_optimizers(objects).items():
        with _explaining(name):
            own = {*map(id, list_params(optimizer))}
            groups = saved[name][GROUPS] if _identifies_by(str, saved[name]) else []
            for group in groups[len(optimizer.param_groups) :]:
                added = [params[path] for path in group["params"] if path in params and id(params[path]) not in own]
                optimizer.add_param_group({"params": added})


def load(objects: Objects, saved: Mapping[str, Any]) -> None:
    """Restore every object's state. Raises Error if an object rejects it."""
    names = name_params(objects)
    for name, thing in objects.items():
        with _explaining(name):
            if isinstance(thing, Optimizer):
                _load_optimizer(name, thing, saved[name], names)
            elif isinstance(thing, nn.Module):
                _load_module(thing, saved[name])
            else:
                thing.load_state_dict(saved[name])


def _load_optimizer(name: str, optimizer: Optimizer, saved: Any, names: Names) -> None:
    if not _identifies_by(str, saved):
        optimizer.load_state_dict(saved)
        return
    # torch adds defaults when it loads, but not to the groups.
    settings = optimizer.defaults.keys() & optimizer.param_groups[0].keys()
    numbers = {path: number for number, path in enumerate(list_by_name(name, optimizer, names))}
    own = {(k, names[id(param)]) for k, group in enumerate(optimizer.param_groups) for param in group["params"]}
    different = own ^ {(k, path) for k, group in enumerate(saved[GROUPS]) for path in group["params"]}
    if different:
        raise RunDirectoryError(
            f"the parameter groups of {name} are not those in the snapshot, such as that of {min(different)[1]}: give "
            "the optimizer the groups with which the run began",
            code="SS412",
        )
    groups = []
    for group, saved_group in zip(optimizer.param_groups, saved[GROUPS], strict=True):
        groups.append({**saved_group, "params": [numbers[names[id(param)]] for param in group["params"]]})
    states = {numbers.get(key, key): value for key, value in saved[STATE].items()}
    optimizer.load_state_dict({**saved, STATE: states, GROUPS: groups})
    for param in list_params(optimizer):
        if param in optimizer.state:
            optimizer.state[param] = _with_dtypes(optimizer.state[param], saved[STATE].get(names[id(param)]))
    # torch loads the state of another kind of optimizer without an error, and would fail in the next update.
    missing = sorted(settings - optimizer.param_groups[0].keys())
    if missing:
        raise RunDirectoryError(
            f"{name} is a {type(optimizer).__name__}, but its state in the snapshot has no {missing[0]}: pass the kind "
            f"of optimizer that the run began with; if {missing[0]} is a new setting of this class, add it to the "
            "param_groups in the class's __setstate__",
            code="SS412",
        )


def _with_dtypes(now: Any, was: Any) -> Any:
    """Undo torch's cast of a parameter's state to the dtype of the parameter (bfloat16, for example)."""
    return tree_map(_with_dtype, now, was) if tree_structure(now) == tree_structure(was) else now


def _with_dtype(now: Any, was: Any) -> Any:
    if isinstance(now, Tensor) and isinstance(was, Tensor) and now.dtype != was.dtype:
        return was.to(now.device, copy=True)
    return now
