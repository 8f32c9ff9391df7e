"""The run's directory: whose it is, who writes in it, what is in it. Rank 0 alone holds one."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from samestep.errors import Error
from samestep.files import fits, is_count, is_object, read_bytes, replace_file
from samestep.snapshot.store import Snapshot, Store
from samestep.train.arguments import build_never_error
from samestep.train.ledger import Ledger
from samestep.train.lock import Lock, part_from_old_writers, refuse_links
from samestep.train.options import OVERRIDE, Options, describe_changes, find_different
from samestep.version import __version__
from samestep.watch.metrics import Metrics
from samestep.watch.records import RESTARTS, STATUS, add_line, count_lines, overwrite, parse_record, read_or_empty
from samestep.world.environment import Restart, advise, read_host

FORMAT = 1
LOGS = "logs"

_open: WeakValueDictionary[Path, "Directory"] = WeakValueDictionary()  # of this process


class Directory:
    """One run on disk, locked by this process until it is closed or the process ends.

    Nothing but the lock is written before `begin`. A later run of the same process in the same directory takes it
    over, as when a notebook's cell is run again.

    Attributes:
        path, named: where it is, and as a person named it.
        before_close: called first of all when it is given up, by whoever does.
        save_s: what the last snapshot took to write; 0 before there is one.
        num_recorded: the steps that a copy of the run has in its ledger, where that is known.
        is_rewound: a copy of the run has such later ones now.
        rewinds: the steps of snapshots that were gone back to although there were later ones.
        lost: what `find_lost` found.

    Raises:
        Error: it cannot be written, another process is at it, or it holds something else.
    """

    def __init__(self, path: Path, *, fresh: bool, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self.before_close: Callable[[], None] = lambda: None
        self._lock: Lock | None = None
        self._metrics: Metrics | None = None
        self._early_rows: list[Mapping[str, Any]] = []
        self._ledger: Ledger | None = None
        self._snapshot: Snapshot | None = None
        self._is_begun = self._has_told = False
        self._lost_steps, self.lost, self.save_s, self.num_recorded, self.is_rewound = 0, "", 0.0, 0, False
        self._made_directories: list[Path] = []
        self._made_files: list[Path] = []
        self.record: dict[str, Any] = {}
        try:
            self.named = _choose(path, fresh)
            self.path = self.named.absolute()  # the script may change the working directory
            self._key = Path(os.path.realpath(self.path))  # resolve() has errors of its own for a circle of links
            if before := _open.get(self._key):
                before.close()
            self.store = Store(self.path, self.named)
            self._lock = self._take_lock()
            refuse_links(self.named, ("snapshots", "abandoned", "orders", LOGS))
            self.record = self._read_record(is_ours=not self._lock.is_new)  # it may have been killed before it began
            self.rewinds: list[int] = self.record.get("rewinds", [])
        except OSError as error:
            self.close()
            raise Error(f"the run directory {path} cannot be written ({_reason(error)}): name another one") from None
        except Error:
            self.close()
            raise
        _open[self._key] = self

    # --- whose it is ------------------------------------------------------------------------------------------

    def _take_lock(self) -> Lock:
        for parent in (self.path, *self.path.parents):
            if parent.exists():
                break
            self._made_directories.append(parent)
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # who made the directory has just removed it, since its run did not begin
                return Lock(self.path / "lock", self.named)

    def _read_record(self, *, is_ours: bool) -> dict[str, Any]:
        path = self.path / "run.json"
        if not path.exists():
            rows = self.path / "metrics.jsonl"
            if (not is_ours and rows.exists() and rows.stat().st_size) or self.store.snapshots():
                raise Error(f"{self.named} holds files of a run but no run.json: name another run directory")
            return {}
        try:
            record = parse_record(path.name, read_bytes(path))
        except ValueError as error:
            what = f"{path} cannot be read as JSON ({error})"
            raise Error(f"{what}: repair it, or start with {advise(fresh=True)}") from None
        if record.get("format") != FORMAT:
            raise Error(f"{path} has format {record.get('format')}, this samestep reads {FORMAT}: update samestep")
        return record

    def read_record_again(self) -> None:
        """Reads `run.json`, where another copy's was put since this was opened. Raises Error."""
        self.record = self.record or self._read_record(is_ours=True)

    def check_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Compares with the numbers of the run that is here, as far as both are known.

        Raises:
            Error: they differ, so it is another run.
        """
        if different := find_different(self.record.get("numbers", {}), numbers):
            raise Error(
                f"{self.named} holds another run ({different}): use its numbers, another run directory, "
                f"or start beside it with {advise(fresh=True)}"
            )

    def write_record(
        self, numbers: Mapping[str, Any], machine: Mapping[str, Any], config: Mapping[str, Any], options: Options
    ) -> None:
        """Begins the run, or begins it again: writes down whose directory this is, and warns of what has changed.

        Args:
            numbers, machine: the run's identity, and what its bits depend on besides.
            config, options: the script's own, and the settings of its optimizers and schedules.
        """
        config = json.loads(json.dumps(dict(config), default=str), parse_constant=str)  # JSON has no nan
        step = 0 if self._snapshot is None else self._snapshot.step
        found = {
            "the machine, and the bits with it": describe_changes(self.record.get("machine", machine), machine),
            "config": describe_changes(self.record.get("config", config), config),
            "settings": options.overridden,
            "the data": options.changed_data,
        }
        for what, changed in found.items():
            if changed:
                self._warn(f"changed since the run began: {what} ({changed})")
        # An override at this very step was that of a start which this one replaces.
        rows = [r for r in self.record.get("changes", []) if r["after_step"] < step + (OVERRIDE not in r["changed"])]
        rows += [{"after_step": step, "changed": changed} for changed in found.values() if changed and step]
        self.begin()
        record = {"format": FORMAT, "samestep": __version__, "numbers": dict(numbers), "machine": dict(machine)}
        record |= {"settings": dict(options.in_force), "asked": dict(options.asked), "samples": options.samples}
        record |= {"config": config, "rewinds": self.rewinds, "changes": rows, "loops": self.record.get("loops", [])}
        self._replace_record(record)
        self.record, self._is_begun = record, True

    def write_loops(self, loops: Sequence[Mapping[str, Any]]) -> None:
        """Records the run's loops after the first one, whose numbers are the run's."""
        self.record["loops"] = [*loops]
        self._replace_record(self.record)

    def _replace_record(self, record: Mapping[str, Any]) -> None:
        replace_file(self.path / "run.json", json.dumps(record, indent=2, allow_nan=False).encode(), sync=True)

    # --- what is in it ----------------------------------------------------------------------------------------

    def find(self, resume: str | int | None) -> Snapshot | None:
        """The snapshot to go on from; None to begin. Cleans up what dead writers left."""
        self.store.clean()
        if resume is None:
            if self.store.snapshots():
                raise build_never_error(self.named)
            return None
        return self.go_on_from(self.store.find(resume, warn=self._warn, judge=self._judge))

    def _judge(self, snapshot: Snapshot) -> str:
        """A backup that was brought back may be one of another run."""
        if not fits(meta := snapshot.manifest["meta"], {"metrics_bytes": is_count, "numbers": is_object}):
            return "its manifest is not that of a run"
        different = find_different(meta["numbers"], self.record.get("numbers", {}))
        return f"it is of another run ({different})" if different else ""

    def go_on_from(self, snapshot: Snapshot | None) -> Snapshot | None:
        """Makes this the snapshot that `begin` goes back to. Returns it."""
        self._snapshot = snapshot
        return snapshot

    def begin(self) -> None:
        """Makes the directory what it was at the snapshot found, or at the beginning. Once.

        Later rows and records are cut. Snapshots of later steps, which are there after a resume from an older one,
        are moved into `abandoned/`.
        """
        if self._lock is None:
            raise self._is_taken_over()
        if self._ledger is not None:
            return
        step = 0 if self._snapshot is None else self._snapshot.step
        later = [other for other in self.store.snapshots() if self._snapshot is not None and other.step > step]
        self.store.abandon(later)  # and the rows last: after a crash in between, it is sound at the newest left
        if later or self.is_rewound:
            self.rewinds = [*self.rewinds, step]
        if later:
            plural = "s" if len(later) > 1 else ""
            self._warn(f"{len(later)} snapshot{plural} after step {step} went to {self.named / 'abandoned'}")
        rows, records = self.path / "metrics.jsonl", self.path / "ledger.bin"
        self._made_files += [path for path in (rows, records) if not path.exists()]
        if self._lock.was_elsewhere:
            for path in (rows, records):
                part_from_old_writers(path)
        self._forget_end()
        self._metrics, self._ledger = Metrics(rows), Ledger(records)
        self._lost_steps = max(self._ledger.num_steps - step, self.num_recorded - step, 0)
        is_whole = self._metrics.cut(0 if self._snapshot is None else self._snapshot.manifest["meta"]["metrics_bytes"])
        for path, whole in ((rows, is_whole), (records, self._ledger.cut(step))):
            if not whole:
                self._warn(f"{path} is shorter than when step {step} was saved: a part of it is missing")
        for row in self._early_rows if self._snapshot is None else ():
            self._metrics.append(row)

    def _forget_end(self) -> None:
        """The ledger is about to be cut: it need not reach to where the last start ended."""
        status = read_or_empty(self.path / STATUS)
        if "steps" in status:
            with suppress(OSError):
                overwrite(self.path / STATUS, json.dumps({**status, "steps": 0}) + "\n")

    def check_still_ours(self) -> None:
        """Raises Error where another process, on another machine perhaps, has taken the run over."""
        if self._lock is None:
            raise self._is_taken_over()
        self._lock.check()

    def find_restart(self) -> int:
        """The number of this start: 0 is the run's first, then as in `restarts.jsonl`; none that has logs already."""
        num_starts = count_lines(self.path / RESTARTS) + bool(read_or_empty(self.path / STATUS))
        taken = [int(path.name) for path in (self.path / LOGS).glob("*") if path.name.isdecimal()]
        return max([num_starts, *(number + 1 for number in taken)])

    def write_start(self, restart: Restart | None, *, from_step: int, world_size: int) -> None:
        """Adds a line to `restarts.jsonl`, unless this is the run's first start.

        Args:
            restart: what the launcher knows; None: only the directory tells how the last start ended.
            from_step: the steps done by now.
            world_size: of this start.
        """
        path = self.path / RESTARTS
        before = read_or_empty(self.path / STATUS)
        if before or restart is not None:
            row = {
                "time": _now(),
                "restart": count_lines(path) + 1,
                "reason": restart.reason if restart is not None else _describe_end(before),
                "rank": restart.rank if restart is not None else None,
                "from_step": from_step,
                "lost_steps": self._lost_steps,
                "world_size": world_size,
            }
            try:
                add_line(path, json.dumps(row))
            except OSError as error:
                self._warn(f"{path} could not be written ({_reason(error)}): the run goes on")
        self.write_status("running", "")

    def write_status(self, status: str, reason: str, end: Mapping[str, Any] | None = None) -> None:
        """Says how the run stands: `status.json`, for the next start to read.

        Args:
            status: "running", "stopped", "done" or "failed".
            reason: a sentence; "" where there is none.
            end: of a loop that has ended: `steps`, of which the ledger is to have a record each, and `measured`.
        """
        if self._lock is None or not self._is_begun:
            return
        record = {"status": status, "reason": reason, "time": _now(), "host": read_host(), "process": os.getpid()}
        record |= {} if end is None else {**end, **({"lost": self.lost} if self.lost else {})}
        with suppress(OSError, Error):  # the disk is read-only, for instance, or the run is another's by now
            self._lock.check()
            overwrite(self.path / STATUS, json.dumps(record) + "\n")

    # --- what is written in it --------------------------------------------------------------------------------

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Adds a row to the metrics. Before `begin`, it is not known yet whether a run's first start has done so."""
        if self._lock is None:
            raise self._is_taken_over()
        if self._metrics is None:
            self._early_rows.append(row)
        else:
            self._metrics.append(row)
            self._tell_of(self._metrics.problem)

    def write_rows(self, rows: bytes = b"") -> None:
        """Adds rows, as they stand in another copy of the file, and brings all to it.

        Raises:
            OSError: they could not be written; they are kept and tried again.
        """
        if self._metrics is not None:
            self._metrics.extend(rows)
            self._metrics.position()

    def enter(self, step: int, epoch: int, num_samples: int, fingerprint: int) -> None:
        """Adds a finished step (counted from 0) to the ledger."""
        if self._ledger is None:
            raise self._is_taken_over()
        self._ledger.append(step, epoch, num_samples, fingerprint)
        self._tell_of(self._ledger.problem)

    def _tell_of(self, problem: str) -> None:
        if problem and not self._has_told:
            self._has_told = True
            self._warn(
                f"{self.named} cannot be written ({problem}): the rows and records of steps are kept in memory until "
                "it can be, the run goes on"
            )

    def find_lost(self) -> str:
        """What cannot be written now of the rows and records up to here, and why; "" where they are in their files."""
        if self._metrics is None or self._ledger is None:
            return ""
        problem = self.lost = ""
        for flush in (self._metrics.position, self._ledger.flush):
            try:
                flush()
            except OSError as error:
                problem = _reason(error)
        if problem:
            lacks = f"its last {self._metrics.num_left} rows and ledger.bin its last {self._ledger.num_left} steps"
            self.lost = f"{self.named} could not be written ({problem}): metrics.jsonl lacks {lacks}"
        elif not (self.path / "ledger.bin").exists():
            self.lost = f"{self.named} was removed under way: nothing is left of what the run has written there"
        return self.lost

    def mark(self, *, epoch: int, world_size: int, notes: Mapping[str, Any]) -> dict[str, Any]:
        """What a snapshot of this moment is to say in its manifest; rows and records up to here are in their files.

        Args:
            notes: further keys: `stopped`, the reason of the run.stop() that ends the run here; `tally`, see `Tally`.

        Raises:
            Error: another process has taken the run over.
            OSError: the disk is full or gone.
        """
        if self._ledger is None or self._metrics is None:
            raise self._is_taken_over()
        self.check_still_ours()
        self._ledger.flush()
        return {
            "epoch": epoch,
            "metrics_bytes": self._metrics.position(),
            "world_size": world_size,
            "numbers": self.record["numbers"],
            "settings": self.record["settings"],
            "rewinds": len(self.rewinds),
            **notes,
        }

    def save(
        self, structure: Any, tensors: Mapping[str, Any], *, step: int, name: str | None, meta: Mapping[str, Any],
        confirm: Callable[[], None],
    ) -> None:  # fmt: skip
        """Writes a snapshot of what `snapshot.serialization.encode` and `mark` gave. Any thread may, one at a time.

        Raises:
            Error: another process has taken the run over.
            OSError: the disk is full or gone; older snapshots stand.
        """
        if self._ledger is None or self._metrics is None:
            raise self._is_taken_over()
        began_s = time.monotonic()
        self._ledger.sync()  # or a machine's end could leave a snapshot of steps that the ledger has not
        self._metrics.sync()

        def confirm_all() -> None:
            nonlocal began_s
            waits_s = time.monotonic()
            confirm()
            began_s += time.monotonic() - waits_s
            self.check_still_ours()

        self.store.write_encoded(structure, tensors, step=step, name=name, meta=meta, confirm=confirm_all)
        self.save_s = time.monotonic() - began_s

    def prune(self, keep: int) -> None:
        """Removes the oldest numbered snapshots above `keep`. Errors as for `save`."""
        self.check_still_ours()
        self.store.prune(keep)

    def explain_failure(self, step: int, error: Exception) -> str:
        """What is to be said of a snapshot that could not be written."""
        try:
            sound = [other.step for other in self.store.snapshots() if other.problem is None]
            stands = f"the one of step {max(sound)} stands" if sound else "there is none yet"
        except OSError:
            stands = "those that were there cannot be read"
        why = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        return f"the snapshot of step {step} could not be written ({why}): {stands}"

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed, or taken over by a later run."""
        return self._lock is not None

    def close(self) -> None:
        """Gives the directory up. One that no run began in is left as it was found. A second call does nothing."""
        self.before_close()
        if self._is_begun and not self.lost and self.find_lost():
            self._warn(self.lost)
        files, self._metrics, self._ledger = (self._metrics, self._ledger), None, None
        for file in files:
            with suppress(OSError):  # which was told
                if file is not None:
                    file.close()
        if not self._is_begun:
            for path in self._made_files:
                path.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.release(remove=self._lock.is_new and not self._is_begun)
            self._lock = None
            _open.pop(self._key, None)
        if not self._is_begun:
            for path in self._made_directories:
                with suppress(OSError):  # something else is in it by now
                    path.rmdir()

    def _is_taken_over(self) -> Error:
        return Error(f"the run in {self.named} was ended by a later samestep.Run of this process in the same directory")


def _describe_end(status: Mapping[str, Any]) -> str:
    """How the last start ended. One that was killed, or whose machine was lost, had no time to say so."""
    return status.get("reason") or ("the run was done" if status.get("status") == "done" else "unknown")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _choose(path: Path, fresh: bool) -> Path:
    """`path`; with `fresh`, the first of x, x-2, x-3 ... that holds nothing."""
    number, chosen = 2, path
    while fresh and chosen.exists() and any(chosen.iterdir()):
        beside = path.absolute()
        chosen, number = beside.with_name(f"{beside.name}-{number}"), number + 1
    return chosen
