"""The objects that `run.prepare` got, and their states under the names of parameters.

A name is the object's, and the path in the module without the wrappers of `torch.compile`: "model.layers.0.weight".
torch identifies the parameters in an optimizer's state by their order, which may differ between two starts or ranks.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from samestep.errors import Error, InvalidValue, RunDirectoryError
from samestep.torch_internals import rename_state

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


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested dicts, lists and tuples."""
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


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
        states = {
            name: save_module(thing) if isinstance(thing, nn.Module) else thing.state_dict()
            for name, thing in self.by_name.items()
        }
        for name in self.optimizers:
            if _identifies_by(int, states[name]):  # not that of a class with a state_dict of its own
                states[name] = _name_state([*self.name_updated(name)], states[name])
        return states

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
                    self._load_optimizer(name, thing, saved[name])
                else:
                    thing.load_state_dict(saved[name])

    def _load_optimizer(self, name: str, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
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
                optimizer.state[param] = _with_dtypes(optimizer.state[param], saved[STATE].get(path))
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


def _with_dtypes(now: Any, was: Any) -> Any:
    """Undo torch's cast of a parameter's state to the dtype of the parameter (bfloat16, for example)."""
    return tree_map(_with_dtype, now, was) if tree_structure(now) == tree_structure(was) else now


def _with_dtype(now: Any, was: Any) -> Any:
    if isinstance(now, Tensor) and isinstance(was, Tensor) and now.dtype != was.dtype:
        return was.to(now.device, copy=True)
    return now
