"""Watches one rank's progress: measures its phases, exchanges heartbeats, and ends a run that makes no progress."""

import math
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from samestep.console import escape, read_terminal
from samestep.errors import Error, PeerFailed, Stuck
from samestep.files import read_text
from samestep.launch.rank_reports import build_failure, report
from samestep.processes import Held, hold
from samestep.train.context import RunContext
from samestep.watch.beats import PhaseClock
from samestep.watch.diagnosis import Limits, RankFacts, build_limits
from samestep.watch.heartbeat import Heartbeat
from samestep.world.environment import read_host

EXIT_CODE = 1
WRITE_S = 2.0  # to write why a rank is stuck: a disk can hang


class Watchdog(PhaseClock, Held):
    """Times the phases of one run on this rank. From `begin` to `close` it exchanges heartbeats with the other ranks.

    Attributes:
        now: see `PhaseClock`.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__()
        self._context = context
        self._terminal = read_terminal()
        self._heartbeat: Heartbeat | None = None

    def leave(self) -> None:
        """The script has left the loop. Other ranks may wait for this one."""
        self.enter("left", self._context.state.steps_done)
        if self._context.world_size == 1:
            self.close()

    # --- a loop -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a loop. From here on, a phase that takes too long is reported."""
        context = self._context
        stuck_after_s = context.config.stuck_after_s
        hold(self, alone=True)  # that of a run whose loop was left may still answer the other ranks
        self.enter("script", self._context.state.steps_done)
        is_alone = context.environment.launcher == "python" and context.world_size == 1
        if stuck_after_s == 0 or (is_alone and hasattr(sys, "ps1")):  # a user at a prompt may take any time
            return
        limits = build_limits(stuck_after_s)
        if is_alone and stuck_after_s is None:  # no other rank waits, and no launcher would restart it
            limits = replace(limits, stop_s=math.inf)
        self._start_heartbeat(limits)

    def change_group(self) -> None:
        """Exchange heartbeats with the ranks that the group has now."""
        if self._heartbeat is not None:
            self._heartbeat.close(is_last=False)
            self._start_heartbeat(self._heartbeat.limits)

    def _start_heartbeat(self, limits: Limits) -> None:
        context = self._context
        group = context.group
        members = group.members  # a rank that waits for the others after a death has later ones
        own = members[context.rank]
        facts = RankFacts(
            rank=own,
            members=members,
            host=read_host(),
            limits=limits,
            say=partial(_write_line, self._terminal),
            end=partial(self._end, own),
            end_others=self._end_others,
            request_end=partial(group.request_end, context.environment),
            can_heal=group.can_heal,
            is_lost=group.is_lost,
        )
        self._heartbeat = Heartbeat(self, facts, self._find_dir, group.open_lasting_entries())

    def _find_dir(self) -> Path | None:
        """Return the run's directory; None if another run has taken it over."""
        location = self._context.location
        if self._context.rank == 0 and location.directory is not None:
            try:
                location.directory.check()
            except (Error, OSError):
                return None
        return location.path

    def close(self) -> None:
        """End the loop."""
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None

    def _end(self, rank: int, sentence: str, is_first: bool) -> None:
        """End this process, because its main thread is stuck. The launcher shows the message of the first such rank.

        Args:
            rank: this rank, as numbered at the start.
        """
        error = Stuck(sentence) if is_first else PeerFailed(sentence)
        directory = self._context.location.directory

        def write_reason() -> None:
            with suppress(Exception):
                report(build_failure(rank, error, EXIT_CODE))
                if directory is not None:
                    directory.write_status("failed", sentence)

        thread = threading.Thread(target=write_reason, daemon=True)
        thread.start()
        thread.join(WRITE_S)
        os._exit(EXIT_CODE)

    def _end_others(self, ranks: Sequence[tuple[int, int]], sentence: str) -> None:
        for rank, pid in ranks:
            report(build_failure(rank, Stuck(sentence), EXIT_CODE))  # first: read when the process has ended
            kill_sibling(pid)


def kill_sibling(pid: int) -> None:
    """Kill a process of this user with the same parent as this one, such as another rank of this host."""
    with suppress(OSError, ValueError):
        process = os.pidfd_open(pid)  # refers to this process even if its pid is reused
        try:
            parent = int(read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[1])
            if parent == os.getppid() and os.stat(f"/proc/{pid}").st_uid == os.geteuid() and pid != os.getpid():
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def _write_line(file: int, text: str) -> None:
    """Write to a terminal, file or pipe; drop the line if that would block."""
    with suppress(OSError, ValueError):
        if select.select([], [file], [], 0)[1]:  # a pipe then takes 4096 bytes
            os.write(file, f"samestep: {escape(text)}\n".encode()[:4096])
