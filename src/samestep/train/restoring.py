"""What a snapshot holds of a run, and how the objects that a script passed to `run.prepare` get it back."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from samestep.engine.precision import Precision
from samestep.errors import Error
from samestep.snapshot.run_record import OVERRIDE, Options, describe_changes
from samestep.train.options import Override, find_changed, read_settings
from samestep.train.stateful import Freezing, Objects, states, unwrap
from samestep.world.environment import advise

Groups = Mapping[str, list[list[str]]]  # of optimizers, by name: the names of each group's parameters
MAX_SHOWN = 600


class Structure:
    """The keys of the models' states and the groups of the optimizers, as a script built them.

    A script that changes them in its loop does not do so again when it resumes after that place.
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
        """The groups of the optimizers to which some were added; empty where there are none."""
        groups = self._read_groups()
        added = {name: groups[name] for name in groups if groups[name] != self._groups[name]}
        return {"groups": added} if added else {}

    def find_change(self, states: Mapping[str, Any]) -> str:
        """A sentence, once, for a change after which the same script cannot be resumed; "" where there is none.

        Args:
            states: what the objects are saved as.
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
        """Adds the groups of parameters that a snapshot has and the script has not; `load` gives them their options."""
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
    """What a snapshot of a run holds: put together when it is saved, given back to the objects when it is restored.

    Attributes:
        options: the settings of optimizers and schedules.
    """

    def __init__(
        self, objects: Objects, modules: Mapping[str, nn.Module], precision: Precision, say: Callable[[str], None]
    ) -> None:
        self._objects, self._precision, self._say = objects, precision, say
        self._freezing, self._structure = Freezing(modules), Structure(objects, modules)
        self._override: Override | None = None
        self.options = Options(read_settings(objects))

    def build(self, position: Mapping[str, Any], state: Any) -> dict[str, Any]:
        """What a snapshot holds and its digest covers. `state`: the script's own."""
        if not isinstance(state, dict):
            raise Error(f"run.state has become a {type(state).__name__}: keep it a dict, run.state[name] = value")
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
        """Restores every object, and compares the script's settings of optimizers and schedules with those of the run.

        Args:
            begun_with: the settings in force when the snapshot was written.
            overrides: whether the script's settings go before those.

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
                f"the run goes on with its own settings, not with those that the script has now "
                f"({how}): for the script's, pass override=True to run.prepare, or start with {advise(override=True)}"
            )
            begun = {name: before for name, (before, _) in changed.items()}
            self.options = Options({**asked, **begun}, {name: asked[name] for name in changed})

    def restore_again(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        """Undoes what the script has changed since `restore`: its lines before a later loop have run again.

        Returns:
            The script's own state.
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
    """Gives every object its state, but for those to `leave`. Raises Error where one refuses it."""
    for name, thing in objects.items():
        if name in leave:
            continue
        if isinstance(thing, torch.optim.Optimizer):
            _check_groups(name, len(thing.param_groups), len(saved[name].get("param_groups", ())))
        # Before: torch adds to an optimizer's own as it loads.
        defaults = {*thing.defaults} if isinstance(thing, torch.optim.Optimizer) else set()
        try:
            unwrap(thing).load_state_dict(saved[name])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            why = " ".join(str(error).split())
            why = why if len(why) <= MAX_SHOWN else f"{why[: MAX_SHOWN - 4]} ..."
            raise Error(f"{name} does not take its state from the snapshot: {why}") from error
        if isinstance(thing, torch.optim.Optimizer):
            _restore_dtypes(thing, saved[name])
            # What torch has taken from another kind of optimizer without a word, and would miss in the next update.
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
    """Undoes torch's cast of an optimizer's state to its parameters' dtypes: of float32 weights kept for bfloat16 ones,
    say, or ASGD's rates."""
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
