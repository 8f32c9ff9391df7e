"""The values of `step.log` in the control block."""

from collections.abc import Sequence

from samestep.engine.control import Control
from samestep.plan.tree import Layout
from samestep.world.group import Group

Means = list[dict[str, tuple[float, float]]]  # per micro-batch: name -> the mean of its logged values, and their number
Table = list[list[float]]  # per micro-batch, per name


class LoggedNames:
    """The names for which the control block has entries: the same on all ranks.

    Attributes:
        names: in the order of the block.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._new: list[str] = []  # of the pass in progress

    def has_new(self, logged: Means) -> bool:
        """Return whether this rank's values have names without an entry."""
        return any(logged) and any(name not in self.names for values in logged for name in values)

    def tabulate(self, logged: Means) -> tuple[Table, Table]:
        """Return the entries for this rank's values: the means, and the numbers of values."""
        if not self.names:
            return [[]] * len(logged), [[]] * len(logged)
        entries = [[values.get(name, (0.0, 0)) for name in self.names] for values in logged]
        return [[mean for mean, _ in row] for row in entries], [[count for _, count in row] for row in entries]

    def add_new(self) -> None:
        """Add the new names that `collect` has found, once all ranks have them."""
        self.names += self._new
        self._new = []

    def collect(self, logged: Means, controls: Sequence[Control], group: Group, layout: Layout) -> Means:
        """Return the logged values of all ranks' micro-batches; nothing if no rank has logged a value yet.

        Values under new names need an additional exchange. `add_new` adds these names.
        """
        self._new = []
        has_new = any(control.has_new_names for control in controls)
        if not self.names and not has_new:
            return []
        if has_new:
            collected = layout.sort(group.gather(logged))
            self._new = sorted({name for values in collected for name in values} - {*self.names})
            return collected
        return [
            {name: (value, count) for name, value, count in zip(self.names, values, counts, strict=True) if count}
            for values, counts in zip(
                layout.sort(control.values for control in controls),
                layout.sort(control.counts for control in controls),
                strict=True,
            )
        ]
