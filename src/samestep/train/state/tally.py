"""Counts and averages over the steps of a run."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class MetricsTally:
    """Counts over all steps of a run, also before restarts, and averages over the steps of the current epoch.

    The same on all ranks. A snapshot stores it in the manifest, not in the state: a script may log times, and the
    digest of the state must not depend on them.

    Attributes:
        num_skipped: number of steps that made no update, see `StepResult.is_skipped`.
        epoch: the epoch of the averages; -1 before the first step.
    """

    def __init__(self) -> None:
        self.num_skipped = 0
        self.epoch = -1
        self._sums: dict[str, tuple[float | Tensor, float]] = {}  # of value times weight, and of weights

    def add(self, epoch: int, averages: Mapping[str, tuple[float | Tensor, float]]) -> None:
        """Add a step's values and their weights."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._sums = {}
        for name, (value, weight) in averages.items():
            if weight:
                total, total_weight = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (total + value * weight, total_weight + weight)

    def add_skipped(self) -> None:
        """Count a step that made no update."""
        self.num_skipped += 1

    def averages(self) -> dict[str, float]:
        """Return the averages over the epoch's steps so far."""
        return {name: float(total) / weight for name, (total, weight) in self._sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the tally as JSON, exact to the bit. Floats are hexadecimal, because JSON has no nan."""
        sums = {name: [float(total).hex(), weight.hex()] for name, (total, weight) in self._sums.items()}
        return {"num_skipped": self.num_skipped, "epoch": self.epoch, "sums": sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`. An empty state is from a snapshot without a tally."""
        self.num_skipped = state.get("num_skipped", 0)
        self.epoch = state.get("epoch", -1)
        sums = state.get("sums", {})
        self._sums = {name: (float.fromhex(total), float.fromhex(weight)) for name, (total, weight) in sums.items()}
