"""Compares the models of all ranks at intervals."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.config import Interval
from samestep.errors import Error
from samestep.snapshot.inspection import TrainingState
from samestep.snapshot.snapshotter import Snapshotter
from samestep.torch_internals import get_local, is_sharded
from samestep.train.state.objects import Objects, list_tensors, strip_compiled
from samestep.watch.replica_checksums import checksum, combine, explain_drift, find_drift, read_back
from samestep.world.environment import read_host
from samestep.world.group import Group


def name_replicated(objects: Objects) -> dict[str, nn.Parameter]:
    """Return the tensors that must be equal on all ranks after every step: the parameters.

    An optimizer's state that differs makes parameters differ in the next update. It may also hold memory that is never
    read. Buffers are left out, because a script may use one as a counter of its rank.
    """
    return {name: param for name, param in objects.name_params().items() if not is_sharded(param)}


def list_checked(objects: Objects) -> list[tuple[str, Tensor]]:
    """Return the tensors that training must not make infinite or nan, with names for messages.

    These are trained parameters (of a sharded one, this rank's shard) and BatchNorm's statistics. Other buffers, such
    as masks, may be infinite. An optimizer's state may be, too, or hold memory that is never read; what it spoils shows
    in the parameters after the next update.
    """
    found = [(name, get_local(param)) for name, param in objects.name_params().items() if param.requires_grad]
    for name, module in objects.modules.items():
        found += [
            (f"{name}.{strip_compiled(path)}.{key}", buffer)
            for path, child in module.named_modules()
            if isinstance(child, _BatchNorm)
            for key, buffer in child.named_buffers(recurse=False)
        ]
    return found


def list_stable(objects: Objects) -> list[Tensor]:
    """Return the tensors that change only in or after an update: parameters and the optimizers' state."""
    tensors: list[Tensor] = [*objects.name_params().values()]
    for optimizer in objects.optimizers.values():
        tensors += list_tensors([*optimizer.state.values()])
    return [get_local(tensor) for tensor in tensors]


class ReplicaChecks:
    """Compares the parameters of `objects` between the ranks.

    Args:
        every: interval of comparisons; None: never.
        has_divided_state: whether each rank has the optimizers' state of other parameters.
    """

    def __init__(self, objects: Objects, group: Group, every: Interval | None, *, has_divided_state: bool) -> None:
        self._has_divided_state = has_divided_state
        self._objects = objects
        self._group = group
        self._every = every if group.world_size > 1 else None
        self._alike_at: int | None = None
        self._restored: Mapping[str, int] = {}

    def note_restored(self) -> None:
        """Note the state in which the run resumes, for `find_change`."""
        self._restored = self._read_checksums()

    def find_change(self) -> str:
        """Return the name of a parameter that the script has changed since `note_restored`; "" if there is none."""
        before, self._restored = self._restored, {}
        now = self._read_checksums() if before else {}
        return next((name for name, value in before.items() if now.get(name) != value), "")

    def watch(self, snapshotter: Snapshotter) -> None:
        """Begin to watch, before the first step of a loop, so that a change before its update is noticed."""
        snapshotter.detect_writes(list_stable(self._objects))

    def is_due(self, step: int, epochs_done: int | None) -> bool:
        """Return whether a comparison is due after `step` steps. `epochs_done`: at the end of an epoch, else None."""
        return self._every is not None and self._every.is_due(step, epochs_done)

    def compare(self, step: int) -> None:
        """Compare after `step` steps, on all ranks: one exchange of 8 bytes.

        Raises:
            Error: they differ; the message names rank, host and tensor. Raised on all ranks.
        """
        if self._alike_at != step:
            self._compare(step, self._read_checksums())

    def _read_checksums(self) -> Mapping[str, int]:
        return read_back({name: checksum(tensor) for name, tensor in name_replicated(self._objects).items()})

    def _compare(self, step: int, checksums: Mapping[str, int]) -> None:
        if len(set(self._group.gather_number(combine(checksums)))) > 1:
            replies = self._group.gather((read_host(), checksums))
            drift = find_drift([replica for _, replica in replies])
            if drift is not None:
                raise Error(explain_drift(drift, [host for host, _ in replies], step, self._alike_at), code="SS502")
        self._alike_at = step

    def build_training_state(
        self,
        build: Callable[[], dict[str, Any]],
        notes: Mapping[str, Any],
        step: int,
        is_mine: Callable[[Tensor], bool] | None,
    ) -> TrainingState:
        """Return the content of a snapshot after `step` steps. `build`, `notes`, `is_mine`: see `TrainingState`."""
        is_due = self._every is not None and self._alike_at != step
        replicated = name_replicated(self._objects)
        stable = list_stable(self._objects)
        return TrainingState(
            build,
            notes,
            checked=list_checked(self._objects),
            stable=stable,
            replicated=[*replicated.items()] if is_due else [],
            compare=partial(self._compare, step),
            same=[*replicated.values()] if self._has_divided_state else stable,
            is_mine=is_mine,
        )
