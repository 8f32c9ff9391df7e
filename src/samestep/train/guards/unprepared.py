"""Detects state of the script that changes from step to step and is in no snapshot."""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from samestep.console import warn
from samestep.data.content import find_leaves
from samestep.hashing import hash_pieces
from samestep.snapshot.async_copy import locate
from samestep.tagged import view_bytes
from samestep.train.inputs.loop_data import LoopData
from samestep.train.script_objects import find_things, look_into
from samestep.train.state.stateful import find_parts, unwrap
from samestep.train.step.steps import Step, StepObserver

LOOK_AFTER = (1, 2, 4, 8, 16)  # steps of this start
MAX_THINGS = 2_000  # most objects of the script to search: some milliseconds
MAX_VALUES = 4_000  # of a state, with their keys
MAX_ELEMENTS = 512  # of a tensor, evenly spaced


class UnpreparedStateChecks(StepObserver):
    """Compares a sample of the states to which the script's variables refer, over the first steps of a start.

    The state when a body ends, where snapshots are taken, must not matter in the next one. A state that the script
    makes equal to a prepared model before each pass does not, nor one that can be reset, such as a metric. On one rank.

    Args:
        objects: the objects passed to `run.prepare`. What they hold is left out: they may save it.
        say: prints a message.
    """

    def __init__(self, objects: Mapping[str, Any], data: LoopData, say: Callable[[str], None]) -> None:
        self._objects = objects
        self._data = data
        self._say = say
        self._modules = [unwrap(thing) for thing in objects.values() if isinstance(thing, nn.Module)]
        self._own = {id(thing) for thing in objects.values()}
        parts = [part for module in self._modules for part in module.modules()]
        self._known = self._own | {id(part) for part in (*parts, *find_parts(objects, in_schedules=True))}
        self._things: dict[str, Any] | None = None
        self._marks: dict[str, str] = {}  # at the beginning of the last pass with a look
        self._ended: dict[str, str] = {}  # at the end of the body before it
        self._num_steps = 0

    def end_body(self, step: Step) -> None:
        self._num_steps += 1
        if self._things and self._num_steps in LOOK_AFTER:
            self._ended = self._mark(self._things)

    def begin_pass(self, step: Step) -> None:
        if self._num_steps not in LOOK_AFTER or step.num_passes:
            return
        if self._things is None:
            spec = self._data.spec
            roots = {"collate_fn": spec.collate_fn}
            if self._data.lanes is None:  # else its state is in the snapshots
                roots["the data set"] = spec.dataset
            self._things = find_things(roots, self._is_wanted, MAX_THINGS, self._known)
            self._marks = self._mark(self._things)
            return
        before = self._marks
        self._marks = self._mark(self._things)
        changed = [path for path, mark in self._marks.items() if before[path] != mark and self._is_carried(path)]
        wholes = tuple(f"{path}{mark}" for path in changed for mark in (".", "["))
        shown = [path for path in changed if not path.startswith(wholes)]
        if named := [f"{path} ({type(self._things[path]).__name__})" for path in shown]:
            sentence = (
                f"not in any snapshot, but changed by the steps: {', '.join(named)}; a resumed run may differ: pass it "
                "to run.prepare, or keep what changes in run.state"
            )
            warn(self._say, sentence, start="not in any snapshot")
        for path in changed:
            del self._things[path]

    def _is_carried(self, path: str) -> bool:
        """Return whether the state that a body has left is that of the next pass, or one of no prepared model."""
        mark = self._marks[path]
        parts = {part for module in self._modules for part in module.modules()}
        return mark == self._ended.get(path) or all(mark != _mark(part, set()) for part in parts)

    def _mark(self, things: Mapping[str, Any]) -> dict[str, str]:
        tensors = [tensor for module in self._modules for tensor in (*module.parameters(), *module.buffers())]
        known = {locate(tensor) for tensor in tensors}  # of the prepared models, which other objects may hold as well
        return {path: _mark(thing, known) for path, thing in things.items()}

    def _is_wanted(self, thing: Any) -> bool:
        kind = type(thing)  # an object may have a `__getattr__` that returns something for any name
        if issubclass(kind, type | DataLoader) or callable(getattr(kind, "reset", None)):
            return False
        if not all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict")):
            return False
        # A class of the script that refers to prepared objects may save them, too.
        is_own_kind = issubclass(kind, nn.Module | LRScheduler)
        return is_own_kind or all(id(part) not in self._own for _, part in look_into(thing))


def _mark(thing: Any, known: set[int]) -> str:
    """Return a hash of a sample of an object's state, without the tensors at `known`; "" if it cannot be read."""
    pieces: list[Any] = []
    try:
        for value in islice(find_leaves(thing.state_dict()), MAX_VALUES):
            if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
                value = torch.from_numpy(value)
            if isinstance(value, Tensor) and locate(value) not in known:
                flat = value.detach().reshape(-1)
                pieces.append(view_bytes(flat[:: max(1, flat.numel() // MAX_ELEMENTS)].cpu().contiguous()))
            elif isinstance(value, bool | int | float | str | np.number):
                pieces.append(repr(value).encode())
        return hash_pieces(iter(pieces))
    except Exception:
        return ""
