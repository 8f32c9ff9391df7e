"""Detects state of the script that changes from step to step and is in no snapshot."""

import hashlib
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from samestep.data.content import find_leaves, view_bytes
from samestep.snapshot.async_copy import locate
from samestep.train.batches import Batches
from samestep.train.generators import KINDS, find_things, look_into, read_generator
from samestep.train.steps import Step, StepObserver

LOOK_AT = (1, 2, 4, 8, 16)  # steps of this start at which to look; the first look finds the objects, the others compare
LOOK_AT_EPOCHS = 3  # also at the ends of this many epochs
MAX_THINGS = 2_000  # most objects of the script to search: some milliseconds
MAX_VALUES = 4_000  # of a state, with their keys
MAX_ELEMENTS = 512  # of a tensor, evenly spaced


class Unprepared(StepObserver):
    """Watches the objects to which the script's modules and functions refer, over the first steps of a start.

    Looks at a sample of each state, so that a look takes milliseconds. On one rank.

    Args:
        objects: the objects passed to `run.prepare`.
        say: prints a message.
    """

    def __init__(self, objects: Mapping[str, Any], batches: Batches, say: Callable[[str], None]) -> None:
        self._objects, self._batches, self._say = objects, batches, say
        self._marks: dict[str, tuple[Any, str, int]] | None = None
        self._num_steps = self._num_epochs = 0
        # Parts of prepared objects, such as a scheduler's optimizer.
        parts = [part for each in objects.values() for _, part in look_into(each)]
        parts += [part for each in objects.values() if isinstance(each, nn.Module) for part in each.modules()]
        self._own = {id(each) for each in objects.values()}
        self._parts = self._own | {id(part) for part in parts}

    def end_step(self, step: Step) -> None:
        self._num_steps += 1
        if self._num_steps in LOOK_AT:
            self._look()

    def end_body(self, step: Step) -> None:
        if self._batches.epochs_done(step.number + 1) is not None:
            self._num_epochs += 1
            if self._num_epochs <= LOOK_AT_EPOCHS:
                self._look()

    def _look(self) -> None:
        # The tensors of prepared models, which other objects may hold as well.
        modules = [thing for thing in self._objects.values() if isinstance(thing, nn.Module)]
        known = {locate(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}
        if self._marks is None:
            spec = self._batches.spec
            roots = {"the data set": spec.dataset, "collate_fn": spec.collate_fn}
            if self._batches.lanes is not None:
                del roots["the data set"]  # its state is in the snapshots
            found = find_things(roots, self._is_wanted, max_looks=MAX_THINGS)
            self._marks = {path: (thing, _mark(thing, known), _read_seed(thing)) for path, thing in found.items()}
            return
        changed = {
            path: thing
            for path, (thing, mark, seed) in self._marks.items()
            # A generator that is seeded in each step carries no state from step to step.
            if mark != _mark(thing, known) and seed == _read_seed(thing)
        }
        for path in changed:
            del self._marks[path]
        wholes = tuple(f"{path}{mark}" for path in changed for mark in (".", "["))
        if changed := {path: thing for path, thing in changed.items() if not path.startswith(wholes)}:
            self._warn(changed)

    def _warn(self, changed: Mapping[str, Any]) -> None:
        scalers = {path: thing for path, thing in changed.items() if isinstance(thing, GradScaler)}
        generators = {path: thing for path, thing in changed.items() if isinstance(thing, KINDS)}
        others = {path: thing for path, thing in changed.items() if path not in scalers and path not in generators}
        for things, cure in (
            (others, "pass it to run.prepare, or keep what changes in run.state"),
            (scalers, "leave it out, samestep.Run(precision='fp16') scales the loss itself"),
            (generators, "draw from torch, numpy.random or random themselves, which samestep seeds for each step"),
        ):
            if things:
                names = ", ".join(f"{path} ({type(thing).__name__})" for path, thing in things.items())
                self._say(f"not in any snapshot, but changed by the steps: {names}; a resumed run may differ: {cure}")

    def _is_wanted(self, thing: Any) -> bool:
        if isinstance(thing, KINDS):
            return True
        if isinstance(thing, type | DataLoader) or id(thing) in self._parts:
            return False
        # Look at the class: an object may answer to any name.
        if not all(callable(getattr(type(thing), name, None)) for name in ("state_dict", "load_state_dict")):
            return False
        # For a model that contains a prepared one, the known tensors are left out; a schedule's state has nothing of
        # its optimizer. A class of the script that refers to prepared objects may save them, too.
        return isinstance(thing, nn.Module | LRScheduler) or not any(
            id(part) in self._own for _, part in look_into(thing)
        )


def _mark(thing: Any, known: set[int]) -> str:
    """Return a hash of a sample of an object's state, without the tensors at `known`; "" if it cannot be read."""
    if isinstance(thing, KINDS):
        return read_generator(thing)
    digest = hashlib.blake2b(digest_size=16)
    try:
        for value in islice(find_leaves(thing.state_dict()), MAX_VALUES):
            if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
                value = torch.from_numpy(value)
            if isinstance(value, Tensor) and locate(value) not in known:
                flat = value.detach().reshape(-1)
                digest.update(view_bytes(flat[:: max(1, flat.numel() // MAX_ELEMENTS)].cpu().contiguous()))
            elif isinstance(value, bool | int | float | str | np.number):
                digest.update(repr(value).encode())
    except Exception:
        return ""
    return digest.hexdigest()


def _read_seed(thing: Any) -> int:
    return thing.initial_seed() if isinstance(thing, torch.Generator) else 0
