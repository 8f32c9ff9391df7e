"""The run's directory: whose it is, who writes in it, what is in it. Rank 0 alone holds one."""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep import __version__
from samestep.errors import Error
from samestep.plan.ledger import RECORD
from samestep.snapshot.store import Snapshot, Store
from samestep.train.lock import Lock
from samestep.watch.metrics import Metrics

FORMAT = 1
LEDGER_FLUSH_RECORDS = 1024

_open: dict[Path, "Directory"] = {}  # of this process


class Directory:
    """One run on disk, locked by this process until it is closed or the process ends.

    Nothing but the lock is written before `begin`. A later run of the same process in the same directory takes it
    over, as when a notebook's cell is run again.

    Raises:
        Error: it cannot be written, another process is at it, or it holds something else.
    """

    def __init__(self, path: Path, *, fresh: bool, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._lock: Lock | None = None
        self._metrics: Metrics | None = None
        self._ledger: Ledger | None = None
        self._snapshot: Snapshot | None = None
        self._is_begun = False
        self._made_directories: list[Path] = []
        self._made_files: list[Path] = []
        self.record: dict[str, Any] = {}
        try:
            self.path = _choose(path, fresh)
            self._key = self.path.resolve()
            if before := _open.get(self._key):
                before.close()
            self.store = Store(self.path)
            self._lock = self._take_lock()
            self.record = self._read_record(is_ours=not self._lock.is_new)  # it may have been killed before it began
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
                return Lock(self.path / "lock")

    def _read_record(self, *, is_ours: bool) -> dict[str, Any]:
        path = self.path / "run.json"
        if not path.exists():
            rows = self.path / "metrics.jsonl"
            if (not is_ours and rows.exists() and rows.stat().st_size) or self.store.snapshots():
                raise Error(f"{self.path} holds files of a run but no run.json: name another run directory")
            return {}
        try:
            record = json.loads(path.read_text())
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise Error(f"{path} cannot be read as JSON: repair it, or start with --fresh")
        if record.get("format") != FORMAT:
            raise Error(f"{path} has format {record.get('format')}, this samestep reads {FORMAT}: update samestep")
        return record

    def check_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Compares with the numbers of the run that is here, as far as both are known.

        Raises:
            Error: they differ, so it is another run.
        """
        there = self.record.get("numbers", {})
        different = [f"{name} {there[name]} there, {value} here" for name, value in numbers.items()
                     if name in there and there[name] != value]  # fmt: skip
        if different:
            raise Error(
                f"{self.path} holds another run ({'; '.join(different)}): use its numbers, another run directory, "
                "or --fresh to start beside it"
            )

    def write_record(self, numbers: Mapping[str, Any], machine: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Begins the run, or begins it again: writes down whose directory this is, and warns of what has changed.

        Args:
            numbers: the run's identity.
            machine: on which the bits depend as well.
            config: the script's own.
        """
        config = json.loads(json.dumps(dict(config), default=str))
        if changed := _find_changes(self.record.get("machine", machine), machine):
            self._warn(f"{changed} since the run began: from here on, its bits are no longer those of the old setting")
        if changed := _find_changes(self.record.get("config", config), config):
            self._warn(f"config has changed since the run began, {changed}; what was restored keeps its values")
        self.begin()
        record = {
            "format": FORMAT,
            "samestep": __version__,
            "numbers": dict(numbers),
            "machine": dict(machine),
            "config": config,
        }
        temporary = self.path / ".run.json"
        try:
            with open(temporary, "w") as file:
                json.dump(record, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path / "run.json")
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self.record, self._is_begun = record, True

    # --- what is in it ----------------------------------------------------------------------------------------

    def find(self, resume: str | int | None) -> Snapshot | None:
        """The snapshot to go on from; None to begin. Cleans up what dead writers left."""
        self.store.clean()
        if resume is None:
            if self.store.snapshots():
                raise Error(f"{self.path} already has snapshots and resume is never: use --resume latest, or --fresh")
            return None
        self._snapshot = self.store.find(resume, warn=self._warn)
        return self._snapshot

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
        for other in reversed(later):  # and the rows last: after a crash in between, it is sound at the newest left
            target = self.path / "abandoned" / f"{other.path.name}-{time.time_ns()}"
            target.parent.mkdir(exist_ok=True)
            os.rename(other.path, target)
        if later:
            self._warn(f"{len(later)} snapshots after step {step} were moved to {self.path / 'abandoned'}")
        rows, records = self.path / "metrics.jsonl", self.path / "ledger.bin"
        self._made_files += [path for path in (rows, records) if not path.exists()]
        self._metrics, self._ledger = Metrics(rows), Ledger(records)
        is_whole = self._metrics.cut(0 if self._snapshot is None else self._snapshot.manifest["meta"]["metrics_bytes"])
        for path, whole in ((rows, is_whole), (records, self._ledger.cut(step))):
            if not whole:
                self._warn(f"{path} is shorter than when step {step} was saved: a part of it is missing")

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Adds a row to the metrics."""
        self.begin()
        assert self._metrics is not None
        self._metrics.append(row)

    def enter(self, step: int, epoch: int, num_samples: int, fingerprint: int) -> None:
        """Adds a finished step (counted from 0) to the ledger."""
        if self._ledger is None:
            raise self._is_taken_over()
        self._ledger.append(step, epoch, num_samples, fingerprint)

    def save(self, state: Mapping[str, Any], *, name: str | None, world_size: int) -> bool:
        """Writes a snapshot. False where the disk is full or gone: said, and the run goes on with the older one."""
        if self._ledger is None or self._metrics is None:
            raise self._is_taken_over()
        step, epoch = state["position"]["step"], state["position"]["epoch"]
        try:
            self._ledger.sync()
            meta = {
                "epoch": epoch,
                "metrics_bytes": self._metrics.position(),
                "world_size": world_size,
                "numbers": self.record["numbers"],
            }
            self.store.write(state, step=step, name=name, meta=meta)
        except OSError as error:
            sound = [other.step for other in self.store.snapshots() if other.problem is None]
            stands = f"the one of step {max(sound)} stands" if sound else "there is none yet"
            self._warn(f"the snapshot of step {step} could not be written ({error}): {stands}, the run goes on")
            return False
        return True

    def prune(self, keep: int) -> None:
        """Removes the oldest numbered snapshots above `keep`."""
        try:
            self.store.prune(keep)
        except OSError as error:
            self._warn(f"old snapshots could not be removed ({error}): the run goes on")

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed, or taken over by a later run."""
        return self._lock is not None

    def close(self) -> None:
        """Gives the directory up. One that no run began in is left as it was found. A second call does nothing."""
        files, self._metrics, self._ledger = (self._metrics, self._ledger), None, None
        for file in files:
            try:
                if file is not None:
                    file.close()
            except OSError as error:
                self._warn(f"the last rows could not be written to {self.path} ({_reason(error)})")
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
        return Error(f"the run in {self.path} was ended by a later samestep.Run of this process in the same directory")


class Ledger:
    """`ledger.bin`: what each finished step used. Raises OSError where the file cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._pending = bytearray()

    def cut(self, num_steps: int) -> bool:
        """Keeps the first `num_steps` records. False where there are fewer."""
        size = num_steps * RECORD.size
        is_whole = os.fstat(self._file).st_size >= size
        os.ftruncate(self._file, size)
        return is_whole

    def append(self, step: int, epoch: int, num_samples: int, fingerprint: int) -> None:
        """Adds a record. Never raises for a full disk: it is kept and tried again, and `sync` raises."""
        self._pending += RECORD.pack(step, epoch, num_samples, fingerprint)
        if not len(self._pending) % (LEDGER_FLUSH_RECORDS * RECORD.size):
            with suppress(OSError):
                self._flush()

    def sync(self) -> None:
        """Brings all records to the disk. Raises OSError where that cannot be done."""
        self._flush()
        os.fsync(self._file)

    def close(self) -> None:
        """Writes what is left and closes the file."""
        try:
            self._flush()
        finally:
            os.close(self._file)

    def _flush(self) -> None:
        while self._pending:
            # A full disk may cut a write short: what did not go stays.
            del self._pending[: os.write(self._file, self._pending)]


def _find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    keys = sorted({*before, *now})
    return ", ".join(f"{key} {before.get(key)} -> {now.get(key)}" for key in keys if before.get(key) != now.get(key))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _choose(path: Path, fresh: bool) -> Path:
    """`path`; with `fresh`, the first of x, x-2, x-3 ... that holds nothing."""
    number, chosen = 2, path
    while fresh and chosen.exists() and any(chosen.iterdir()):
        beside = path.absolute()
        chosen, number = beside.with_name(f"{beside.name}-{number}"), number + 1
    return chosen
