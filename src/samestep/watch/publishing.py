"""Writes what a heartbeat knows into the run directory: `ranks.json`."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec import to_builtins

from samestep.files import replace_file
from samestep.watch.records import RANKS, RankStates
from samestep.watch.stall_diagnosis import Beat


@dataclass(frozen=True)
class Files:
    """Where a rank writes.

    Attributes:
        run_dir: directory for ranks.json; None: not written.
        may_write: returns whether the directory still belongs to this run.
        micro_batch_size: of the run, for ranks.json.
        began_step: the first step of this start of the run.
    """

    run_dir: Path | None = None
    may_write: Callable[[], bool] = lambda: True
    micro_batch_size: int = 1
    began_step: int = 0


class Publisher:
    """Writes the files of one rank. All writes are in `publish` and `remove`, which can take any time.

    Attributes:
        num_bytes: written to ranks.json so far.
    """

    def __init__(self, files: Files) -> None:
        self.num_bytes = 0
        self._files = files
        self._shown: Sequence[Beat] | None = None  # the states of all ranks that are to be written

    def show(self, ranks: Sequence[Beat]) -> None:
        """Let `publish` write the states of all ranks."""
        self._shown = ranks

    def publish(self) -> None:
        """Write what is to be written now."""
        ranks, self._shown = self._shown, None
        if ranks is not None and self._files.may_write():
            with suppress(OSError):
                self._write_ranks(ranks)

    def remove(self) -> None:
        """Remove `ranks.json`, if this rank has written it."""
        if self._files.run_dir is not None and self.num_bytes and self._files.may_write():
            with suppress(OSError):
                (self._files.run_dir / RANKS).unlink()

    def _write_ranks(self, ranks: Sequence[Beat]) -> None:
        files = self._files
        if files.run_dir is None:
            return
        text = json.dumps(to_builtins(RankStates(time.time(), files.micro_batch_size, [*ranks]))).encode()
        replace_file(files.run_dir / RANKS, text)
        self.num_bytes += len(text)
