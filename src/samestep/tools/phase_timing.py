"""Writes where the time of each step goes, for `samestep doctor` and `samestep scale`."""

import time
from collections.abc import Mapping
from typing import Any

from samestep.tools.tracer import Tracer
from samestep.train.context import RunContext
from samestep.train.step.steps import Step


class PhaseTiming(Tracer):
    """Writes a line per step: the seconds that this rank has spent in each phase, and the samples that it loaded."""

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self._written = -1  # the last step with a line

    def end_body(self, step: Step) -> None:
        if step.number == self._written:  # an interrupted epoch ends once more
            return
        self._written = step.number
        self.write(
            {
                "step": step.number,
                "at_s": time.monotonic(),
                "spent_s": self.loop.clock.spent_s(),
                "num_samples": sum(step.sizes[v] for v in step.held),
                "num_workers": self.loop.data.spec.num_workers,
            }
        )
