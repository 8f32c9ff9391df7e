"""Settings of optimizers and schedulers: the script's, and those of the run's first start."""

import json
import warnings
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from samestep.decoding import parse_json
from samestep.train.state.names import GROUPS

Objects = Mapping[str, Any]
Settings = Mapping[str, Any]  # "optimizer.lr" -> 0.1; a list if parameter groups differ


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
