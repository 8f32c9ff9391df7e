"""The state of a run in a snapshot: built from the objects of `run.prepare`, and restored to them."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from samestep.decoding import parse_json
from samestep.engine.precision import MixedPrecision
from samestep.errors import InvalidValue, RunDirectoryError, UsageError
from samestep.snapshot.location import Location
from samestep.snapshot.run_record import OVERRIDE, StartOptions, describe_changes
from samestep.snapshot.serialization import SavedState
from samestep.snapshot.store import Store
from samestep.train.state.objects import GROUPS, Objects, list_named, load, name_optimizers, save_module
from samestep.train.state.sharded_state import shard_as
from samestep.world.environment import advise
from samestep.world.group import Group

Settings = Mapping[str, Any]  # of optimizers and schedulers: "optimizer.lr" -> 0.1; a list if parameter groups differ


class LoopChanges:
    """What a script can change in its loop besides values, and does not repeat after a resume: which parameters are
    frozen (`requires_grad`), and added parameter groups.
    """

    def __init__(self, objects: Objects, modules: Mapping[str, nn.Module]) -> None:
        self._optimizers = name_optimizers(objects)
        self._modules = modules
        self._at_start = self._read()

    def state_dict(self) -> dict[str, Any]:
        """The names of the frozen parameters, now and at the start, and the parameter groups of the optimizers that got
        more of them.
        """
        frozen, groups = self._read()
        frozen_at_start, before = self._at_start
        added = {name: groups[name] for name in groups if groups[name] != before[name]}
        return {"frozen": frozen, "frozen_at_start": frozen_at_start, "groups": added}

    def freeze(self, saved: Mapping[str, Any]) -> None:
        """Freeze what was frozen, unless the script's initial freezing differs: then it was changed on purpose."""
        if saved["frozen_at_start"] == self._at_start[0]:
            for name, param in self._params().items():
                param.requires_grad_(name not in saved["frozen"])

    def add_groups(self, saved: Mapping[str, Any]) -> None:
        """Add the parameter groups that only the snapshot has. `load` restores their options."""
        params = self._params()
        for name, groups in saved["groups"].items():
            own = self._at_start[1].get(name, [])
            if own != groups[: len(own)] or not all(each in params for group in groups for each in group):
                continue  # `load` raises
            for group in groups[len(own) :]:
                self._optimizers[name].add_param_group({"params": [params[each] for each in group]})

    def _params(self) -> dict[str, nn.Parameter]:
        return {f"{name}.{path}": p for name, module in self._modules.items() for path, p in list_named(module)}

    def _read(self) -> tuple[list[str], dict[str, list[list[str]]]]:
        """Return the names of the frozen parameters, and those in the groups of each optimizer."""
        params = self._params()
        names = {id(param): name for name, param in params.items()}
        groups = {
            name: [sorted(names.get(id(param), "") for param in group["params"]) for group in optimizer.param_groups]
            for name, optimizer in self._optimizers.items()
        }
        return [name for name, param in params.items() if not param.requires_grad], groups


class SnapshotContents:
    """Builds the state for a snapshot, and restores it.

    Attributes:
        options: settings of optimizers and schedulers.
    """

    def __init__(
        self, objects: Objects, modules: Mapping[str, nn.Module], precision: MixedPrecision, say: Callable[[str], None]
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

    Only rank 0 reads the snapshot, because other nodes may not have it. It sends one value at a time; of a sharded
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

    def find() -> dict[str, list[str]] | None:
        if may_lack and not any(each.matches(which) for each in store.snapshots()):
            return None
        found = location.find(which)
        if found is None:
            raise RunDirectoryError(f"there is no snapshot in {location.shown} yet", code="SS411")
        opened.append(store.open(found))
        return {name: [*opened[0].contents["objects"][name]] for name in modules}

    def read(name: str, key: str) -> Any:
        return group.seal(opened[0].fill(opened[0].contents["objects"][name][key]))

    keys = group.once(find)
    if keys is None:
        return False
    for name, module in modules.items():
        state = save_module(module)  # with the versions of its parts
        saved = {key: shard_as(state.get(key), group.unseal(group.once(read, name, key))) for key in keys[name]}
        state.clear()
        state.update(saved)
        load({name: module}, {name: state})
    return True


def read_settings(objects: Objects) -> dict[str, Any]:
    """Return the settings of all optimizers and schedulers as JSON, by names such as "optimizer.lr".

    Call it before the objects are restored. Learning rates are the initial ones, from which schedulers start. A setting
    that JSON does not have, such as a function, is left out.
    """
    found: dict[str, Any] = {}
    for name, thing in objects.items():
        if isinstance(thing, Optimizer):
            for key in _list_options(thing):
                values = [group.get("initial_lr", group["lr"]) if key == "lr" else group.get(key)
                          for group in thing.param_groups]  # fmt: skip
                _add(found, f"{name}.{key}", values[0] if all(v == values[0] for v in values) else values)
        elif isinstance(thing, LRScheduler):
            _add_schedule(found, name, type(thing).__name__, thing.state_dict())
    return found


def find_changed(before: Settings, now: Settings) -> dict[str, tuple[Any, Any]]:
    """Return the settings that both have and that differ: name -> (before, now)."""
    return {name: (before[name], value) for name, value in now.items() if name in before and before[name] != value}


def read_overriding(objects: Objects, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the script's settings in the place of a snapshot, for `override`.

    Call it before the objects are restored: it steps the script's schedulers to their positions in the snapshot.
    `ReduceLROnPlateau`, whose position follows from values that it was given, is left out.

    Returns:
        The state of each scheduler, and the options of the groups of each optimizer, by name.
    """
    schedules = {
        name: thing
        for name, thing in objects.items()
        if isinstance(thing, LRScheduler) and not isinstance(thing, ReduceLROnPlateau)
    }
    counts = {name: _read_position(saved[name]) for name in schedules}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about schedulers that are stepped before their optimizer
        for step in range(max(counts.values(), default=0)):
            for name, schedule in schedules.items():
                if step < counts[name]:
                    schedule.step()
    found: dict[str, Any] = {name: deepcopy(schedule.state_dict()) for name, schedule in schedules.items()}
    for name, thing in objects.items():
        if isinstance(thing, Optimizer):
            options = _list_options(thing) | {"initial_lr"}
            found[name] = [
                deepcopy({key: value for key, value in group.items() if key in options}) for group in thing.param_groups
            ]
    return found


def override(objects: Objects, saved: Mapping[str, Any], overriding: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects' saved states with the settings of `read_overriding`."""
    changed = {**saved, **overriding}
    for name, thing in objects.items():
        if isinstance(thing, Optimizer):
            pairs = zip(saved[name][GROUPS], overriding[name], strict=False)
            changed[name] = {**saved[name], GROUPS: [{**group, **options} for group, options in pairs]}
    return changed


def _list_options(optimizer: Optimizer) -> set[str]:
    return {key for group in optimizer.param_groups for key in group} - {"params", "param_names", "initial_lr"}


def _read_position(saved: Mapping[str, Any]) -> int:
    """Return how often a scheduler was stepped. A chained scheduler has only the positions of its parts."""
    return int(saved["last_epoch"] if "last_epoch" in saved else _read_position(saved["_schedulers"][0]))


def _add_schedule(found: dict[str, Any], name: str, kind: str, state: Mapping[str, Any]) -> None:
    found[name] = kind
    for key, value in state.items():
        if not key.startswith("_") and key not in ("last_epoch", "base_lrs"):
            _add(found, f"{name}.{key}", value)
    for number, part in enumerate(state.get("_schedulers", ())):
        _add_schedule(found, f"{name}[{number}]", "", part)


def _add(found: dict[str, Any], name: str, value: Any) -> None:
    with suppress(TypeError, ValueError):
        text = json.dumps(value.tolist() if isinstance(value, Tensor) else value, allow_nan=False)
        found[name] = parse_json(text.encode())
