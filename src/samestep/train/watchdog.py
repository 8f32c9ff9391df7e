"""A run's heartbeat: what of it the ranks tell each other, and how it ends when nothing moves any more."""

import atexit
import math
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.console import escape
from samestep.errors import Error, PeerFailed, Stuck
from samestep.launch.rank_process import write_error
from samestep.watch.heartbeat import Facts, Heartbeat, PhaseClock
from samestep.watch.stall_diagnosis import build_limits, describe_spent, explain_slow_saving, share_spent
from samestep.world.environment import Environment, read_host, read_terminal

if TYPE_CHECKING:
    from samestep.train.run import Run

EXIT_CODE = 1

_open: list["Watchdog"] = []  # of this process: at most one


class Watchdog(PhaseClock):
    """The pulse of one run on this rank. From `begin` to `close`, others hear of it."""

    def __init__(self, run: "Run", environment: Environment) -> None:
        super().__init__()
        self._run, self._environment = run, environment
        self._terminal = read_terminal()
        self._heartbeat: Heartbeat | None = None
        self._has_told_of_saving = False

    def begin(self) -> None:
        """The loop begins: from here on, what takes too long is spoken of."""
        run, stuck_after_s = self._run, self._environment.overrides.get("stuck_after_s")
        for earlier in list(_open):  # whose loop was left: as when a notebook's cell is run again
            earlier.close()
        self.enter("script", run.steps_done)
        is_alone = self._environment.launcher == "python" and run.world_size == 1
        if stuck_after_s == 0 or (is_alone and hasattr(sys, "ps1")):  # a person at a prompt may take any time
            return
        limits = build_limits(stuck_after_s)
        if is_alone and stuck_after_s is None:  # nobody waits, and nobody would start it again
            limits = replace(limits, stop_s=math.inf)
        facts = Facts(
            rank=run.rank,
            world_size=run.world_size,
            host=read_host(),
            limits=limits,
            say=lambda text: _write_line(self._terminal, text),
            end=self._end,
            condemn=self._condemn,
            run_dir=run.dir,
            logs=run._snapshotter.logs,
            may_write=self._may_write,
            micro_batch_size=run.micro_batch_size,
            began_step=run.steps_done,
        )
        self._heartbeat = Heartbeat(self, facts, run._group.open_mail())
        _open.append(self)
        atexit.register(self.close)  # a thread that needs Python must not outlive it

    def _may_write(self) -> bool:
        """Whether the directory is this run's still: the ranks of one that was cut off are not to be shown."""
        directory = self._run._snapshotter.directory
        if self._run.rank == 0 and directory is not None:
            with suppress(Error):
                directory.check_still_ours()
                return True
        return self._run.rank != 0

    def leave_saving(self, step: int) -> None:
        """The script goes on after a step. Says, once, that the run waits for its snapshots, and where they go."""
        self.enter("script", step)
        snapshotter = self._run._snapshotter
        if self._has_told_of_saving or snapshotter.directory is None:
            return
        if told := explain_slow_saving(self.spent_s(), snapshotter.directory.save_s, snapshotter.shown):
            self._has_told_of_saving = True
            self._run._say(told)

    def leave(self, step: int) -> None:
        """The script has left the loop. Other ranks may wait for this one; it alone has nobody who does."""
        self.enter("left", step)
        if self._run.world_size == 1:
            self.close()

    def measure(self, num_samples: int, wall_s: float) -> dict[str, Any]:
        """The throughput of this start, and the shares of its time, for `status.json`; {} where it took no step."""
        self.enter("script", self._run.steps_done)
        shares = share_spent(self.spent_s())
        return {"samples_per_s": num_samples / wall_s, "wall_s": wall_s, "time_share": shares} if num_samples else {}

    def close(self) -> dict[str, Any]:
        """The loop has ended. Returns a row for the table at the end: where the time went."""
        self.enter("script", self._run.steps_done)
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
            atexit.unregister(self.close)
            _open.remove(self)
        told = describe_spent(self.spent_s())
        return {"time": told} if told else {}

    def _end(self, sentence: str, is_first: bool) -> None:
        """Ends this process, whose main thread cannot: our launcher tells the sentence of whoever is the first."""
        error = Stuck(sentence) if is_first else PeerFailed(sentence)
        self._leave_error(self._run.rank, error)
        directory = self._run._snapshotter.directory
        if directory is not None:
            with suppress(Exception):
                directory.write_status("failed", sentence)
        os._exit(EXIT_CODE)

    def _condemn(self, ranks: Sequence[tuple[int, int]], sentence: str) -> None:
        for rank, pid in ranks:
            self._leave_error(rank, Stuck(sentence))  # first: the launcher looks for it when the process is gone
            kill_sibling(pid)

    def _leave_error(self, rank: int, error: BaseException) -> None:
        error_dir = self._environment.error_dir
        if error_dir is not None and Path(error_dir).is_dir():
            write_error(rank, error_dir, error, EXIT_CODE)


def kill_sibling(pid: int) -> None:
    """Kills a process, if it is of this user and was started by the process that has started this one, as the other
    ranks of this host were."""
    with suppress(OSError, ValueError):
        process = os.pidfd_open(pid)  # stays this process's, whatever takes its number
        try:
            with open(f"/proc/{pid}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
            if parent == os.getppid() and os.stat(f"/proc/{pid}").st_uid == os.geteuid() and pid != os.getpid():
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def _write_line(file: int, text: str) -> None:
    """Writes to a terminal, file or pipe, above a progress bar; drops it where it would have to wait."""
    with suppress(OSError, ValueError):
        if select.select([], [file], [], 0)[1]:  # a pipe then takes 4096 bytes
            clear = "\r\x1b[2K" if os.isatty(file) else ""
            os.write(file, f"{clear}samestep: {escape(text)}\n".encode()[:4096])
