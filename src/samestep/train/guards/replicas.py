"""Compares the models and the optimizers' state of all ranks at intervals."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from samestep.config import Interval
from samestep.errors import Error
from samestep.snapshot.async_copy import is_finite
from samestep.snapshot.inspection import TrainingState
from samestep.snapshot.snapshotter import Snapshotter
from samestep.torch_internals import get_local, is_sharded
from samestep.train.state.objects import (
    Objects,
    list_named,
    list_params,
    name_optimizers,
    strip_compiled,
    unwrap,
)
from samestep.watch.replica_checksums import checksum, combine, explain_drift, find_drift, read_back
from samestep.world.environment import read_host
from samestep.world.group import Group


def name_replicated(objects: Mapping[str, Any], *, has_divided_state: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that must be equal on all ranks after every step: parameters and the optimizers' state.

    The same objects always come in the same order, since a message names the first tensor that differs: models that an
    optimizer updates, then other models, such as averages, then the optimizers' state.

    Buffers are left out: a script may use one as a counter of its rank.

    Args:
        has_divided_state: whether each rank has the optimizers' state of other parameters, so that it is left out, too.
    """
    optimizers = name_optimizers(objects)
    updated = {id(param) for thing in optimizers.values() for param in list_params(thing)}
    models = [(name, unwrap(thing)) for name, thing in objects.items() if isinstance(thing, nn.Module)]
    models.sort(key=lambda item: updated.isdisjoint(map(id, item[1].parameters())))
    names: dict[int, str] = {}
    for name, model in models:
        for path, param in list_named(model):
            if id(param) not in names and not is_sharded(param):  # shared with another model
                names[id(param)] = f"{name}.{path}"
                yield f"{name}.{path}", param
    if has_divided_state:
        return
    order = {number: place for place, number in enumerate(names)}
    for name, optimizer in optimizers.items():
        states: Any = sorted(optimizer.state.items(), key=lambda item: order.get(id(item[0]), len(order)))
        for number, (owner, state) in enumerate(states):
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if isinstance(value, Tensor):
                    yield f"{key} of {names.get(id(owner), f'parameter {number}')} in {name}", value


def list_checked(objects: Objects) -> list[tuple[str, Tensor]]:
    """Return the tensors that training must not make infinite or nan, with names for messages.

    These are parameters (of a sharded one, this rank's shard) and BatchNorm's statistics. Other buffers, such as masks,
    may be infinite. An optimizer's state may be, too, or hold memory that is never read; what it spoils shows in the
    parameters after the next update.
    """
    found: list[tuple[str, Tensor]] = []
    for name, thing in objects.items():
        if isinstance(thing, nn.Module):
            found += [(f"{name}.{path}", get_local(param)) for path, param in list_named(thing)]
            found += [
                (f"{name}.{strip_compiled(path)}.{key}", buffer)
                for path, part in unwrap(thing).named_modules()
                if isinstance(part, _BatchNorm)
                for key, buffer in part.named_buffers(recurse=False)
            ]
    return found


def list_stable(objects: Objects) -> list[Tensor]:
    """Return the tensors that change only in or after an update: parameters and the optimizers' state."""
    modules = [unwrap(thing) for thing in objects.values() if isinstance(thing, nn.Module)]
    tensors = [param for module in modules for param in module.parameters()]
    tensors += [value for optimizer in name_optimizers(objects).values() for value in _state_tensors(optimizer)]
    return [get_local(tensor) for tensor in tensors]


def _state_tensors(optimizer: Optimizer) -> list[Tensor]:
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


class ReplicaChecks:
    """Compares the state of `objects` between the ranks.

    Args:
        every: interval of comparisons; None: never.
        has_divided_state: see `name_replicated`.
    """

    def __init__(
        self, objects: Mapping[str, Any], group: Group, every: Interval | None, *, has_divided_state: bool
    ) -> None:
        self._has_divided_state = has_divided_state
        self._objects = objects
        self._group = group
        self._every = every if group.world_size > 1 else None
        self._alike_at: int | None = None
        self._settled: dict[str, ref[Tensor]] = {}  # tensors that were equal in the last comparison
        self._ignored: set[str] = set()  # names of optimizer state that differed from the first comparison on
        self._begun_infinite: set[str] = set()  # labels of `list_checked`
        self._restored: Mapping[str, int] = {}

    def note_restored(self) -> None:
        """Note the state in which the run resumes, for `find_change`."""
        self._restored = self._read_checksums(self._name_replicated())

    def find_change(self) -> str:
        """Return the name of a tensor that the script has changed since `note_restored`; "" if there is none."""
        if not self._restored:
            return ""
        now = self._read_checksums(self._name_replicated())
        before, self._restored = self._restored, {}
        return next((name for name, value in before.items() if now.get(name) != value), "")

    def watch(self, snapshotter: Snapshotter) -> None:
        """Begin to watch, before the first step of a loop, so that a change before its update is noticed."""
        if snapshotter.watch(list_stable(self._objects)):
            self._begun_infinite = {label for label, tensor in list_checked(self._objects) if not is_finite(tensor)}

    def is_due(self, step: int, epochs_done: int | None) -> bool:
        """Return whether a comparison is due after `step` steps. `epochs_done`: at the end of an epoch, else None."""
        return self._every is not None and self._every.is_due(step, epochs_done)

    def compare(self, step: int) -> None:
        """Compare after `step` steps, on all ranks: one exchange of 8 bytes.

        Raises:
            Error: they differ; the message names rank, host and tensor. Raised on all ranks.
        """
        if self._alike_at == step:
            return
        replicated = self._name_replicated()
        self._compare(step, replicated, self._read_checksums(replicated))

    def _read_checksums(self, tensors: Mapping[str, Tensor]) -> Mapping[str, int]:
        return read_back({name: checksum(tensor) for name, tensor in tensors.items()})

    def _compare(self, step: int, replicated: Mapping[str, Tensor], checksums: Mapping[str, int]) -> None:
        checksums = {name: value for name, value in checksums.items() if name not in self._ignored}
        if len(set(self._group.gather_number(combine(checksums)))) > 1:
            replies = self._group.gather((read_host(), checksums, [*self._find_proofs(replicated)]))
            replicas = [replica for _, replica, _ in replies]
            proofs = set[str].intersection(*({*names} for *_, names in replies))
            drift = find_drift([{name: replica[name] for name in replica if name in proofs} for replica in replicas])
            if drift is not None:
                raise Error(explain_drift(drift, [host for host, *_ in replies], step, self._alike_at), code="SS502")
            self._ignored |= {name for name, value in checksums.items() if any(r.get(name) != value for r in replicas)}
        self._settled = {name: ref(tensor) for name, tensor in replicated.items()}
        self._alike_at = step

    def _name_replicated(self) -> dict[str, Tensor]:
        return dict(name_replicated(self._objects, has_divided_state=self._has_divided_state))

    def _find_proofs(self, replicated: Mapping[str, Tensor]) -> Iterator[str]:
        """Yield the names of tensors that prove a drift if they differ.

        These are the parameters, and the optimizer state that was equal before. Other state may be memory that the
        optimizer has allocated and never reads.
        """
        for name, tensor in replicated.items():
            before = self._settled.get(name)
            if isinstance(tensor, nn.Parameter) or (before is not None and before() is tensor):
                yield name

    def build_training_state(
        self,
        build: Callable[[], dict[str, Any]],
        notes: Mapping[str, Any],
        step: int,
        is_mine: Callable[[Tensor], bool] | None,
    ) -> TrainingState:
        """Return the content of a snapshot after `step` steps. `build`, `notes`, `is_mine`: see `TrainingState`."""
        is_due = self._every is not None and self._alike_at != step
        replicated = self._name_replicated()
        return TrainingState(
            build,
            notes,
            checked=[each for each in list_checked(self._objects) if each[0] not in self._begun_infinite],
            stable=list_stable(self._objects),
            replicated=[*replicated.items()],
            compare=partial(self._compare, step, replicated) if is_due else None,
            is_mine=is_mine,
        )
