"""The values of `step.log` in the control block."""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add

from torch import Tensor

from samestep.engine.control import Control
from samestep.engine.host_copies import HostValue
from samestep.plan.tree import Layout
from samestep.world.group import Group

Means = list[dict[str, tuple[float, float]]]  # per micro-batch: name -> the mean of its logged values, and their number
Calls = Mapping[int, Mapping[str, Sequence[float | HostValue]]]  # micro-batch -> name -> the values logged there
Value = float | Tensor  # a tensor only on a GPU: float64, not copied to the host yet
Table = list[list[float]]  # per micro-batch, per name


def compute_means(calls: Calls, held: range) -> Means:
    """Return the mean of the calls in each of these micro-batches. Waits for a GPU to compute the values."""
    # The built-in sum differs: since Python 3.12 it compensates for rounding.
    return [
        {
            name: (reduce(add, map(float, values), 0.0) / len(values), len(values))
            for name, values in calls.get(v, {}).items()
        }
        for v in held
    ]


class LoggedNames:
    """The names for which the control block has entries: the same on all ranks.

    Attributes:
        names: in the order of the block.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def tabulate(self, logged: Means) -> tuple[bool, Table, Table]:
        """Return whether this rank's values have names without an entry, and the entries: means and counts."""
        has_new = any(name not in self.names for values in logged for name in values)
        entries = [[values.get(name, (0.0, 0.0)) for name in self.names] for values in logged]
        return has_new, [[mean for mean, _ in row] for row in entries], [[count for _, count in row] for row in entries]

    def gather(self, logged: Means, group: Group, layout: Layout) -> tuple[Means, list[str]]:
        """Return the logged values of all ranks' micro-batches, with further ones, and these, see `add`.

        This is an additional exchange.
        """
        gathered = layout.sort(group.gather(logged))
        return gathered, sorted({name for values in gathered for name in values} - {*self.names})

    def read(self, controls: Sequence[Control], layout: Layout) -> Means:
        """Return the logged values of all ranks' micro-batches."""
        tables = zip(
            layout.sort([control.values for control in controls]),
            layout.sort([control.counts for control in controls]),
            strict=True,
        )
        return [
            {name: (value, count) for name, value, count in zip(self.names, values, counts, strict=True) if count}
            for values, counts in tables
        ]

    def add(self, names: Sequence[str]) -> None:
        """Add the new names that `gather` has found, once all ranks have them."""
        self.names += names
