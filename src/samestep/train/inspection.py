"""What is looked at in a state on its way into a snapshot."""

from collections.abc import Mapping

from torch import Tensor

from samestep.errors import Error
from samestep.snapshot.async_copy import is_finite, locate
from samestep.train.replicas import Replicas, name_replicated
from samestep.train.stateful import Objects, list_checked
from samestep.watch.replica_checksums import checksum

_MASK = 2**64 - 1  # sums of pieces are added up modulo 2**64, as those of elements are


class Inspection:
    """Whether a state is finite and the same on all ranks. `look` may be called by another thread.

    Attributes:
        tensors: what is to be looked at, by name.
    """

    def __init__(self, objects: Objects, replicas: Replicas, step: int) -> None:
        self._replicas, self._step = replicas, step
        checked = list_checked(objects)
        compared = list(name_replicated(objects)) if replicas.are_to_compare(step) else []
        self._labels = {locate(tensor): label for label, tensor in reversed(checked)}
        self._names = {locate(tensor): name for name, tensor in reversed(compared)}
        self.tensors: Mapping[int, Tensor] = {locate(tensor): tensor for _, tensor in [*checked, *compared]}
        self._poisoned: set[str] = set()
        self._checksums: dict[str, int] = {}

    def look(self, place: int, tensor: Tensor) -> None:
        """Looks at a tensor, or at its copy, or at a piece of either: all its pieces, one after the other.

        Args:
            place: where in memory the tensor itself begins.
        """
        label, name = self._labels.get(place), self._names.get(place)
        if label is not None and (tensor.is_floating_point() or tensor.is_complex()) and not is_finite(tensor):
            self._poisoned.add(label)
        if name is not None:
            self._checksums[name] = self._checksums.get(name, 0) + int(checksum(tensor))

    def look_again(self) -> None:
        """At all of them anew, where they are, after a copy that has failed half-way: other ranks compare theirs."""
        self._poisoned, self._checksums = set(), {}
        for place, tensor in self.tensors.items():
            self.look(place, tensor)

    def is_sound(self) -> bool:
        """Once all tensors were looked at: whether they are finite. Of this rank alone."""
        return not self._poisoned

    def conclude(self) -> None:
        """Once all tensors were looked at. On all ranks.

        Raises:
            Error: one of them is not finite, or not the same on all ranks.
        """
        if not self.is_sound():
            poisoned = next(label for label in self._labels.values() if label in self._poisoned)
            raise Error(
                f"{poisoned} is not finite after step {self._step}: no snapshot is made of it, the last sound one "
                "stays; look at the learning rate, clipping and precision"
            )
        if self._names:
            names = [name for name in reversed(self._names.values()) if name in self._checksums]
            self._replicas.conclude(self._step, {name: self._checksums[name] & _MASK for name in names})
