"""States of modules and optimizers under the names of parameters.

A name is the object's, and the path in the module without the wrappers of `torch.compile`: "model.layers.0.weight".
torch identifies the parameters in an optimizer's state by their order, which may differ between two starts or ranks.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from samestep.errors import RunDirectoryError
from samestep.torch_internals import rename_state

STATE = "state"  # the key of the parameters' states in an optimizer's state_dict
GROUPS = "param_groups"
_COMPILED = "_orig_mod"  # the attribute in which a wrapper of torch.compile holds the module

Names = dict[int, str]  # id of a parameter -> its name


def strip_compiled(path: str) -> str:
    """Return a path in a module without the wrappers of `torch.compile`.

    Example::

        >>> strip_compiled("encoder._orig_mod.weight")
        'encoder.weight'
    """
    return ".".join(part for part in path.split(".") if part != _COMPILED) if _COMPILED in path else path


def list_named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a module, each once, with their paths."""
    return [(strip_compiled(path), param) for path, param in module.named_parameters()]


def name_params(objects: Mapping[str, Any]) -> Names:
    """Return the names of the parameters of all modules among the objects, in the order of the modules."""
    names: Names = {}
    for name, thing in objects.items():
        for path, param in list_named(thing) if isinstance(thing, nn.Module) else ():
            names.setdefault(id(param), f"{name}.{path}")
    return names


def list_params(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def list_by_name(optimizer: Optimizer, names: Names) -> dict[str, torch.Tensor]:
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


@contextmanager
def naming(held: Iterable[Optimizer], names: Names) -> Iterator[None]:
    """Inside the block, let optimizers that other objects hold save and load their states by name."""
    with ExitStack() as stack:
        for each in held:
            hooks = (
                each.register_state_dict_post_hook(lambda own, state: save_optimizer(own, state, names)),
                each.register_load_state_dict_pre_hook(
                    lambda own, state: load_optimizer(type(own).__name__, own, state, names), prepend=True
                ),
            )
            for hook in hooks:
                stack.callback(hook.remove)
        yield
