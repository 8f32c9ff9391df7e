"""What the steps of a run add up to, beside its weights: the same on all ranks, and carried by snapshots."""

from collections.abc import Mapping
from typing import Any


class Tally:
    """Counts over all steps of a run, its restarts included.

    A snapshot carries it in its manifest, not in its state: a script may log times, and the digest of a state is not to
    depend on them.

    Attributes:
        num_skipped: steps in which no micro-batch had a weight above 0, so that they made no update.
    """

    def __init__(self) -> None:
        self.num_skipped = 0

    def state_dict(self) -> dict[str, Any]:
        """The tally as JSON."""
        return {"num_skipped": self.num_skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; empty: of a snapshot that has none."""
        self.num_skipped = state.get("num_skipped", 0)
