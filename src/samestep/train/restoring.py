"""The state of a run in a snapshot: built from the objects of `run.prepare`, and restored to them."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from samestep.engine.precision import Precision
from samestep.errors import Error, InvalidType
from samestep.snapshot.run_record import OVERRIDE, Options, describe_changes
from samestep.train.optimizer_settings import Override, find_changed, read_settings
from samestep.train.stateful import Objects, states, unwrap
from samestep.world.environment import advise

Groups = Mapping[str, list[list[str]]]  # optimizer -> for each parameter group the names of its parameters
MAX_SHOWN = 600


class Freezing:
    """Which parameters are frozen. A script that sets `requires_grad` in its loop does not do so again on resume."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._at_start = self._find_frozen()

    def state_dict(self, *, is_first_loop: bool) -> dict[str, Any]:
        """The names frozen now and before the first loop; in that loop, {} if they are the same."""
        frozen = self._find_frozen()
        if is_first_loop and frozen == self._at_start:
            return {}
        return {"frozen": frozen, "frozen_at_start": self._at_start}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Freezes what was frozen, if the script begins as it did then; otherwise the script was changed on purpose."""
        if saved.get("frozen_at_start") == self._at_start:
            for name, param in self._params():
                param.requires_grad_(name not in saved["frozen"])

    def _find_frozen(self) -> list[str]:
        return [name for name, param in self._params() if not param.requires_grad]

    def _params(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (f"{name}.{path}", p) for name, module in self._modules.items() for path, p in module.named_parameters()
        ]


class Structure:
    """The keys of the models' states and the parameter groups of the optimizers, as the script built them.

    A script that changes them in its loop does not do so again on resume.
    """

    def __init__(self, objects: Objects, modules: Mapping[str, nn.Module]) -> None:
        self._objects, self._modules = objects, modules
        self._names = {
            id(param): f"{name}.{path}" for name, module in modules.items() for path, param in module.named_parameters()
        }
        self._keys = {name: {*module.state_dict()} for name, module in modules.items()}
        self._groups = self._read_groups()
        self._has_told = False

    def state_dict(self) -> dict[str, Any]:
        """The parameter groups of the optimizers that got more of them; {} if none did."""
        groups = self._read_groups()
        added = {name: groups[name] for name in groups if groups[name] != self._groups[name]}
        return {"groups": added} if added else {}

    def find_change(self, states: Mapping[str, Any]) -> str:
        """Describe, once, a change after which the script cannot be resumed; "" if there is none.

        Args:
            states: the objects' state_dicts.
        """
        for name, keys in {} if self._has_told else self._keys.items():
            now = {*states[name]}
            if now != keys:
                self._has_told = True
                parts = (("got", now - keys), ("lost", keys - now))
                how = " and ".join(f"{what} {_list(some)}" for what, some in parts if some)
                return (
                    f"{name} {how} after run.prepare, so this script cannot be resumed from the snapshots that follow: "
                    "change the model before run.prepare (of torch.nn.utils.prune: prune.identity), and later on only "
                    "the values"
                )
        return ""

    def add_groups(self, saved: Groups) -> None:
        """Adds the parameter groups that only the snapshot has. `load` restores their options."""
        params = {f"{n}.{path}": p for n, module in self._modules.items() for path, p in module.named_parameters()}
        for name, groups in saved.items():
            own = self._groups.get(name, [])
            if own != groups[: len(own)] or not all(each in params for group in groups for each in group):
                continue  # `load` raises
            for group in groups[len(own) :]:
                self._objects[name].add_param_group({"params": [params[each] for each in group]})

    def _read_groups(self) -> dict[str, list[list[str]]]:
        return {
            name: [[self._names.get(id(param), "") for param in group["params"]] for group in thing.param_groups]
            for name, thing in self._objects.items()
            if isinstance(thing, torch.optim.Optimizer)
        }


class Contents:
    """Builds the state for a snapshot, and restores it.

    Attributes:
        options: settings of optimizers and schedulers.
    """

    def __init__(
        self, objects: Objects, modules: Mapping[str, nn.Module], precision: Precision, say: Callable[[str], None]
    ) -> None:
        self._objects, self._precision, self._say = objects, precision, say
        self._freezing, self._structure = Freezing(modules), Structure(objects, modules)
        self._override: Override | None = None
        self.options = Options(read_settings(objects))

    def build(self, position: Mapping[str, Any], state: Any) -> dict[str, Any]:
        """The state for a snapshot. `state`: `run.state`."""
        if not isinstance(state, dict):
            raise InvalidType(f"run.state has become a {type(state).__name__}: keep it a dict, run.state[name] = value")
        saved = states(self._objects)
        if change := self._structure.find_change(saved):
            self._say(change)
        changes = self._freezing.state_dict(is_first_loop="loops" not in position) | self._structure.state_dict()
        return {
            "objects": saved,
            "position": {**position, "precision": self._precision.state_dict(), **changes},
            "state": state,
        }

    def restore(self, contents: Mapping[str, Any], begun_with: Mapping[str, Any], *, overrides: bool) -> None:
        """Restores all objects, and compares the script's settings of optimizers and schedulers with the run's.

        Args:
            begun_with: the settings in force when the snapshot was written.
            overrides: whether the script's settings replace those.

        Raises:
            Error: the names differ, or an object refuses its state.
        """
        objects, saved, asked = self._objects, contents["objects"], self.options.in_force
        _check_names(objects, saved)
        changed = find_changed(begun_with, asked)
        how = describe_changes({name: begun_with[name] for name in changed}, {name: asked[name] for name in changed})
        self._override = Override(objects, saved, changed) if changed and overrides else None
        self._structure.add_groups(contents["position"].get("groups", {}))
        self.restore_again(contents)
        if self._override is not None:
            self.options = Options(asked, overridden=OVERRIDE + how)
        elif changed:
            self._say(
                f"the run continues with the settings of its first start, not with the script's "
                f"({how}): for the script's, pass override=True to run.prepare, or start with {advise(override=True)}"
            )
            begun = {name: before for name, (before, _) in changed.items()}
            self.options = Options({**asked, **begun}, {name: asked[name] for name in changed})

    def restore_again(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        """Undoes changes since `restore`, when the script's lines before a later loop have run again.

        Returns:
            `run.state`.
        """
        load(self._objects, contents["objects"], leave=self._override.moved if self._override is not None else ())
        if self._override is not None:
            self._override.apply()
        self._precision.load_state_dict(contents["position"]["precision"])
        self._freezing.load_state_dict(contents["position"])
        return contents["state"]  # type: ignore[no-any-return]


def _check_names(objects: Objects, saved: Mapping[str, Any]) -> None:
    if objects.keys() != saved.keys():
        raise Error(
            f"the snapshot holds {', '.join(saved)}, and run.prepare got {', '.join(objects)}: pass the same names"
        )


def load(objects: Objects, saved: Mapping[str, Any], *, leave: Collection[str] = ()) -> None:
    """Restores every object's state, except those in `leave`. Raises Error if an object rejects it."""
    for name, thing in objects.items():
        if name in leave:
            continue
        if isinstance(thing, torch.optim.Optimizer):
            _check_groups(name, len(thing.param_groups), len(saved[name].get("param_groups", ())))
        # Read first: torch adds to them when it loads.
        defaults = {*thing.defaults} if isinstance(thing, torch.optim.Optimizer) else set()
        try:
            unwrap(thing).load_state_dict(saved[name])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            why = " ".join(str(error).split())
            why = why if len(why) <= MAX_SHOWN else f"{why[: MAX_SHOWN - 4]} ..."
            raise Error(f"{name} does not take its state from the snapshot: {why}") from error
        if isinstance(thing, torch.optim.Optimizer):
            _restore_dtypes(thing, saved[name])
            # torch loads the state of another kind of optimizer without an error, and would fail in the next update.
            missing = sorted(defaults - thing.param_groups[0].keys())
            if missing:
                raise Error(
                    f"{name} is a {type(thing).__name__}, but its state in the snapshot has no {missing[0]}: keep the "
                    f"kind of optimizer, or start with {advise(fresh=True)}"
                )


def _list(keys: set[str]) -> str:
    shown = sorted(keys)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _check_groups(name: str, num_groups: int, num_saved: int) -> None:
    if num_groups < num_saved:
        raise Error(
            f"{name} has {num_groups} of the {num_saved} groups of parameters in the snapshot: give it all of them "
            "before run.prepare, not by add_param_group in the loop; a frozen parameter (requires_grad) is not updated"
        )


def _restore_dtypes(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Undoes torch's cast of an optimizer's state to the dtypes of its parameters (bfloat16, for example)."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in saved.get("param_groups", ()) for number in group["params"]]
    for param, number in zip(params, numbers, strict=False):
        if param in optimizer.state:
            optimizer.state[param] = _with_dtypes(optimizer.state[param], saved.get("state", {}).get(number))


def _with_dtypes(now: Any, was: Any) -> Any:
    if isinstance(now, torch.Tensor) and isinstance(was, torch.Tensor):
        return now if now.dtype == was.dtype else was.to(now.device, copy=True)
    if type(now) is dict and isinstance(was, dict):
        return {key: _with_dtypes(value, was.get(key)) for key, value in now.items()}
    if type(now) is list and isinstance(was, list) and len(now) == len(was):
        return [_with_dtypes(value, other) for value, other in zip(now, was, strict=True)]
    return now
