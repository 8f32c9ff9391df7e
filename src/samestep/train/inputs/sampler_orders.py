"""The orders that a script's sampler gives."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from samestep.data.loader import seed_all
from samestep.errors import InvalidType, InvalidValue
from samestep.plan.order import Indices, check_order
from samestep.plan.seeds import derive

Sampler = Callable[[int], Iterable[int]]


class SamplerOrders:
    """Calls the sampler once for each epoch of a loop, and holds the orders of the newest epochs.

    Args:
        sampler: maps an epoch to the indices of its samples.
        seed: the seed of the run. The global generators are seeded from it before a call.
        num_samples: length of the data set.
        first_epoch: the loop's first epoch.
        epoch_length: number of samples of an epoch, if the sampler gave it before a restart. Else the sampler is called
            for the first epoch.

    Attributes:
        epoch_length: number of samples of each epoch.

    Raises:
        InvalidType, InvalidValue: as `find`.
    """

    def __init__(
        self, sampler: Sampler, seed: int, num_samples: int, first_epoch: int, epoch_length: int | None
    ) -> None:
        self._sampler = sampler
        self._seed = seed
        self._num_samples = num_samples
        self._open: dict[int, Indices] = {}
        self._new: dict[int, Indices] = {}  # since the last call of `open_epochs`
        self._is_proven = False  # the sampler gives the same indices when it is called again
        if epoch_length is None:
            order = self._call_sampler(first_epoch)
            epoch_length = len(order)
            self._add(first_epoch, order)
        self.epoch_length = epoch_length

    def find(self, epoch: int) -> Indices:
        """Return the order of an epoch. Calls the sampler if it is later than all known ones. See `LoopPlan`.

        Raises:
            InvalidType, InvalidValue: the sampler gave something else than indices, other ones in a second call, or
                more or fewer than for the first epoch.
        """
        if epoch not in self._open:
            assert epoch > max(self._open, default=-1), f"the order of epoch {epoch} was dropped"
            order = self._call_sampler(epoch)
            if len(order) != self.epoch_length:
                raise InvalidValue(
                    f"sampler({epoch}) gave {len(order)} indices, and {self.epoch_length} for the epochs before: give "
                    "as many for each epoch, or use one loop per length",
                    code="SS312",
                )
            self._add(epoch, order)
        return self._open[epoch]

    def restore(self, epoch: int, indices: Indices) -> None:
        """Set the order of an epoch, which the sampler gave in an earlier start.

        The sampler may depend on a state that has changed since the epoch began, so it is not called again.
        """
        self._add(epoch, check_order(indices, self._num_samples, epoch))

    def open_epochs(self, epochs: range) -> dict[int, Indices]:
        """Find the orders of epochs, and forget those of earlier ones.

        Returns:
            The indices of the epochs that are known since the last call.
        """
        self._open = {epoch: self.find(epoch) for epoch in epochs}
        new = self._new
        self._new = {}
        return new

    def state_dict(self) -> dict[str, Any]:
        """Return the order of the newest epoch, for a snapshot. It gives the length of the others."""
        epoch = max(self._open)
        return {"epoch": epoch, "indices": self._open[epoch]}

    def _add(self, epoch: int, order: Indices) -> None:
        self._open[epoch] = order
        self._new[epoch] = order

    def _call_sampler(self, epoch: int) -> Indices:
        order = self._call_once(epoch)
        if not self._is_proven and not np.array_equal(order, self._call_once(epoch)):
            raise InvalidValue(
                f"sampler({epoch}) gave other indices when it was called again: let them depend on the epoch, on "
                "what run.prepare restores, on run.state and on the global generators, which the run seeds",
                code="SS308",
            )
        self._is_proven = True
        return order

    def _call_once(self, epoch: int) -> Indices:
        seed_all(derive(self._seed, "order", step=epoch))
        try:
            given = self._sampler(epoch)
            if not isinstance(given, Iterable):
                raise InvalidType(
                    f"sampler({epoch}) gave {given!r}: return the epoch's sample indices, such as a list", code="SS307"
                )
            return check_order(given, self._num_samples, epoch)  # a generator runs only here
        except Exception as error:
            error.add_note(f"raised in sampler({epoch})")
            raise
