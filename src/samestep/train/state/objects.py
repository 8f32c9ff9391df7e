"""The states of the objects that `run.prepare` got, under the names of parameters: `save` and `load`.

A name is the object's, and the path in the module without the wrappers of `torch.compile`: "model.layers.0.weight".
torch identifies the parameters in an optimizer's state by their order, which may differ between two starts or ranks.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.errors import Error, RunDirectoryError
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


def unwrap(thing: Any) -> Any:
    """Return the module inside a torch.compile wrapper; its keys have no prefix."""
    return getattr(thing, "_orig_mod", thing) if isinstance(thing, nn.Module) else thing


def list_named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a module, each once, with their paths."""
    return [(strip_compiled(path), param) for path, param in module.named_parameters()]


def name_params(objects: Objects) -> Names:
    """Return the names of the parameters of all modules among the objects, in the order of the modules."""
    names: Names = {}
    for name, thing in objects.items():
        for path, param in list_named(thing) if isinstance(thing, nn.Module) else ():
            names.setdefault(id(param), f"{name}.{path}")
    return names


def name_optimizers(objects: Objects) -> dict[str, Optimizer]:
    """Return the optimizers among the objects, by name."""
    return {name: thing for name, thing in objects.items() if isinstance(thing, Optimizer)}


def list_params(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def list_by_name(optimizer: Optimizer, names: Names) -> dict[str, Tensor]:
    """Return the named parameters of an optimizer, in the order of the names and not in its own."""
    params = {id(param): param for param in list_params(optimizer)}
    return {name: params[number] for number, name in names.items() if number in params}


def save_module(module: nn.Module) -> dict[str, Any]:
    """Return the state_dict of a module, with the names of the uncompiled one."""
    return rename_state(module.state_dict(), strip_compiled)


def load_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `save_module` has returned, also for a module that is compiled in other parts. Errors as torch's."""
    paths = [*module.state_dict(keep_vars=True), *(path for path, _ in module.named_modules())]
    own = {strip_compiled(path): path for path in paths}
    module.load_state_dict(rename_state(state, lambda path: own.get(path, path)))


def save_optimizer(optimizer: Optimizer, state: Any, names: Names) -> Any:
    """Return a state_dict of an optimizer with names in place of numbers, in the order of the names.

    Any other state, such as that of a class with a state_dict of its own, is returned as it is.
    """
    params = list_params(optimizer)
    if not _holds(state, range(len(params))) or any(id(param) not in names for param in params):
        return state
    numbered = {number: names[id(param)] for number, param in enumerate(params)}
    order = {name: place for place, name in enumerate(names.values())}
    states = {numbered.get(key, key): value for key, value in state[STATE].items()}
    groups = []
    for group in state[GROUPS]:
        own = [numbered[number] for number in group["params"]]
        options = {key: value for key, value in group.items() if key != "param_names"}
        groups.append(options | {"params": own if _mixes(optimizer) else sorted(own, key=order.__getitem__)})
    keys = sorted(states, key=lambda key: order.get(key, len(order)))
    return {**state, STATE: {key: states[key] for key in keys}, GROUPS: groups}


def load_optimizer(name: str, optimizer: Optimizer, state: Any, names: Names) -> Any:
    """Return what `save_optimizer` has returned as a state_dict for this optimizer.

    Raises:
        RunDirectoryError: a group has other parameters than in the snapshot.
    """
    numbers = {names.get(id(param)): number for number, param in enumerate(list_params(optimizer))}
    if None in numbers or not _holds(state, None):
        return state
    groups = []
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, state[GROUPS], strict=False)):
        own = [names[id(param)] for param in group["params"]]
        if {*own} != {*saved["params"]}:
            lacks, adds = [*{*saved["params"]} - {*own}], [*{*own} - {*saved["params"]}]
            how = f"lacks {min(lacks)}" if lacks else f"also has {min(adds)}"
            raise RunDirectoryError(
                f"group {number} of {name} has other parameters than in the snapshot (it {how}): give the optimizer "
                "the groups with which the run began",
                code="SS412",
            )
        if _mixes(optimizer) and own != saved["params"]:
            raise RunDirectoryError(
                f"{name} is LBFGS, and its parameters have another order than in the snapshot (now {own[0]} is first): "
                "give them in a fixed order, such as that of model.parameters()",
                code="SS412",
            )
        groups.append({**saved, "params": [numbers[each] for each in own]})
    groups += state[GROUPS][len(groups) :]  # which torch refuses
    return {**state, STATE: {numbers.get(key, key): value for key, value in state[STATE].items()}, GROUPS: groups}


def _holds(state: Any, numbers: Iterable[int] | None) -> bool:
    """Return whether a state is an optimizer's, with these parameters in its groups; None: with names."""
    if not isinstance(state, Mapping) or not isinstance(state.get(STATE), Mapping) or GROUPS not in state:
        return False
    params = [param for group in state[GROUPS] for param in group["params"]]
    return params == [*numbers] if numbers is not None else all(isinstance(param, str) for param in params)


def _mixes(optimizer: Optimizer) -> bool:
    """Return whether the state of one parameter holds values of all, in their order."""
    return isinstance(optimizer, torch.optim.LBFGS)


def save(objects: Objects) -> dict[str, Any]:
    """Return every object's state_dict, with the names of parameters."""
    names = name_params(objects)
    return {name: _save(thing, names) for name, thing in objects.items()}


def _save(thing: Any, names: Names) -> Any:
    if isinstance(thing, nn.Module):
        return save_module(thing)
    state = thing.state_dict()
    return save_optimizer(thing, state, names) if isinstance(thing, Optimizer) else state


def load(objects: Objects, saved: Mapping[str, Any]) -> None:
    """Restore every object's state. Raises Error if an object rejects it."""
    names = name_params(objects)
    for name, thing in objects.items():
        try:
            _load(name, thing, saved[name], names)
        except Error:
            raise
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = " ".join(str(error).split())
            why = why if len(why) <= MAX_SHOWN else f"{why[: MAX_SHOWN - 4]} ..."
            raise RunDirectoryError(f"{name} does not take its state from the snapshot: {why}", code="SS412") from error


def _load(name: str, thing: Any, saved: Any, names: Names) -> None:
    if isinstance(thing, nn.Module):
        load_module(thing, saved)
        return
    if not isinstance(thing, Optimizer):
        thing.load_state_dict(saved)
        return
    # torch adds defaults when it loads, but not to the groups.
    settings = thing.defaults.keys() & thing.param_groups[0].keys()
    num_groups = len(thing.param_groups)
    num_saved = len(saved.get("param_groups", ()))
    if num_groups < num_saved:
        raise RunDirectoryError(
            f"{name} has {num_groups} of the {num_saved} groups of parameters in the snapshot: give it all of them "
            "before run.prepare, not by add_param_group in the loop; a frozen parameter (requires_grad) is not updated",
            code="SS412",
        )
    state = load_optimizer(name, thing, saved, names)
    thing.load_state_dict(state)
    _restore_dtypes(thing, state)
    # torch loads the state of another kind of optimizer without an error, and would fail in the next update.
    missing = sorted(settings - thing.param_groups[0].keys())
    if missing:
        raise RunDirectoryError(
            f"{name} is a {type(thing).__name__}, but its state in the snapshot has no {missing[0]}: pass the kind of "
            f"optimizer that the run began with; if {missing[0]} is a new setting of this class, add it to the "
            "param_groups in the class's __setstate__",
            code="SS412",
        )


def _restore_dtypes(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Undo torch's cast of an optimizer's state to the dtypes of its parameters (bfloat16, for example)."""
    numbers = [number for group in saved.get("param_groups", ()) for number in group["params"]]
    for param, number in zip(list_params(optimizer), numbers, strict=False):
        if param in optimizer.state:
            optimizer.state[param] = _with_dtypes(optimizer.state[param], saved.get(STATE, {}).get(number))


def _with_dtypes(now: Any, was: Any) -> Any:
    if isinstance(now, Tensor) and isinstance(was, Tensor):
        return now if now.dtype == was.dtype else was.to(now.device, copy=True)
    if type(now) is dict and isinstance(was, dict):
        return {key: _with_dtypes(value, was.get(key)) for key, value in now.items()}
    if type(now) is list and isinstance(was, list) and len(now) == len(was):
        return [_with_dtypes(value, other) for value, other in zip(now, was, strict=True)]
    return now
