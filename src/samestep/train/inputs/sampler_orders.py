"""The orders that a script's sampler gives."""

from collections.abc import Callable, Iterable

import numpy as np

from samestep.data.loader import seed_all
from samestep.errors import InvalidType, InvalidValue
from samestep.plan.order import GivenOrder, Indices
from samestep.plan.seeds import derive

Sampler = Callable[[int], Iterable[int]]


class SamplerOrders:
    """Calls the sampler once for each epoch, and holds its orders until they are dropped. See `LoopPlan.find_order`.

    Args:
        sampler: maps an epoch to the indices of its samples.
        seed: the seed of the run. The global generators are seeded from it before a call.
        num_samples: length of the data set.
    """

    def __init__(self, sampler: Sampler, seed: int, num_samples: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._num_samples = num_samples
        self._open: dict[int, GivenOrder] = {}
        self._new: list[int] = []  # since the last call of `take_new`
        self._is_proven = False  # the sampler gives the same indices when it is called again

    def find(self, epoch: int) -> GivenOrder:
        """Return the order of an epoch. Calls the sampler if it is later than all known ones.

        Raises:
            InvalidType, InvalidValue: the sampler gave something else than indices, or other ones in a second call.
        """
        if epoch not in self._open:
            assert epoch > max(self._open, default=-1), f"the order of epoch {epoch} was dropped"
            self._add(epoch, self._call_sampler(epoch))
        return self._open[epoch]

    def restore(self, epoch: int, indices: Indices) -> None:
        """Set the order of an epoch, which the sampler gave in an earlier start.

        The sampler may depend on a state that has changed since the epoch began, so it is not called again.
        """
        self._add(epoch, GivenOrder(indices, self._num_samples, epoch))

    def drop_before(self, epoch: int) -> None:
        """Forget the orders of earlier epochs."""
        self._open = {each: order for each, order in self._open.items() if each >= epoch}

    def take_new(self) -> dict[int, Indices]:
        """Return the indices of the epochs that are known since the last call."""
        new = self._new
        self._new = []
        return {epoch: self._open[epoch].indices for epoch in new}

    def _add(self, epoch: int, order: GivenOrder) -> None:
        self._open[epoch] = order
        self._new.append(epoch)

    def _call_sampler(self, epoch: int) -> GivenOrder:
        order = self._call_once(epoch)
        if not self._is_proven and not np.array_equal(order.indices, self._call_once(epoch).indices):
            raise InvalidValue(
                f"sampler({epoch}) gave other indices when it was called again: let them depend on the epoch, on "
                "what run.prepare restores, on run.state and on the global generators, which the run seeds",
                code="SS308",
            )
        self._is_proven = True
        return order

    def _call_once(self, epoch: int) -> GivenOrder:
        seed_all(derive(self._seed, "order", step=epoch))
        try:
            given = self._sampler(epoch)
            if not isinstance(given, Iterable):
                raise InvalidType(
                    f"sampler({epoch}) gave {given!r}: return the epoch's sample indices, such as a list", code="SS307"
                )
            return GivenOrder(given, self._num_samples, epoch)  # a generator runs only here
        except Exception as error:
            error.add_note(f"raised in sampler({epoch})")
            raise
