"""The run's directory: whose it is, who writes in it, what is in it. Rank 0 alone holds one."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from samestep import __version__
from samestep.errors import Error
from samestep.plan.ledger import RECORD
from samestep.snapshot.store import Snapshot, Store
from samestep.watch.metrics import Metrics
from samestep.world.environment import read_host

FORMAT = 1


class Directory:
    """One run on disk, locked by this process for as long as it lives.

    Raises:
        Error: it cannot be written, another process is at it, or it holds something else.
    """

    def __init__(self, path: Path, *, fresh: bool, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._existed = path.exists()
        self.path = _make(path, fresh)
        is_ours = (self.path / "lock").exists()  # maybe of a run that was killed before it began
        self._lock = self._take_lock()
        self.store = Store(self.path)
        self._ledger: IO[bytes] | None = None
        try:
            self.record: dict[str, Any] = self._read_record(is_ours)
        except Error:
            if not is_ours:
                (self.path / "lock").unlink()
            self._lock.close()
            raise
        self.metrics = Metrics(self.path / "metrics.jsonl")

    # --- whose it is ------------------------------------------------------------------------------------------

    def _take_lock(self) -> IO[str]:
        """A POSIX lock: it ends with this process however that dies, and data workers do not inherit it."""
        path = self.path / "lock"
        try:
            lock = open(path, "a+")  # noqa: SIM115
        except OSError as error:
            raise Error(
                f"the run directory {self.path} cannot be written ({error.strerror}): name another one"
            ) from None
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise Error(
                f"the run in {self.path} is alive, in {holder}: wait for it or stop it, or start with --fresh"
            ) from None
        if not path.exists() or os.fstat(lock.fileno()).st_ino != path.stat().st_ino:
            lock.close()  # whoever held it has just removed it
            return self._take_lock()
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {read_host()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        lock.flush()
        return lock

    def _read_record(self, is_ours: bool) -> dict[str, Any]:
        path = self.path / "run.json"
        if not path.exists():
            rows = self.path / "metrics.jsonl"
            if (not is_ours and rows.exists() and rows.stat().st_size) or self.store.snapshots():
                raise Error(f"{self.path} holds files of a run but no run.json: name another run directory")
            return {}
        try:
            record: dict[str, Any] = json.loads(path.read_text())
        except ValueError:
            raise Error(f"{path} cannot be read as JSON: repair it, or start with --fresh") from None
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
        """Writes down whose directory this is; warns where what may change has changed.

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
        self.record = {
            "format": FORMAT,
            "samestep": __version__,
            "numbers": dict(numbers),
            "machine": dict(machine),
            "config": config,
        }
        temporary = self.path / ".run.json"
        with open(temporary, "w") as file:
            json.dump(self.record, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / "run.json")

    # --- what is in it ----------------------------------------------------------------------------------------

    def find(self, resume: str | int | None) -> Snapshot | None:
        """The snapshot to go on from; None to begin. Cleans up what dead writers left."""
        self.store.clean()
        if resume is None:
            if self.store.snapshots():
                raise Error(f"{self.path} already has snapshots and resume is never: use --resume latest, or --fresh")
            return None
        return self.store.find(resume, warn=self._warn)

    def rewind(self, snapshot: Snapshot | None) -> None:
        """Makes the directory what it was at `snapshot` (None: at the beginning): later rows and snapshots go.

        Snapshots of later steps, which exist after a resume from an older one, are moved into `abandoned/`.
        """
        step = 0 if snapshot is None else snapshot.step
        later = [other for other in self.store.snapshots() if snapshot is not None and other.step > step]
        for other in reversed(later):  # and the rows last: after a crash in between, it is sound at the newest left
            target = self.path / "abandoned" / f"{other.path.name}-{time.time_ns()}"
            target.parent.mkdir(exist_ok=True)
            os.rename(other.path, target)
        if later:
            self._warn(f"{len(later)} snapshots after step {step} were moved to {self.path / 'abandoned'}")
        rows = 0 if snapshot is None else snapshot.manifest["meta"]["metrics_bytes"]
        if not self.metrics.cut(rows):
            self._warn(f"{self.path / 'metrics.jsonl'} is shorter than when step {step} was saved: rows are missing")
        self._ledger = open(self.path / "ledger.bin", "ab")  # noqa: SIM115
        self._ledger.truncate(step * RECORD.size)

    def enter(self, step: int, epoch: int, num_samples: int, fingerprint: int) -> None:
        """Adds a finished step (counted from 0) to the ledger."""
        assert self._ledger is not None
        self._ledger.write(RECORD.pack(step, epoch, num_samples, fingerprint))

    def save(self, state: Mapping[str, Any], *, name: str | None, world_size: int) -> bool:
        """Writes a snapshot. False where the disk is full or gone: said, and the run goes on with the older one."""
        assert self._ledger is not None
        step, epoch = state["position"]["step"], state["position"]["epoch"]
        try:
            self._ledger.flush()
            os.fsync(self._ledger.fileno())
            meta = {
                "epoch": epoch,
                "metrics_bytes": self.metrics.position(),
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

    def close(self) -> None:
        """Gives the directory up. One that no run began in is left as it was found."""
        self.metrics.close()
        if self._ledger is not None:
            self._ledger.close()
        if not self.record:
            for name in ("lock", "metrics.jsonl", "ledger.bin"):
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.path / "snapshots", ignore_errors=True)
            if not self._existed and not any(self.path.iterdir()):
                self.path.rmdir()
        self._lock.close()


def _find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    keys = sorted({*before, *now})
    return ", ".join(f"{key} {before.get(key)} -> {now.get(key)}" for key in keys if before.get(key) != now.get(key))


def _make(path: Path, fresh: bool) -> Path:
    """The directory, made if need be; with `fresh`, the first of x, x-2, x-3 ... that holds nothing."""
    number = 2
    wanted = path
    while fresh and wanted.exists() and any(wanted.iterdir()):
        wanted, number = path.with_name(f"{path.name}-{number}"), number + 1
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Error(f"the run directory {wanted} cannot be made ({error.strerror}): name another one") from None
    return wanted
