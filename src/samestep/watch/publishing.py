"""Writes what a heartbeat knows into the run directory: `ranks.json` and stacks."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec import to_builtins

from samestep.files import replace_file
from samestep.watch.phase_clock import PhaseClock
from samestep.watch.records import RANKS, RankStates
from samestep.watch.stall_diagnosis import Beat
from samestep.watch.thread_state import read_stacks, trim_stack


@dataclass(frozen=True)
class Files:
    """Where a rank writes.

    Attributes:
        run_dir: directory for ranks.json; None: not written.
        logs: directory for the stacks of a stuck rank; None: not written.
        may_write: returns whether the directory still belongs to this run.
        micro_batch_size: of the run, for ranks.json.
        began_step: the first step of this start of the run.
    """

    run_dir: Path | None = None
    logs: Path | None = None
    may_write: Callable[[], bool] = lambda: True
    micro_batch_size: int = 1
    began_step: int = 0


class Publisher:
    """Writes the files of one rank. All writes are in `publish` and `finish`, which can take any time.

    Args:
        ident: the main thread, whose stack is written first.

    Attributes:
        num_bytes: written to ranks.json so far.
    """

    def __init__(self, files: Files, clock: PhaseClock, rank: int, ident: int) -> None:
        self.num_bytes = 0
        self._files = files
        self._clock = clock
        self._rank = rank
        self._ident = ident
        self._shown: Sequence[Beat] | None = None  # the states of all ranks that are to be written
        self._stalled: tuple[str, int, float] | None = None  # the phase whose stacks were written, or are to be
        self._writes_stacks = False

    def show(self, ranks: Sequence[Beat]) -> None:
        """Let `publish` write the states of all ranks."""
        self._shown = ranks

    def show_stacks(self) -> None:
        """Let `publish` write the stacks of this process, once for each stall."""
        self._writes_stacks |= self._stalled != self._clock.now
        self._stalled = self._clock.now

    def publish(self) -> None:
        """Write what is to be written now."""
        ranks, self._shown = self._shown, None
        writes_stacks, self._writes_stacks = self._writes_stacks, False
        if (ranks is None and not writes_stacks) or not self._files.may_write():
            return
        if writes_stacks:
            with suppress(OSError):
                self._write_stacks()
        if ranks is not None:
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

    def _write_stacks(self) -> None:
        """Write the Python stacks of this process's threads to the logs, the main thread first."""
        if self._files.logs is None:
            return
        stacks = read_stacks()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        phase, step, since_s = self._clock.now
        lines = [f"rank {self._rank}, step {step}, {phase} for {time.monotonic() - since_s:.1f} s", ""]
        for ident in sorted(stacks, key=lambda ident: ident != self._ident):
            name = names.get(ident, "unknown")
            if not name.startswith("samestep _"):
                lines.append(f"thread {name} (most recent call first):")
                lines += [f'  File "{f.file}", line {f.line}, in {f.function}' for f in trim_stack(stacks[ident])]
                lines.append("")
        self._files.logs.mkdir(parents=True, exist_ok=True)
        replace_file(self._files.logs / f"stacks-{self._rank}.txt", "\n".join(lines).encode())
