"""The interceptors of tools that train a script to look at it: the base of all, and the one of `samestep scale`."""

import json
import time
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from torch import nn

from samestep.errors import Error
from samestep.files import open_regular
from samestep.train.context import RunContext
from samestep.train.interception import Interceptor, LoopParts
from samestep.train.step import Step

OUTSIDE = ("saving", "validating")  # phases that are not part of a step


class Tracer(Interceptor):
    """Writes lines about one run on one rank.

    Args:
        options: `dir`, and the options of a subclass.
    """

    is_trial = True

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        path = Path(options["dir"], f"rank-{context.rank}.jsonl")
        self._file = open(path, "a", opener=open_regular)  # noqa: SIM115
        self.modules: Mapping[str, nn.Module] = {}

    def prepare(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules

    def begin_loop(self, loop: LoopParts) -> None:
        self.loop = loop

    def write(self, line: dict[str, Any]) -> None:
        """Append a line. Raises Error if it cannot be written."""
        try:
            print(json.dumps(line), file=self._file, flush=True)
        except OSError as error:
            raise Error(
                f"{self._file.name} cannot be written ({error.strerror}): make room there, or set TMPDIR to another "
                "directory",
                code="SS113",
            ) from None


class ScaleTiming(Tracer):
    """The one of `samestep scale`.

    Writes a line about the run, one per step, and one about the tensors after the first step of one rank.
    """

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self._written = -1  # the last step with a line
        config = context.config
        numbers = {"batch_size": config.batch_size, "micro_batch_size": config.micro_batch_size}
        self.write({"world_size": context.world_size, **numbers})

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
