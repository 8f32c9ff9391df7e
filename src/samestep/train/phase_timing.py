"""Measures the phases of each step, for `samestep doctor`: whether the data loader keeps up with the model."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.train.context import RunContext
from samestep.train.steps import Step
from samestep.train.trace import Tracer
from samestep.train.watchdog import Watchdog


class PhaseTiming(Tracer):
    """Writes a line per step: the seconds that this rank has spent in each phase so far, and the samples it loaded."""

    def __init__(
        self, context: RunContext, run_dir: Path | None, options: Mapping[str, Any], watchdog: Watchdog
    ) -> None:
        super().__init__(context, run_dir, options)
        self._watchdog = watchdog

    def end_body(self, step: Step) -> None:
        self.write(
            {
                "step": step.number,
                "at_s": time.monotonic(),
                "spent_s": self._watchdog.spent_s(),
                "num_samples": sum(step.sizes[v] for v in step.held),
                "num_workers": self.batches.source.num_workers,
            }
        )
