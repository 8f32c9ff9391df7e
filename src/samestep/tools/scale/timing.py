"""The interceptor of `samestep scale`: times the steps, and measures the sizes of the tensors."""

import time
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from samestep.tools.tracer import Tracer
from samestep.train.context import RunContext
from samestep.train.step.interception import LoopParts
from samestep.train.step.steps import Step

OUTSIDE = ("saving", "validating")  # phases that are not part of a step


class ScaleTiming(Tracer):
    """Writes a line about the run, one per step, and one about the tensors after the first step of one rank."""

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self._num_loops = 0
        self._written = -1  # the last step with a line

    def begin_loop(self, loop: LoopParts) -> None:
        super().begin_loop(loop)
        self._num_loops += 1
        if self._num_loops == 1:
            config = self.context.config
            numbers = {"batch_size": config.batch_size, "micro_batch_size": config.micro_batch_size}
            self.write({"world_size": self.context.world_size, **numbers})

    def end_body(self, step: Step) -> None:
        if step.number == self._written:  # an interrupted epoch ends once more
            return
        is_first = self._written < 0
        self._written = step.number
        spent_s = self.loop.clock.spent_s()
        at_s = time.monotonic() - sum(spent_s.get(phase, 0.0) for phase in OUTSIDE)
        self.write({"step": step.number, "at_s": at_s})
        if is_first and self.context.world_size == 1:
            self.write({"memory": [astuple(each) for each in self.loop.measure_sizes()]})
