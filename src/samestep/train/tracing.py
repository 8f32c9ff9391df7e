"""Opens the tracer that `samestep verify`, `replay`, `doctor` or `scale` requests by an environment variable."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samestep.engine.gradient_pass import GradientPass
from samestep.engine.link_probe import measure_links
from samestep.train.context import RunContext
from samestep.train.loop_data import LoopData
from samestep.train.position import Place
from samestep.train.reference import Reference
from samestep.train.replayed_step import Replay
from samestep.train.steps import Step
from samestep.train.trace import Trace, Tracer
from samestep.train.watchdog import Watchdog


class PhaseTiming(Tracer):
    """For `samestep doctor` and `scale`: writes a line per step about where the time goes.

    The line has the seconds that this rank has spent in each phase so far, and the number of samples that it loaded.
    With the option `scale`, a line about the run and its links comes first.
    """

    def __init__(
        self, context: RunContext, run_dir: Path | None, options: Mapping[str, Any], watchdog: Watchdog
    ) -> None:
        super().__init__(context, run_dir, options)
        self._watchdog = watchdog
        self._written = -1  # the last step with a line

    def begin_loop(
        self, data: LoopData, place: Place, gradients: GradientPass, build_state: Callable[[dict[str, Any]], Any]
    ) -> None:
        super().begin_loop(data, place, gradients, build_state)
        if not self.options.get("scale") or place.is_further:
            return
        config, group, params = self.context.config, self.context.group, gradients.reducer.params
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
        if step.number == self._written:  # an interrupted epoch ends once more
            return
        self._written = step.number
        self.write(
            {
                "step": step.number,
                "at_s": time.monotonic(),
                "spent_s": self._watchdog.spent_s(),
                "num_samples": sum(step.sizes[v] for v in step.held),
                "num_workers": self.data.spec.num_workers,
            }
        )


def open_tracer(context: RunContext, run_dir: Path | None, options: str, watchdog: Watchdog) -> Tracer:
    """Return the tracer for `options`, which is JSON: `dir`, the choice of the tracer, and its options."""
    parsed = json.loads(options)  # noqa: TID251 a variable of the environment
    if parsed.get("replay"):
        return Replay(context, run_dir, parsed)
    if parsed.get("paces"):
        return PhaseTiming(context, run_dir, parsed, watchdog)
    return Reference(context, run_dir, parsed) if parsed.get("reference") else Trace(context, run_dir, parsed)
