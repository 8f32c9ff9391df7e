"""Kills ranks of a run that continues without them, for `samestep verify --heal`."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.train.context import RunContext
from samestep.train.step.interception import Interceptor
from samestep.train.step.steps import Step


class Killer(Interceptor):
    """Kills ranks, each once. Options: `dir`, and `kills`: rank -> a step, and a number of its micro-batches.

    The rank is killed after so many micro-batches, counted over all passes, just before the next one.
    """

    is_trial = True
    permits_healing = True

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self._killed = Path(options["dir"]) / f"killed-{context.rank}"  # its number changes when other ranks die
        self._step, self._left = options["kills"].get(str(context.rank), (-1, 0))
        if self._killed.exists():  # all ranks have started again
            self._step = -1

    def forward(self, step: Step, batch: Any) -> None:
        if step.number == self._step:
            if self._left == 0:
                self._killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1
