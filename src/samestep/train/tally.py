"""What the steps of a run add up to, beside its weights: the same on all ranks, and carried by snapshots."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

Value = float | Tensor  # a tensor only on a GPU: float64, not read back yet


class Tally:
    """Counts over all steps of a run, its restarts included, and averages over the steps of its present epoch.

    A snapshot carries it in its manifest, not in its state: a script may log times, and the digest of a state is not to
    depend on them.

    Attributes:
        num_skipped: steps in which no micro-batch had a weight above 0, so that they made no update.
        names: of step.log so far, in the order in which their values travel.
        epoch: which the averages are of; -1 before the first step.
    """

    def __init__(self) -> None:
        self.num_skipped, self.epoch = 0, -1
        self.names: list[str] = []
        self._sums: dict[str, tuple[Value, float]] = {}  # of value times weight, and of weights

    def add(self, epoch: int, metrics: Mapping[str, tuple[Value, float]]) -> None:
        """Adds a step's values and their weights."""
        if epoch != self.epoch:
            self.epoch, self._sums = epoch, {}
        for name, (value, weight) in metrics.items():
            if weight:
                total, total_weight = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (total + value * weight, total_weight + weight)

    def averages(self) -> dict[str, float]:
        """The averages over the epoch's steps so far."""
        return {name: float(total) / weight for name, (total, weight) in self._sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """The tally as JSON, to the bit (which has no nan)."""
        sums = {name: [float(total).hex(), weight.hex()] for name, (total, weight) in self._sums.items()}
        return {"num_skipped": self.num_skipped, "epoch": self.epoch, "sums": sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; empty: of a snapshot that has none."""
        self.num_skipped, self.epoch = state.get("num_skipped", 0), state.get("epoch", -1)
        sums = state.get("sums", {})
        self._sums = {name: (float.fromhex(total), float.fromhex(weight)) for name, (total, weight) in sums.items()}
