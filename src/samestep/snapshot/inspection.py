"""Checks of a training state while a snapshot of it is written: finite, and the same on all ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from samestep.errors import InvalidValue
from samestep.snapshot.async_copy import is_finite, locate
from samestep.watch.replica_checksums import checksum

_MASK = 2**64 - 1  # checksums of slices add up modulo 2**64, as those of elements do


@dataclass(frozen=True)
class TrainingState:
    """The content of a snapshot. The tensors are those of the models and optimizers, not copies.

    Attributes:
        contents: the whole state, for `encode`.
        notes: further entries of the manifest's `meta`, see `RunDirectory.mark`.
        checked: tensors that must be finite, with names for messages.
        stable: tensors that change only in an update, so that they can be copied during the next step.
        replicated: parameters to compare over the ranks, by name; none if no comparison is due.
        compare: compares the checksums of these tensors over the ranks, and raises Error if they differ.
        same: tensors that are the same on all ranks.
        is_mine: as in `encode`, if the ranks divide the state. `contents` then has what this rank stores.
    """

    contents: Mapping[str, Any]
    notes: Mapping[str, Any]
    checked: Sequence[tuple[str, Tensor]]
    stable: Sequence[Tensor]
    replicated: Sequence[tuple[str, Tensor]]
    compare: Callable[[Mapping[str, int]], None]
    same: Sequence[Tensor] = ()
    is_mine: Callable[[Tensor], bool] | None = None


@dataclass(frozen=True)
class SnapshotOrder:
    """Snapshots of one step to be written.

    Attributes:
        names: names of the snapshots; None for a numbered one.
        structure, tensors: the encoded state.
        meta: see `RunDirectory.mark`.
        is_last: whether the loop ends here.
        drafts: the directories in which they are written, see `Store.begin`. Empty on ranks that do not write.
    """

    step: int
    names: Sequence[str | None] = ()
    structure: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    is_last: bool = False
    drafts: Sequence[str] = ()


class Inspection:
    """Checks whether a state is finite and the same on all ranks. `look` may be called in another thread.

    Attributes:
        tensors: the tensors to look at, by their addresses (`locate`).
    """

    def __init__(self, state: TrainingState, step: int) -> None:
        self._step = step
        self._compare = state.compare
        self._labels = {locate(tensor): label for label, tensor in reversed(state.checked)}
        self._names = {locate(tensor): name for name, tensor in reversed(state.replicated)}
        self.tensors: Mapping[int, Tensor] = {
            locate(tensor): tensor for _, tensor in [*state.checked, *state.replicated]
        }
        self._not_finite: set[str] = set()
        self._checksums: dict[str, int] = {}

    def look(self, address: int, tensor: Tensor) -> None:
        """Look at a tensor or its copy, whole or in consecutive slices. `address`: the address of the tensor itself."""
        label = self._labels.get(address)
        name = self._names.get(address)
        if label is not None and not is_finite(tensor):
            self._not_finite.add(label)
        if name is not None:
            self._checksums[name] = self._checksums.get(name, 0) + int(checksum(tensor))

    def look_again(self) -> None:
        """Look at all tensors again, after a copy that failed half-way: other ranks have looked at all of theirs."""
        self._not_finite = set()
        self._checksums = {}
        for address, tensor in self.tensors.items():
            self.look(address, tensor)

    def find_infinite(self) -> str:
        """Return the label of a tensor of this rank that is not finite; "" if all are finite."""
        return next((label for label in self._labels.values() if label in self._not_finite), "")

    def conclude(self, label: str) -> None:
        """Compare the ranks. All ranks call this, after looking at all tensors.

        Args:
            label: of a tensor that is not finite, from `find_infinite`.

        Raises:
            InvalidValue: a tensor is not finite, or not the same on all ranks.
        """
        if label:
            raise InvalidValue(
                f"{label} is not finite after step {self._step}: this state is not saved, and the previous snapshot "
                "is kept; check the learning rate, clipping and precision",
                code="SS206",
            )
        if self._names:
            names = [name for name in reversed(self._names.values()) if name in self._checksums]
            self._compare({name: self._checksums[name] & _MASK for name in names})
