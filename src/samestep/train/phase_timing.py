"""How long each phase of each step takes, for `samestep doctor`: whether the data loader keeps up with the model."""

import time
from typing import TYPE_CHECKING

from samestep.data.loader import Loader
from samestep.train.steps import Step
from samestep.train.trace import Trace

if TYPE_CHECKING:
    from samestep.train.loop import Loop
    from samestep.train.run import Run


class PhaseTiming(Trace):
    """Writes a line per step and rank, and changes nothing in the step."""

    def build_step(self, run: "Run", loop: "Loop", number: int, loader: Loader) -> Step:
        """A plain one."""
        return Step(run, loop, number, loader)

    def end_step(self, loop: "Loop") -> None:
        """Writes down how long this rank has been in each phase so far, and the samples that it loaded in this step."""
        step, run = loop.step, self.run
        if step is None:
            return
        source, held = loop.batches.source, step._layout.ranges[run.rank]
        line = {
            "step": step.number,
            "at_s": time.monotonic(),
            "spent_s": run._watchdog.spent_s(),
            "num_samples": sum(step._sizes[v] for v in held),
            "num_workers": source.num_workers,
        }
        self.write(line)
