"""The interceptors of the tools that train a script to look at it: each rank writes lines into a directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from samestep.errors import Error
from samestep.files import open_regular
from samestep.train.context import RunContext
from samestep.train.step.interception import Interceptor, LoopParts


class Tracer(Interceptor):
    """Writes lines about one run on one rank.

    Args:
        options: `dir`, and the options of a subclass.
    """

    is_trial = True

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self.directory = Path(options["dir"])
        self._file = open(self.directory / f"rank-{context.rank}.jsonl", "a", opener=open_regular)  # noqa: SIM115
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
