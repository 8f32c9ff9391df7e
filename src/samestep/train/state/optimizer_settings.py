"""Settings of optimizers and schedulers: the script's, and those of the run's first start."""

import math
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

Objects = Mapping[str, Any]
Settings = Mapping[str, Any]  # "optimizer.lr" -> 0.1; a list if parameter groups differ
# Entries of a scheduler's state that are not settings: its position, and copies of its optimizer's settings.
_POSITION = {"last_epoch", "_step_count", "_last_lr", "base_lrs", "_get_lr_called_within_step", "_is_initial"}


def read_settings(objects: Objects) -> dict[str, Any]:
    """Return the settings of all optimizers and schedulers as JSON, by names such as "optimizer.lr".

    Call it before the objects are restored. Learning rates are the initial ones, from which schedulers start.
    """
    found: dict[str, Any] = {}
    for name, thing in objects.items():
        if isinstance(thing, Optimizer):
            for key in dict.fromkeys(key for group in thing.param_groups for key in group):
                if key not in ("params", "param_names", "initial_lr"):
                    values = [_read_option(group, key) for group in thing.param_groups]
                    _add(found, f"{name}.{key}", values[0] if all(v == values[0] for v in values) else values)
        elif isinstance(thing, LRScheduler):
            found[name] = type(thing).__name__
            _add_schedule(found, name, thing.state_dict())
    return found


def find_changed(before: Settings, now: Settings) -> dict[str, tuple[Any, Any]]:
    """Return the settings that both have and that differ: name -> (before, now)."""
    return {name: (before[name], value) for name, value in now.items() if name in before and before[name] != value}


class Override:
    """The script's settings, which replace those of a snapshot. The rest of the state is restored.

    Create it before the objects are restored: it steps the script's schedulers to their positions in the snapshot.
    `ReduceLROnPlateau`, whose position follows from values that it was given, is restored as it was.

    Args:
        saved: the objects' states in the snapshot.
        changed: see `find_changed`.

    Attributes:
        moved: the names of the schedulers that were stepped, whose state must not be restored.
    """

    def __init__(self, objects: Objects, saved: Mapping[str, Any], changed: Iterable[str]) -> None:
        optimizers = {name: thing for name, thing in objects.items() if isinstance(thing, Optimizer)}
        schedules = {
            name: thing
            for name, thing in objects.items()
            if isinstance(thing, LRScheduler) and not isinstance(thing, ReduceLROnPlateau)
        }
        self.moved = {*schedules}
        before = {name: _copy_options(optimizer) for name, optimizer in optimizers.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about schedulers that are stepped before their optimizer
            counts = {name: _read_position(saved[name]) for name in schedules}
            for step in range(max(counts.values(), default=0)):
                for name, schedule in schedules.items():
                    if step < counts[name]:
                        schedule.step()
        self._options: list[tuple[Optimizer, list[dict[str, Any]]]] = []
        for name, optimizer in optimizers.items():
            scheduled = {
                key for each in schedules.values() if each.optimizer is optimizer for key in ("lr", "initial_lr")
            }
            keys = scheduled | {each.partition(".")[2] for each in changed if each.startswith(f"{name}.")}
            groups = _copy_options(optimizer)
            moved = [
                {key for key in now if now[key] != was[key]} for was, now in zip(before[name], groups, strict=True)
            ]
            self._options.append(
                (optimizer, [{k: v for k, v in g.items() if k in keys | m} for g, m in zip(groups, moved, strict=True)])
            )

    def apply(self) -> None:
        """Set the script's settings. Call it after the objects are restored."""
        for optimizer, options in self._options:
            for group, new in zip(optimizer.param_groups, options, strict=False):
                for key, value in new.items():
                    # A new tensor, because groups may share the old one.
                    is_tensor = isinstance(group.get(key), Tensor)
                    group[key] = torch.full_like(group[key], float(value)) if is_tensor else deepcopy(value)


def _copy_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [deepcopy({key: v for key, v in group.items() if key != "params"}) for group in optimizer.param_groups]


def _read_position(saved: Mapping[str, Any]) -> int:
    """Return how often a scheduler was stepped. A chained scheduler has only the positions of its parts."""
    return int(saved["last_epoch"] if "last_epoch" in saved else _read_position(saved["_schedulers"][0]))


def _read_option(group: Mapping[str, Any], key: str) -> Any:
    return group.get("initial_lr", group["lr"]) if key == "lr" else group.get(key)


def _add_schedule(found: dict[str, Any], name: str, state: Mapping[str, Any]) -> None:
    for number, part in enumerate(state.get("_schedulers", ())):
        _add_schedule(found, f"{name}[{number}]", part)
    for key, value in state.items():
        is_function = isinstance(value, list) and value and all(each is None for each in value)  # of LambdaLR
        if key not in _POSITION and key != "_schedulers" and not is_function:
            _add(found, f"{name}.{key}", value)


def _add(found: dict[str, Any], name: str, value: Any) -> None:
    with suppress(TypeError):  # such as a function, which cannot be compared
        found[name] = _make_plain(value)


def _make_plain(value: Any) -> Any:
    """Return a value as it comes back from JSON. Raises TypeError if JSON has no such type."""
    if callable(getattr(value, "item", None)) and getattr(value, "size", None) is not None:
        value = value.item() if not isinstance(value, Tensor) or value.numel() == 1 else value.tolist()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _make_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(type(value).__name__)
