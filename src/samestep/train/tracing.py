"""Opens the tracer that `samestep verify` or `samestep doctor` asks for by an environment variable."""

import json
from pathlib import Path

from samestep.train.context import RunContext
from samestep.train.phase_timing import PhaseTiming
from samestep.train.reference import Reference
from samestep.train.trace import Trace, Tracer
from samestep.train.watchdog import Watchdog


def open_tracer(context: RunContext, run_dir: Path | None, options: str, watchdog: Watchdog) -> Tracer:
    """The tracer for `options`, which is JSON: `dir`, and perhaps `dump`, `kill`, `reread`, `reference` or `paces`."""
    parsed = json.loads(options)
    if parsed.get("paces"):
        return PhaseTiming(context, run_dir, parsed, watchdog)
    return Reference(context, run_dir, parsed) if parsed.get("reference") else Trace(context, run_dir, parsed)
