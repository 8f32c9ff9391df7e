"""The tracker for TensorBoard."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.errors import InvalidValue, needing
from samestep.watch.trackers.protocol import TrackerInfo, is_histogram, to_number


class TensorBoard:
    """Tracker that writes event files for `tensorboard --logdir`.

    Args:
        dir: directory of the event files; None: `tensorboard/` in the run directory.

    Raises:
        Error: raised at the start of the run if the package is missing.
        InvalidValue: raised at the start of the run if there is no directory.

    Example::

        >>> import samestep
        >>> run = samestep.Run("runs/x", batch_size=32, trackers=[samestep.TensorBoard()])
    """

    def __init__(self, dir: str | Path | None = None) -> None:
        self.dir = None if dir is None else Path(dir)
        self._writer: Any = None

    def start(self, info: TrackerInfo) -> None:
        if self.dir is None and info.dir is None:
            raise InvalidValue(
                "TensorBoard has nowhere to write: the run has no directory; give TensorBoard(dir=...)", code="SS807"
            )
        with needing("TensorBoard is missing", "'samestep[tensorboard]'"):
            from torch.utils.tensorboard import SummaryWriter
        # The reader then drops the steps that a killed run has logged after its last snapshot.
        purge_step = info.resumed_step + 1 if info.resumed_step else 0
        directory = self.dir or Path(info.dir or "") / "tensorboard"
        self._writer = SummaryWriter(str(directory), purge_step=purge_step)
        for name, values in (("config", info.config), ("run", info.describe())):
            if values:
                text = json.dumps(dict(values), indent=4, default=str)
                self._writer.add_text(name, "    " + text.replace("\n", "\n    "), info.resumed_step)
        self._writer.flush()

    def log(self, values: Mapping[str, Any], step: int) -> None:
        for name, value in values.items():
            number = to_number(value)
            if number is not None:
                self._writer.add_scalar(name, number, step)
            elif is_histogram(value):
                self._writer.add_histogram(name, value.float(), step)
            else:
                self._writer.add_text(name, str(value), step)

    def finish(self, status: str) -> None:
        self._writer.close()
