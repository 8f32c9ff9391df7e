"""The state of a run in a snapshot: built from the objects of `run.prepare`, and restored to them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samestep.engine.precision import Precision
from samestep.errors import Error, InvalidType, InvalidValue, RunDirectoryError, UsageError
from samestep.snapshot.location import Location
from samestep.snapshot.run_record import OVERRIDE, StartOptions, describe_changes
from samestep.snapshot.serialization import SavedState
from samestep.snapshot.store import Store
from samestep.tagged import find_dtype, name_dtype
from samestep.train.state.names import (
    STATE,
    Names,
    list_named,
    list_params,
    load_module,
    load_optimizer,
    name_params,
    naming,
    save_module,
)
from samestep.train.state.optimizer_settings import find_changed, override, read_overriding, read_settings
from samestep.train.state.sharded_state import shard_as
from samestep.train.state.stateful import Objects, find_held_optimizers, name_optimizers
from samestep.world.environment import advise
from samestep.world.group import Group

MAX_SHOWN = 600


class LoopChanges:
    """What a script can change in its loop besides values, and does not repeat after a resume: which parameters are
    frozen (`requires_grad`), and added parameter groups.
    """

    def __init__(self, objects: Objects, modules: Mapping[str, nn.Module]) -> None:
        self._optimizers = name_optimizers(objects)
        self._modules = modules
        self._frozen = self._find_frozen()
        self._groups = self._read_groups()

    def state_dict(self) -> dict[str, Any]:
        """The names of the frozen parameters, now and at the start, and the parameter groups of the optimizers that got
        more of them.
        """
        groups = self._read_groups()
        return {
            "frozen": self._find_frozen(),
            "frozen_at_start": self._frozen,
            "groups": {name: groups[name] for name in groups if groups[name] != self._groups[name]},
        }

    def freeze(self, saved: Mapping[str, Any]) -> None:
        """Freeze what was frozen, unless the script's initial freezing differs: then it was changed on purpose."""
        if saved["frozen_at_start"] == self._frozen:
            for name, param in self._params().items():
                param.requires_grad_(name not in saved["frozen"])

    def add_groups(self, saved: Mapping[str, Any]) -> None:
        """Add the parameter groups that only the snapshot has. `load` restores their options."""
        params = self._params()
        for name, groups in saved["groups"].items():
            own = self._groups.get(name, [])
            if own != groups[: len(own)] or not all(each in params for group in groups for each in group):
                continue  # `load` raises
            for group in groups[len(own) :]:
                self._optimizers[name].add_param_group({"params": [params[each] for each in group]})

    def _params(self) -> dict[str, nn.Parameter]:
        return {f"{name}.{path}": p for name, module in self._modules.items() for path, p in list_named(module)}

    def _find_frozen(self) -> list[str]:
        return [name for name, param in self._params().items() if not param.requires_grad]

    def _read_groups(self) -> dict[str, list[list[str]]]:
        names = {id(param): name for name, param in self._params().items()}
        return {
            name: [sorted(names.get(id(param), "") for param in group["params"]) for group in optimizer.param_groups]
            for name, optimizer in self._optimizers.items()
        }


class SnapshotContents:
    """Builds the state for a snapshot, and restores it.

    Attributes:
        options: settings of optimizers and schedulers.
    """

    def __init__(
        self, objects: Objects, modules: Mapping[str, nn.Module], precision: Precision, say: Callable[[str], None]
    ) -> None:
        self._objects = objects
        self._precision = precision
        self._say = say
        self._changes = LoopChanges(objects, modules)
        self._overriding: dict[str, Any] | None = None  # the script's settings, see `read_overriding`
        self.options = StartOptions(read_settings(objects))

    def build(
        self, position: Mapping[str, Any], state: Any, read_states: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the state for a snapshot.

        Args:
            state: `run.state`.
            read_states: returns the objects' states.
        """
        if not isinstance(state, dict):
            raise InvalidType(
                f"run.state has become a {type(state).__name__}: keep it a dict, run.state[name] = value", code="SS102"
            )
        return {
            "objects": read_states(),
            "position": {**position, "precision": self._precision.state_dict(), **self._changes.state_dict()},
            "state": state,
        }

    def fit(self, contents: Mapping[str, Any]) -> None:
        """Add the parameter groups that only the snapshot has, before the state is divided among the ranks.

        Raises:
            RunDirectoryError: the snapshot holds objects with other names.
        """
        objects = self._objects
        saved = contents["objects"]
        if objects.keys() != saved.keys():
            raise RunDirectoryError(
                f"the snapshot holds {', '.join(saved)}, and run.prepare got {', '.join(objects)}: pass the same names",
                code="SS412",
            )
        self._changes.add_groups(contents["position"])

    def restore(self, contents: Mapping[str, Any], begun_with: Mapping[str, Any], *, overrides: bool) -> None:
        """Restore all objects, and compare the script's settings of optimizers and schedulers with the run's.

        Called after `fit`.

        Args:
            begun_with: the settings that the run used when the snapshot was written.
            overrides: whether the script's settings replace them.

        Raises:
            RunDirectoryError: a state does not fit its object.
        """
        objects = self._objects
        saved = contents["objects"]
        asked = self.options.in_force
        changed = find_changed(begun_with, asked)
        how = describe_changes({name: begun_with[name] for name in changed}, {name: asked[name] for name in changed})
        if changed and overrides:
            self._overriding = read_overriding(objects, saved)
        self.restore_again(contents)
        if self._overriding is not None:
            self.options = StartOptions(asked, overridden=OVERRIDE + how)
        elif changed:
            self._say(
                f"the run continues with the settings of its first start, not with the script's "
                f"({how}): for the script's, pass override=True to run.prepare, or start with {advise(override=True)}"
            )
            begun = {name: before for name, (before, _) in changed.items()}
            self.options = StartOptions({**asked, **begun}, {name: asked[name] for name in changed})

    def restore_again(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        """Undo changes since `restore`, by the script's lines before the loop.

        Returns:
            `run.state`.
        """
        saved = contents["objects"]
        load(self._objects, saved if self._overriding is None else override(self._objects, saved, self._overriding))
        try:
            self._precision.load_state_dict(contents["position"]["precision"])
        except KeyError as error:
            raise RunDirectoryError(
                f"the snapshot has no {error} of a loss scale, so no fp16 run has written it: resume from another one",
                code="SS412",
            ) from None
        self._changes.freeze(contents["position"])
        return contents["state"]  # type: ignore[no-any-return]


def load(objects: Objects, saved: Mapping[str, Any]) -> None:
    """Restore every object's state. Raises Error if an object rejects it."""
    names = name_params(objects)
    with naming(find_held_optimizers(objects), names):
        for name, thing in objects.items():
            try:
                _load(name, thing, saved[name], names)
            except Error:
                raise
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                why = " ".join(str(error).split())
                why = why if len(why) <= MAX_SHOWN else f"{why[: MAX_SHOWN - 4]} ..."
                raise RunDirectoryError(
                    f"{name} does not take its state from the snapshot: {why}", code="SS412"
                ) from error


def _load(name: str, thing: Any, saved: Any, names: Names) -> None:
    if isinstance(thing, nn.Module):
        load_module(thing, saved)
        return
    if not isinstance(thing, torch.optim.Optimizer):
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


def restore_models(
    location: Location,
    known: Mapping[str, nn.Module],
    names: Sequence[str],
    which: int | str,
    group: Group,
    *,
    may_lack: bool,
) -> bool:
    """Load the parameters and buffers of a snapshot into models, in place. On all ranks.

    Only rank 0 reads the snapshot, because other nodes may not have it. It sends one tensor at a time; of a sharded
    model, each rank keeps its rows.

    Args:
        known: the run's models.
        names: which of them to load; empty: all.
        which: as for `Store.find`.
        may_lack: whether to do nothing if there is no such snapshot: a trial of a few steps may not reach it.

    Returns:
        Whether the models were loaded.

    Raises:
        Error: as in `Run.restore`.
    """
    if location.path is None:
        raise UsageError(
            "run.restore needs snapshots, and this run has no directory: name one in samestep.Run(...)", code="SS221"
        )
    for name in names:
        if name not in known:
            raise InvalidValue(
                f"run.restore got {name!r}, but the models of run.prepare are {', '.join(known)}: name those",
                code="SS101",
            )
    modules = {name: known[name] for name in names or known}
    store = Store(location.path, location.named)
    opened: list[SavedState] = []  # on rank 0

    def read_others() -> dict[str, dict[str, Any]] | None:
        """Return what is no tensor, such as extra_state. Few modules have any."""
        if may_lack and not any(each.matches(which) for each in store.snapshots()):
            return None
        found = location.find(which)
        if found is None:
            raise RunDirectoryError(f"there is no snapshot in {location.shown} yet", code="SS411")
        snapshot = store.open(found)
        opened.append(snapshot)
        objects = snapshot.contents["objects"]
        return {
            name: snapshot.fill({key: value for key, value in objects[name].items() if not isinstance(value, Tensor)})
            for name in modules
        }

    others = group.once(read_others)
    if others is None:
        return False
    for name, module in modules.items():
        saved = opened[0].contents["objects"][name] if opened else {}
        tensors = {key: value for key, value in saved.items() if isinstance(value, Tensor)}
        outlines = [(key, name_dtype(value.dtype), [*value.shape]) for key, value in tensors.items()]
        state = save_module(module)
        received: dict[str, Any] = {**others[name]}
        for key, dtype, shape in group.broadcast(outlines):
            tensor = opened[0].fill(tensors[key]) if opened else torch.empty(shape, dtype=find_dtype(dtype))
            group.broadcast_tensors([tensor])
            received[key] = shard_as(state.get(key), tensor)
        for key in state.keys() - received.keys():
            del state[key]
        state.update(received)
        load({name: module}, {name: state})
    return True


def _restore_dtypes(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
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
