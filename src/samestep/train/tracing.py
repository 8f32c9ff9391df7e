"""Opens the tracer that `samestep verify`, `replay` or `doctor` requests by an environment variable."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.train.context import RunContext
from samestep.train.reference import Reference
from samestep.train.replay import Replay
from samestep.train.steps import Step
from samestep.train.trace import Trace, Tracer
from samestep.train.watchdog import Watchdog


class PhaseTiming(Tracer):
    """For `samestep doctor`: writes a line per step, by which it sees whether the data loader keeps up with the model.

    The line holds the seconds that this rank has spent in each phase so far, and the samples that it loaded.
    """

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
                "num_workers": self.batches.spec.num_workers,
            }
        )


def open_tracer(context: RunContext, run_dir: Path | None, options: str, watchdog: Watchdog) -> Tracer:
    """The tracer for `options`, which is JSON: `dir`, and what chooses the tracer and belongs to it."""
    parsed = json.loads(options)
    if parsed.get("replay"):
        return Replay(context, run_dir, parsed)
    if parsed.get("paces"):
        return PhaseTiming(context, run_dir, parsed, watchdog)
    return Reference(context, run_dir, parsed) if parsed.get("reference") else Trace(context, run_dir, parsed)
