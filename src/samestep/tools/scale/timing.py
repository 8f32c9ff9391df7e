"""The interceptor of `samestep scale`: times the phases of the steps, and the links between the ranks."""

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from samestep.tools.phase_timing import PhaseTiming
from samestep.tools.scale.link_probe import measure_links
from samestep.train.context import RunContext
from samestep.train.step.interception import LoopParts
from samestep.train.step.steps import Step


class ScaleTiming(PhaseTiming):
    """Writes a line about the run and its links first, and one about the tensors after the first step of one rank."""

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self._has_begun = False
        self._has_measured = False

    def begin_loop(self, loop: LoopParts) -> None:
        super().begin_loop(loop)
        if self._has_begun:
            return
        self._has_begun = True
        config = self.context.config
        group = self.context.group
        params = loop.gradients.plan.params
        self.write(
            {
                "world_size": group.world_size,
                "batch_size": config.batch_size,
                "micro_batch_size": config.micro_batch_size,
                "reduction": config.reduction,
                "bucket_cap_bytes": config.bucket_cap_bytes,
                "is_one_host": group.world_size == 1 or group.local_sockets is not None,
                "elements": [param.numel() for param in params],
                "element_bytes": max((param.element_size() for param in params), default=4),
                "links": measure_links(group) if group.world_size > 1 else None,
            }
        )

    def end_body(self, step: Step) -> None:
        super().end_body(step)
        if not self._has_measured and self.context.world_size == 1:
            self._has_measured = True
            self.write({"memory": [astuple(each) for each in self.loop.measure_sizes()]})
