"""One run on disk: its lock, its record, its logs and its snapshots. Only ranks that write the run have one.

A start calls `look` and then, once the point at which the run continues is known, `begin`. Only the methods of the
directory change its attributes.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import starmap, takewhile
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from samestep.console import format_count
from samestep.data.source import ORDERS
from samestep.decoding import Json
from samestep.errors import Error, RunDirectoryError, UsageError
from samestep.files import open_regular, replace_file, sync_directory
from samestep.plan.ledger import RECORD as LEDGER_RECORD
from samestep.plan.ledger import Entry
from samestep.snapshot.lock import Lock, detach, refuse_links
from samestep.snapshot.logs import AppendLog, Heal, KeptLogs, StepRecords, count_records, format_row
from samestep.snapshot.manifest import Snapshot
from samestep.snapshot.run_record import CopyContent, ResumePoint, StartOptions, build_record, find_different, read_run
from samestep.snapshot.store import ABANDONED, SNAPSHOTS, Store
from samestep.watch.records import (
    HEALS,
    LEDGER,
    LOCK,
    LOGS,
    METRICS,
    RECORD,
    RESTARTS,
    STATUS,
    add_line,
    count_lines,
    list_logs,
    read_or_empty,
    read_rows,
    read_status,
)
from samestep.world.environment import Restart, advise, read_host

METRICS_FLUSH_S = 1.0

_open: WeakValueDictionary[Path, "RunDirectory"] = WeakValueDictionary()  # of this process


class RunDirectory(StepRecords):
    """One run on disk, locked by this process until it is closed or the process ends.

    Only the lock is written before `begin`. A later run of the same process in the same directory closes this one, for
    example when a notebook's cell is run again.

    Args:
        named: the path as the user gave it.
        warn: prints a message.

    Attributes:
        path: the absolute path.
        record: the content of `run.json`; {} if there is none.
        store: the run's snapshots.
        lost: a message about rows and records that could not be written; "" if all are in their files.

    Raises:
        RunDirectoryError: another process has locked the directory, or it contains other files.
        OSError: it cannot be written.
    """

    def __init__(self, named: Path, *, warn: Callable[[str], None]) -> None:
        super().__init__()
        self.named = named
        self._warn = warn
        self.lost = ""
        self._before_close: Callable[[], None] = lambda: None
        self._lock: Lock | None = None
        self._logs: tuple[AppendLog, AppendLog] | None = None  # metrics and ledger
        self._early_rows: list[Mapping[str, Any]] = []
        self._lost_steps = 0
        self._start = 0  # number of this start, once its logs have begun
        self.record: dict[str, Any] = {}
        try:
            self.path = named.absolute()  # the script may change the working directory
            self._key = Path(os.path.realpath(self.path))  # resolve() raises RuntimeError for a circle of links
            if before := _open.get(self._key):
                before.close()
            self.store = Store(self.path, named, self._judge)
            self._create()
            self._lock = Lock(self.path / LOCK, named)
            refuse_links(named, (SNAPSHOTS, ABANDONED, ORDERS, LOGS))
            rows = self.path / METRICS
            if (self.path / RECORD).exists():
                self.read_record()
            elif self.store.snapshots() or (rows.exists() and rows.stat().st_size > 0):
                raise RunDirectoryError(
                    f"{named} holds files of a run but no {RECORD}: name another run directory", code="SS407"
                )
        except (Error, OSError):
            self.close()
            raise
        _open[self._key] = self

    # --- identity ---------------------------------------------------------------------------------------------

    def _create(self) -> None:
        """Create the directory. A snapshot is on the disk only if the names above it are."""
        missing = [*takewhile(lambda parent: not parent.exists(), (self.path, *self.path.parents))]
        self.path.mkdir(parents=True, exist_ok=True)
        for created in missing:
            sync_directory(created.parent)

    def read_record(self) -> None:
        """Read `run.json`. Raises Error."""
        self.record = read_run(self.path, self.path)

    def check_numbers(self, numbers: Json) -> None:
        """Compare numbers with those of the run in the directory, if both are known.

        Raises:
            RunDirectoryError: they differ, so this is another run.
        """
        if different := find_different(self.record.get("numbers", {}), numbers):
            raise RunDirectoryError(
                f"{self.named} holds another run ({different}): use its numbers, another run directory, "
                f"or start beside it with {advise(fresh=True)}",
                code="SS405",
            )

    def write_record(self, record: dict[str, Any]) -> None:
        """Replace `run.json`. Raises OSError."""
        replace_file(self.path / RECORD, json.dumps(record, indent=2, allow_nan=False).encode(), sync=True)
        self.record = record

    def check(self) -> None:
        """Check that this process still writes the run, before it replaces anything in the directory.

        Raises:
            RunDirectoryError: another process, or a later run of this process, has taken the run over.
            OSError: the run's record was removed since `begin`, and perhaps all files of the directory.
        """
        self._get_lock().check()
        if self._logs is not None:
            (self.path / RECORD).stat()  # a start refuses a snapshot without it

    def _get_lock(self) -> Lock:
        if self._lock is None:
            raise UsageError(
                f"the run in {self.named} was ended by a later samestep.Run of this process in the same directory",
                code="SS222",
            )
        return self._lock

    def _get_logs(self) -> tuple[AppendLog, AppendLog]:
        """Return metrics and ledger, after `begin`. Raises Error if a later run of this process has closed them."""
        self._get_lock()
        assert self._logs is not None
        return self._logs

    # --- start ------------------------------------------------------------------------------------------------

    def look(self, resume: str | int | None, *, checks_parts: bool = True) -> CopyContent:
        """Look for the snapshot to resume from, and check it.

        Args:
            resume: as in `RunConfig`.
            checks_parts: as in `Store.find`.

        Raises:
            RunDirectoryError: there are snapshots and `resume` is None.
        """
        steps = [each.step for each in (*self.store.snapshots(), *self.store.remote)]
        if resume is None and steps:
            raise RunDirectoryError(
                f"{self.named} already has snapshots and resume is never: start with {advise(resume='latest')}, or "
                f"{advise(fresh=True)}",
                code="SS406",
            )
        content = CopyContent(max(steps, default=0), count_records(self.path / LEDGER))
        if resume is None:
            return content
        try:
            return replace(content, found=self.store.find(resume, warn=self._warn, checks_parts=checks_parts))
        except Error as error:
            return replace(content, error=error)

    def _judge(self, snapshot: Snapshot) -> str:
        """Return why a snapshot belongs to another run, such as one from a restored backup; "" if it does not."""
        meta = snapshot.manifest["meta"]
        if not {"metrics_bytes", "numbers", "world_size"} <= {*meta}:
            return "its manifest is not that of a run"
        different = find_different(meta["numbers"], self.record.get("numbers", {}))
        return f"it is of another run ({different})" if different else ""

    def begin(self, point: ResumePoint, options: StartOptions) -> tuple[int, int]:
        """Begin or continue the run: take the files back to a point, write `run.json`, and warn about changes.

        Called once.

        Returns:
            The number of this start (0 for the first, then as in `restarts.jsonl`; it has no logs yet), and the size of
            the rows that earlier starts have written.
        """
        record, warnings = build_record(self.record, options, point)
        self.write_record(record)
        num_bytes = self._take_back(point)
        for warning in warnings:
            self._warn(warning)
        num_starts = count_lines(self.path / RESTARTS) + bool(read_or_empty(self.path / STATUS))
        self._start = max([num_starts, *(int(path.name) + 1 for path in list_logs(self.path)[-1:])])
        return self._start, num_bytes

    def _take_back(self, point: ResumePoint) -> int:
        """Truncate rows and records after a point, and move snapshots of later steps to `abandoned/`.

        Returns:
            The size of the rows that are left.
        """
        step = point.step
        later = [other for other in self.store.snapshots() if not point.is_beginning and other.step > step]
        self.store.abandon(later)  # before rows are cut: after a crash in between, the newest one left is whole
        if later:
            self._warn(f"{format_count(len(later), 'snapshot')} after step {step} went to {self.named / ABANDONED}")
        if self._get_lock().was_elsewhere:
            for name in (METRICS, LEDGER):
                detach(self.path / name)
        status = read_or_empty(self.path / STATUS)
        if "steps" in status:  # those in the ledger, which is about to be cut
            with suppress(OSError):
                self._overwrite_status({**status, "steps": 0})
        metrics, ledger = self._open_logs()
        self._lost_steps = max(ledger.flush() // LEDGER_RECORD.size, point.num_recorded, step) - step
        for log, size in ((metrics, point.metrics_bytes), (ledger, step * LEDGER_RECORD.size)):
            if not log.cut(size):
                self._warn(f"{log.path} is shorter than when step {step} was saved: a part of it is missing")
        num_bytes = metrics.flush()
        for row in self._early_rows if point.is_beginning else ():
            metrics.append(format_row(row))
        return num_bytes

    def _open_logs(self) -> tuple[AppendLog, AppendLog]:
        self._logs = (
            AppendLog(self.path / METRICS, self._warn, flush_s=METRICS_FLUSH_S),
            AppendLog(self.path / LEDGER, self._warn, flush_s=0.0, record_bytes=LEDGER_RECORD.size),
        )
        return self._logs

    def continue_start(self, start: int, kept: KeptLogs, steps_done: int, *, is_in_loop: bool) -> None:
        """Continue the start of another rank, which has died.

        Args:
            start: the number of the start.
            kept: the rows and records of this rank.
            steps_done: the number of steps that it has finished.
            is_in_loop: whether the loop has not ended yet.

        Raises:
            NotHealed: as `KeptLogs.complete`.
            OSError: the directory cannot be written.
        """
        self.store.clean()
        kept.complete(*self._open_logs(), steps_done)
        self.waiting = kept.waiting
        self._start = start
        for heal in kept.heals:
            self.write_heal(heal)
        if is_in_loop:
            self.write_status("running", "")  # of this process

    def write_start(self, restart: Restart | None, *, from_step: int, world_size: int) -> None:
        """Add a line to `restarts.jsonl`, unless this is the run's first start.

        Args:
            restart: the launcher's description of the end of the last start; None: read it from `status.json`.
            from_step: number of completed steps.
        """
        path = self.path / RESTARTS
        before = read_status(self.path)
        if before or restart is not None:
            self._add_line(
                path,
                {
                    "time": _now(),
                    "restart": count_lines(path) + 1,
                    "reason": restart.reason if restart is not None else _describe_end(before),
                    "rank": restart.rank if restart is not None else before.get("rank"),
                    "from_step": from_step,
                    "lost_steps": self._lost_steps,
                    "world_size": world_size,
                },
            )
        self.write_status("running", "")

    def write_heal(self, heal: Heal) -> None:
        """Add a line to `heals.jsonl`, without ranks that another writer of this start has recorded before it died."""
        path = self.path / HEALS
        rows: list[dict[str, Any]] = []
        with suppress(OSError):  # `_add_line` then warns
            rows = [row for row in read_rows(path) if row.get("start") == self._start]
        if lost := [rank for rank in heal.lost if not any(rank in row["lost"] for row in rows)]:
            self._add_line(
                path,
                {
                    "time": _now(),
                    "start": self._start,
                    "step": heal.step,
                    "lost": lost,
                    "world_size": heal.world_size,
                    "seconds": round(heal.seconds, 3),
                },
            )

    def _add_line(self, path: Path, row: Json) -> None:
        try:
            add_line(path, json.dumps(row))
        except OSError as error:
            self._warn(f"{path} could not be written ({_reason(error)}): the run continues")

    def write_status(self, status: str, reason: str, end: Json | None = None) -> None:
        """Write `status.json`, if possible.

        Args:
            status: "running", "stopped", "done" or "failed".
            reason: a message, or "".
            end: of a loop that has ended: `steps`, the number of records that the ledger should have, and `measured`,
                which stays as it was if this start made no step.
        """
        if self._logs is None:
            return
        now = {
            "status": status,
            "reason": reason,
            "time": _now(),
            "host": read_host(),
            "process": os.getpid(),
            "start": self._start,
            "lost": self.lost,
        }
        now |= {name: value for name, value in (end or {}).items() if value}
        with suppress(OSError, Error):  # the disk may be read-only, or another process may have taken the run over
            self.check()
            self._overwrite_status(read_or_empty(self.path / STATUS) | now)

    def _overwrite_status(self, record: Json) -> None:
        path = self.path / STATUS
        content = json.dumps(record).encode() + b"\n"
        try:
            replace_file(path, content)
        except OSError:  # a full disk: the existing file has room
            with open(path, "r+b", buffering=0, opener=open_regular) as file:
                file.write(content)
                file.truncate()

    # --- logs -------------------------------------------------------------------------------------------------

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Add a row to the metrics. Before `begin`, hold it back, because the run's first start may have written it."""
        self._get_lock()
        if self._logs is None:
            self._early_rows.append(row)
        else:
            self._logs[0].append(format_row(row))

    def write_rows(self, rows: bytes = b"") -> None:
        """Add rows from another copy of the file as they are, and write all pending rows.

        Raises:
            OSError: they could not be written; they stay pending.
        """
        if self._logs is not None:
            metrics, _ = self._logs
            metrics.append(rows)
            metrics.flush()

    def _record(self, entries: Sequence[Entry]) -> None:
        self._get_logs()[1].append(b"".join(starmap(LEDGER_RECORD.pack, entries)))

    def complete_logs(self) -> None:
        """Write all pending rows and records. If that fails, set `lost`, and warn the first time."""
        if self._logs is None:
            return
        self.record_known()
        before = self.lost
        problem = self.lost = ""
        for log in self._logs:
            try:
                log.flush()
            except OSError as error:
                problem = _reason(error)
        if problem:
            self.lost = f"{self.named} could not be written ({problem}): the end of {METRICS} or {LEDGER} is lost"
        elif not (self.path / LEDGER).exists():
            self.lost = f"{self.named} was removed during the run: nothing of what the run wrote there is left"
        if self.lost and not before:
            self._warn(self.lost)

    # --- snapshots --------------------------------------------------------------------------------------------

    def mark(self, *, epoch: int, world_size: int, notes: Mapping[str, Any]) -> dict[str, Any]:
        """Write all pending rows and records, and return the `meta` of a snapshot of this moment.

        Args:
            notes: further keys: `stopped`, the reason of the run.stop() that ends the run here; `tally`, see
                `MetricsTally`.

        Raises:
            RunDirectoryError: another process has taken the run over.
            OSError: the disk is full or gone.
        """
        metrics, ledger = self._get_logs()
        self.check()
        self.record_known()
        ledger.flush()
        return {
            "epoch": epoch,
            "metrics_bytes": metrics.flush(),
            "world_size": world_size,
            "numbers": self.record["numbers"],
            "settings": self.record["settings"],
            "rewinds": len(self.record["rewinds"]),
            **notes,
        }

    def sync(self) -> None:
        """Wait until rows and records are on the disk, in any thread, before a snapshot of their steps is completed.

        Raises:
            RunDirectoryError: another process has taken the run over.
            OSError: the disk is full or gone.
        """
        for log in self._get_logs():
            log.sync()
        self.check()

    def explain_failure(self, step: int, error: Exception) -> str:
        """Return a message about a snapshot that could not be written."""
        why = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        if not (self.path / RECORD).exists():
            why = f"{self.named} was removed during the run"
        return f"the snapshot of step {step} could not be written ({why})"

    # --- end --------------------------------------------------------------------------------------------------

    def call_before_close(self, fn: Callable[[], None]) -> None:
        """Call `fn` at the start of `close`, also if a later run in the same process closes this one."""
        self._before_close = fn

    def close(self) -> bool:
        """Release the directory. Return False if it was closed before."""
        self._before_close()
        self.complete_logs()
        logs = self._logs
        self._logs = None
        for log in logs or ():
            with suppress(OSError):  # already warned about
                log.close()
        if self._lock is None:
            return False
        self._lock.forget()
        self._lock = None
        self._recorded_s = float("-inf")  # the next step records at once, which raises an error
        _open.pop(self._key, None)
        return True


def _describe_end(status: Json) -> str:
    """Return how the last start ended. If it was killed, or its machine failed, it could not record its end."""
    return status.get("reason") or ("the run was done" if status.get("status") == "done" else "unknown")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
