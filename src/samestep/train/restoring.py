"""The state of a run in a snapshot: built from the objects of `run.prepare`, and restored to them."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from samestep.decoding import parse_json
from samestep.engine.precision import MixedPrecision
from samestep.errors import RunDirectoryError, UsageError
from samestep.snapshot.location import Location
from samestep.snapshot.run_record import OVERRIDE, StartOptions, describe_changes
from samestep.snapshot.serialization import SavedState
from samestep.snapshot.store import Store
from samestep.train.divided_state import shard_as
from samestep.train.objects import GROUPS, Objects, save_module
from samestep.world.environment import advise


class SnapshotContents:
    """Builds the state for a snapshot, and restores it.

    Attributes:
        options: settings of optimizers and schedulers.
    """

    def __init__(self, objects: Objects, precision: MixedPrecision, say: Callable[[str], None]) -> None:
        self._objects = objects
        self._precision = precision
        self._say = say
        self._frozen_at_start = self._list_frozen()
        self._overriding: dict[str, Any] | None = None  # the script's settings, see `read_overriding`
        self.options = StartOptions(read_settings(objects))

    def _list_frozen(self) -> list[str]:
        return [name for name, param in self._objects.name_params().items() if not param.requires_grad]

    def build(self, position: Mapping[str, Any], state: Any, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state for a snapshot.

        Args:
            state: `run.state`.
            objects: the objects' states.
        """
        frozen = {"frozen": self._list_frozen(), "frozen_at_start": self._frozen_at_start}
        return {
            "objects": objects,
            "position": {**position, **frozen, "precision": self._precision.state_dict()},
            "state": state,
        }

    def fit(self, contents: Mapping[str, Any]) -> None:
        """Add the parameter groups that only the snapshot has, before the state is divided among the ranks.

        Raises:
            RunDirectoryError: the objects in the snapshot have other names.
        """
        names = self._objects.by_name.keys()
        saved = contents["objects"]
        if names != saved.keys():
            raise RunDirectoryError(
                f"the snapshot holds {', '.join(saved)}, and run.prepare got {', '.join(names)}: pass the same names",
                code="SS412",
            )
        self._objects.add_groups(saved)

    def restore(self, contents: Mapping[str, Any], begun_with: Mapping[str, Any], *, overrides: bool) -> None:
        """Restore all objects, and compare the script's settings of optimizers and schedulers with the run's.

        Called after `fit`.

        Args:
            begun_with: the settings that the run used when the snapshot was written.
            overrides: whether the script's settings replace them.

        Raises:
            RunDirectoryError: a state does not fit its object.
        """
        asked = self.options.in_force
        before = {name: begun_with[name] for name in asked if begun_with.get(name, asked[name]) != asked[name]}
        if before:
            now = {name: asked[name] for name in before}
            how = describe_changes(before, now)
            if overrides:
                self._overriding = read_overriding(self._objects, contents["objects"])
                self.options = StartOptions(asked, overridden=OVERRIDE + how)
            else:
                self.options = StartOptions({**asked, **before}, now)
                self._say(
                    f"the run continues with the settings of its first start, not with the script's "
                    f"({how}): for the script's, pass override=True to run.prepare, or start with "
                    f"{advise(override=True)}"
                )
        self.restore_again(contents)

    def restore_again(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        """Undo changes since `restore`, by the script's lines before the loop.

        Returns:
            `run.state`.
        """
        saved = contents["objects"]
        if self._overriding is not None:
            saved = override(self._objects, saved, self._overriding)
        self._objects.load(saved)
        position = contents["position"]
        self._precision.load_state_dict(position["precision"])
        # Where the script freezes other parameters than before, it was changed on purpose.
        if position["frozen_at_start"] == self._frozen_at_start:
            for name, param in self._objects.name_params().items():
                param.requires_grad_(name not in position["frozen"])
        return contents["state"]  # type: ignore[no-any-return]


def restore_models(location: Location, modules: Mapping[str, nn.Module], which: int | str, *, may_lack: bool) -> bool:
    """Load the parameters and buffers of a snapshot into models, in place. On all ranks.

    Only rank 0 reads the snapshot, because other nodes may not have it. It sends one value at a time; of a sharded
    model, each rank keeps its rows.

    Args:
        modules: the run's models.
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
        return opened[0].fill(opened[0].contents["objects"][name][key])

    keys = location.group.once(find)
    if keys is None:
        return False
    for name, module in modules.items():
        state = save_module(module)  # with the versions of its modules
        saved = {key: shard_as(state.get(key), location.group.once(read, name, key)) for key in keys[name]}
        state.clear()
        state.update(saved)
        Objects({name: module}).load({name: state})
    return True


def read_settings(objects: Objects) -> dict[str, Any]:
    """Return the settings of all optimizers and schedulers as JSON, by names such as "optimizer.lr".

    Call it before the objects are restored. Learning rates are the initial ones, from which schedulers start. A setting
    that JSON does not have, such as a function, is left out.
    """
    found: list[tuple[str, Any]] = []
    for name, optimizer in objects.optimizers.items():
        groups = optimizer.param_groups
        for key in sorted(_list_options(optimizer)):
            values = [group.get("initial_lr", group["lr"]) if key == "lr" else group.get(key) for group in groups]
            found.append((f"{name}.{key}", values[0] if all(v == values[0] for v in values) else values))
    for name, thing in objects.by_name.items():
        if isinstance(thing, LRScheduler):
            found += [(name, type(thing).__name__), *_list_schedule(name, thing.state_dict())]
    settings = {}
    for name, value in found:
        with suppress(TypeError, ValueError):
            settings[name] = parse_json(json.dumps(value, default=Tensor.tolist, allow_nan=False))
    return settings


def read_overriding(objects: Objects, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the script's settings at the position of a snapshot, for `override`.

    Call it before the objects are restored: it steps the script's schedulers to their positions in the snapshot.
    `ReduceLROnPlateau`, whose position follows from values that it was given, is left out.

    Returns:
        The state of each scheduler, and the options of the groups of each optimizer, by name.
    """
    schedules = {
        name: thing
        for name, thing in objects.by_name.items()
        if isinstance(thing, LRScheduler) and not isinstance(thing, ReduceLROnPlateau)
    }
    counts = {name: _read_position(saved[name]) for name in schedules}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about schedulers that are stepped before their optimizer
        for step in range(max(counts.values(), default=0)):
            for name, schedule in schedules.items():
                if step < counts[name]:
                    schedule.step()
    found: dict[str, Any] = {name: schedule.state_dict() for name, schedule in schedules.items()}
    for name, optimizer in objects.optimizers.items():
        options = _list_options(optimizer) | {"initial_lr"}
        found[name] = [
            {key: value for key, value in group.items() if key in options} for group in optimizer.param_groups
        ]
    return deepcopy(found)


def override(objects: Objects, saved: Mapping[str, Any], overriding: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects' saved states with the settings of `read_overriding`."""
    changed = {**saved, **overriding}
    for name in objects.optimizers:
        pairs = zip(saved[name][GROUPS], overriding[name], strict=False)
        changed[name] = {**saved[name], GROUPS: [{**group, **options} for group, options in pairs]}
    return changed


def _list_options(optimizer: Optimizer) -> set[str]:
    return {key for group in optimizer.param_groups for key in group} - {"params", "param_names", "initial_lr"}


def _read_position(saved: Mapping[str, Any]) -> int:
    """Return how often a scheduler was stepped. A chained scheduler has only the positions of those that it chains."""
    return int(saved["last_epoch"] if "last_epoch" in saved else _read_position(saved["_schedulers"][0]))


def _list_schedule(name: str, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """List the settings of a scheduler, and of those that it chains."""
    for key, value in state.items():
        if not key.startswith("_") and key not in ("last_epoch", "base_lrs"):
            yield f"{name}.{key}", value
    for number, inner in enumerate(state.get("_schedulers", ())):
        yield from _list_schedule(f"{name}[{number}]", inner)
