"""Detects state of the script that changes from step to step and is in no snapshot."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from samestep.console import warn
from samestep.data.content import find_leaves
from samestep.hashing import hash_pieces
from samestep.snapshot.async_copy import locate
from samestep.tagged import view_bytes
from samestep.train.generators import KINDS, read_generator
from samestep.train.inputs.loop_data import LoopData
from samestep.train.script_objects import find_things, look_into
from samestep.train.state.stateful import find_parts, find_saved, unwrap
from samestep.train.step.steps import Step, StepObserver

LOOK_AT = (1, 2, 4, 8, 16)  # steps of this start after which to look
LOOK_AT_EPOCHS = 3  # also after this many epochs
MAX_THINGS = 2_000  # most objects of the script to search: some milliseconds
MAX_VALUES = 4_000  # of a state, with their keys
MAX_ELEMENTS = 512  # of a tensor, evenly spaced


@dataclass
class _Seen:
    """A state of an object of the script.

    Attributes:
        begun: its mark when the pass over a step's micro-batches began, at the last look.
        ended: its mark at the end of the body before this look.
        seed: the seed of a generator.
    """

    thing: Any
    begun: str
    seed: int
    ended: str = ""


class UnpreparedStateChecks(StepObserver):
    """Watches the objects to which the script's variables refer, over the first steps of a start.

    A look compares the states at the end of a body, where snapshots are taken, and at the beginning of the next pass.
    What has changed in between was written by the script. It is no carried state if it is then equal to a prepared
    model, or has the state that it had at the beginning of an earlier epoch. Looks at a sample of each state, so that
    it takes milliseconds. On one rank.

    Args:
        objects: the objects passed to `run.prepare`.
        say: prints a message.
    """

    def __init__(self, objects: Mapping[str, Any], data: LoopData, say: Callable[[str], None]) -> None:
        self._objects = objects
        self._data = data
        self._say = say
        self._modules = [unwrap(thing) for thing in objects.values() if isinstance(thing, nn.Module)]
        self._seen: dict[str, _Seen] | None = None
        self._at_epochs: dict[str, str] = {}  # marks at the beginning of epochs, of what can be reset
        self._num_steps = self._num_epochs = 0
        self._is_due = self._is_epoch = False
        # Parts of prepared objects, such as the schedulers in a SequentialLR. A wrapper may hold some that it does not
        # save.
        parts = [part for module in self._modules for part in module.modules()]
        held = find_parts(objects, in_schedules=True)
        schedules = [part for part in held if isinstance(part, LRScheduler)]
        unsaved = {id(schedule) for schedule in schedules} - find_saved(objects, schedules)
        self._own = {id(each) for each in objects.values()}
        self._parts = self._own | {id(part) for part in (*parts, *held)} - unsaved

    def end_body(self, step: Step) -> None:
        self._num_steps += 1
        self._is_epoch = self._data.plan.epochs_done(step.number + 1) is not None
        self._num_epochs += self._is_epoch
        self._is_due = self._num_steps in LOOK_AT or (self._is_epoch and self._num_epochs <= LOOK_AT_EPOCHS)
        if self._is_due and self._seen is not None:
            known = self._find_known()
            for seen in self._seen.values():
                seen.ended = _mark(seen.thing, known)

    def begin_pass(self, step: Step) -> None:
        if self._is_due and step.num_passes == 0:
            self._is_due = False
            self._look()

    def _find_known(self) -> set[int]:
        """Return the addresses of the prepared models' tensors, which other objects may hold as well."""
        return {locate(tensor) for module in self._modules for tensor in (*module.parameters(), *module.buffers())}

    def _look(self) -> None:
        known = self._find_known()
        if self._seen is None:
            spec = self._data.spec
            roots = {"the data set": spec.dataset, "collate_fn": spec.collate_fn}
            if self._data.lanes is not None:
                del roots["the data set"]  # its state is in the snapshots
            found = find_things(roots, self._is_wanted, max_looks=MAX_THINGS)
            self._seen = {path: _Seen(thing, _mark(thing, known), _read_seed(thing)) for path, thing in found.items()}
            return
        changed = {path: seen.thing for path, seen in self._seen.items() if self._is_carried(path, seen, known)}
        for path in changed:
            del self._seen[path]
        wholes = tuple(f"{path}{mark}" for path in changed for mark in (".", "["))
        if changed := {path: thing for path, thing in changed.items() if not path.startswith(wholes)}:
            self._warn(changed)

    def _is_carried(self, path: str, seen: _Seen, known: set[int]) -> bool:
        """Return whether an object carries a state that has changed from one step to another."""
        before = seen.begun
        seen.begun = _mark(seen.thing, known)
        if seen.seed != _read_seed(seen.thing):  # seeded in each step
            return False
        if callable(getattr(type(seen.thing), "reset", None)):  # such as a metric: it may be reset in each epoch
            before = self._at_epochs.setdefault(path, seen.begun) if self._is_epoch else seen.begun
        if seen.begun == before:
            return False
        return seen.begun == seen.ended or not self._is_copy(seen.begun)

    def _is_copy(self, mark: str) -> bool:
        """Return whether a mark is that of a prepared model or of a part of it."""
        parts = dict.fromkeys(part for module in self._modules for part in module.modules())
        return any(_mark(part, set()) == mark for part in parts)

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
                sentence = f"not in any snapshot, but changed by the steps: {names}; a resumed run may differ: {cure}"
                warn(self._say, sentence, start="not in any snapshot")

    def _is_wanted(self, thing: Any) -> bool:
        if isinstance(thing, KINDS):
            return True
        if isinstance(thing, type | DataLoader) or id(thing) in self._parts:
            return False
        # Of the class, because an object may have a `__getattr__` that returns something for any name.
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

    def read() -> "Iterator[bytes | memoryview]":
        for value in islice(find_leaves(thing.state_dict()), MAX_VALUES):
            if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
                value = torch.from_numpy(value)
            if isinstance(value, Tensor) and locate(value) not in known:
                flat = value.detach().reshape(-1)
                yield view_bytes(flat[:: max(1, flat.numel() // MAX_ELEMENTS)].cpu().contiguous())
            elif isinstance(value, bool | int | float | str | np.number):
                yield repr(value).encode()

    try:
        return hash_pieces(read())
    except Exception:
        return ""


def _read_seed(thing: Any) -> int:
    return thing.initial_seed() if isinstance(thing, torch.Generator) else 0
