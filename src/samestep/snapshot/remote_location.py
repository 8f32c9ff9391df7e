"""A run at a URL: it writes in a working copy on the disk of rank 0, and uploads what it has written."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from samestep.config import RunConfig
from samestep.data.order_files import list_orders
from samestep.errors import Error, NotHealed, RunDirectoryError
from samestep.files import open_regular, replace_file
from samestep.hashing import hash_bytes
from samestep.snapshot.inspection import TrainingState
from samestep.snapshot.kept_logs import Heal, KeptLogs
from samestep.snapshot.location import LocalLocation, RunLocation, SnapshotOrder
from samestep.snapshot.object_store import ObjectStore, find_copy, place_of
from samestep.snapshot.resume_point import ResumePoint
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.run_record import StartOptions, parse_run_record
from samestep.snapshot.serialization import SavedState
from samestep.snapshot.store import Elsewhere, Snapshot, Unreachable
from samestep.watch.records import RECORD, SHARED
from samestep.world.environment import advise, read_host
from samestep.world.forking import at_rest
from samestep.world.group import Group

T = TypeVar("T")


class RemoteLocation(RunLocation):
    """A run at a URL, which only rank 0 accesses.

    Args:
        copies: the working copy: on rank 0's node, or a copy on each node.
        config: `keep_last`.
        url: the URL, for messages.
        remote: on rank 0: the run at the URL.
    """

    def __init__(
        self,
        group: Group,
        copies: LocalLocation,
        config: RunConfig,
        say: Callable[[str], None],
        url: str,
        remote: "RemoteRun | None",
    ) -> None:
        super().__init__(group, say, copies.named, url)
        self._copies = copies
        self._remote = remote
        self._keep = config.keep_last
        self._local_dir = config.local_dir
        self._rewinds: Sequence[int] = ()

    @property
    def is_divided(self) -> bool:
        return self._copies.is_divided

    @property
    def is_replicated(self) -> bool:
        return self._copies.is_replicated

    def limit_wait(self, reason: str, patience_s: float = 0.0) -> None:
        self._copies.limit_wait(reason, patience_s)

    @property
    def directory(self) -> RunDirectory | None:
        return self._copies.directory

    @property
    def kept(self) -> KeptLogs | None:
        return self._copies.kept

    @property
    def logs(self) -> Path | None:
        return self._copies.logs

    def once(self, fn: Callable[[], T]) -> T:
        return self._copies.once(fn)

    def warn(self, sentence: str) -> None:
        self._copies.warn(sentence)

    def find_resume_point(self, resume: str | int | None, numbers: Mapping[str, Any]) -> ResumePoint:
        def pull(directory: RunDirectory) -> Elsewhere | None:
            return None if self._remote is None else self._remote.pull(directory)

        point = self._copies.find_resume_point(resume, numbers, pull)
        self._rewinds = point.rewinds
        return point

    def open(self, point: ResumePoint) -> SavedState:
        return self._copies.open(point)

    def find(self, which: int | str) -> Snapshot | None:
        elsewhere = None if self._remote is None else self._remote.find_elsewhere(self._rewinds)
        return self._copies.find(which, elsewhere)

    def begin(
        self,
        point: ResumePoint,
        numbers: Mapping[str, Any],
        machine: Mapping[str, Any],
        config: Mapping[str, Any],
        options: StartOptions,
    ) -> None:
        self._copies.begin(point, numbers, machine, config, options)

        def take() -> None:
            if self._remote is not None and self.directory is not None:
                self._remote.begin(self.directory, point.step)

        self.once(take)

    def align(self, order: SnapshotOrder, state: TrainingState) -> SnapshotOrder:
        return self._copies.align(order, state)

    def write(self, order: SnapshotOrder, tensors: Mapping[str, Tensor], confirm: Callable[[], None]) -> float:
        took_s = self._copies.write(order, tensors, confirm)
        if not order.is_last:  # `end` uploads the last one
            began_s = time.monotonic()
            if problem := self._push():
                self.warn(f"the snapshot of step {order.step} {problem}, and the run continues")
            took_s += time.monotonic() - began_s
        return took_s

    def write_status(self, status: str, reason: str, end: Mapping[str, Any] | None) -> None:
        self._copies.write_status(status, reason, end)
        if self._remote is not None and self.directory is not None:
            self._remote.push_status(self.directory)

    def write_heal(self, heal: Heal) -> None:
        self._copies.write_heal(heal)

    def take_over(self, steps_done: int, *, is_in_loop: bool) -> None:
        self._copies.take_over(steps_done, is_in_loop=is_in_loop)
        try:
            self._remote = RemoteRun(self.shown, fresh=False, local_dir=self._local_dir, warn=self.warn)
            self._remote.take()
        except Error as error:
            raise NotHealed(f"no other rank can write the run ({error})") from error
        problem = "" if is_in_loop else self._push()  # what the other rank was uploading at the end
        if problem:
            raise NotHealed(f"the snapshot of step {steps_done} {problem}")

    def end(self) -> str:
        problem = self._push()
        return self._copies.end() or problem

    def _push(self) -> str:
        if self._remote is None or self.directory is None:
            return ""
        return self._remote.push(self.directory, self._keep)

    def close(self) -> bool:
        return self._copies.close()


class RemoteRun:
    """A run at a URL, and its working copy on a disk. Only rank 0 has one.

    Args:
        url: as `samestep.Run` got it. With `fresh`, the first of x, x-2, x-3 ... that is empty.
        local_dir: as in `find_copies`.
        warn: prints a message.

    Attributes:
        url: the URL of the run.
        path: directory of the working copy.

    Raises:
        RunDirectoryError: the URL cannot be used or reached.
    """

    def __init__(self, url: str, *, fresh: bool, local_dir: str | None, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._pushed: dict[str, str] = {}  # file -> sha256 of the content uploaded last
        store = ObjectStore(url)
        for number in count(2) if fresh else ():
            if store.is_empty():
                break
            store = ObjectStore(f"{url.rstrip('/')}-{number}")
        self._holder, run = store.read_lock()
        self._store = store
        self.url = store.url
        self._run = run or uuid.uuid4().hex
        self.path = find_copy(self.url, self._run, local_dir)

    def pull(self, directory: RunDirectory) -> Elsewhere:
        """Download `run.json` unless the working copy has one.

        Returns:
            The snapshots at the URL that the run has not left. Fetching one also downloads the files that belong to it.

        Raises:
            RunDirectoryError: there is no run at the URL, or it cannot be read.
            OSError: the working copy cannot be written.
        """

        def download_files() -> None:
            self._store.download([name for name in self._store.list_files() if name != RECORD], directory.path)

        text = self._store.read(RECORD)
        rewinds = directory.record.get("rewinds", [])
        if text is not None:
            record = parse_run_record(text, self.url, f"repair it, or start with {advise(fresh=True)}")
            if not directory.record:
                replace_file(directory.path / RECORD, text)
                directory.read_record()
            rewinds = max(rewinds, record.get("rewinds", []), key=len)
        elsewhere = self._store.find_elsewhere(rewinds, download_files)
        if text is None and elsewhere.snapshots:
            raise RunDirectoryError(
                f"{self.url} holds snapshots but no {RECORD}: name another run directory", code="SS407"
            )
        return elsewhere

    def find_elsewhere(self, rewinds: Sequence[int]) -> Elsewhere:
        """Return the snapshots at the URL that the run has not left. Raises Error as in `pull`."""
        return self._store.find_elsewhere(rewinds)

    def begin(self, directory: RunDirectory, step: int) -> None:
        """Make this process the writer, and move snapshots of later steps to `abandoned/`. Called once.

        Raises:
            RunDirectoryError: the URL cannot be written.
        """
        if self._holder and f" on {read_host()} since " not in self._holder:
            self._warn(f"{self.url} was written by {self._holder}: if it still runs, it ends at its next snapshot")
        self.take()
        self._push_file(directory, RECORD)  # first: it lists the steps that the run went back to
        for each in reversed(self._store.snapshots()):
            if each.step > step:
                self._store.abandon(each)

    def take(self) -> None:
        """Make this process the writer, and remove incomplete snapshots of the one before. Raises Unreachable."""
        self._store.take(self._run)
        self._store.clean()

    @at_rest()  # the network may take long
    def push(self, directory: RunDirectory, keep: int) -> str:
        """Upload the newest numbered snapshot, the newest of each name, and the other files that changed.

        Of the numbered snapshots at the URL, keeps the `keep` newest.

        Returns:
            The end of a message about the snapshot if the URL cannot be written; "" otherwise. The earlier content of
            the URL is undamaged in both cases.

        Raises:
            RunDirectoryError: another process has taken the run over.
        """
        try:
            if not self._store.check():
                self._pushed.clear()
            self._push_files(directory)
            self._push_snapshots(directory, keep)
        except (Unreachable, OSError) as error:
            why = error.reason if isinstance(error, Unreachable) else error
            return f"is in {self.path} only: it could not be uploaded to {self.url} ({why})"
        return ""

    def _push_snapshots(self, directory: RunDirectory, keep: int) -> None:
        there = {each.path.name: each for each in self._store.snapshots()}
        sound = {place: each for place, each in there.items() if each.problem is None}
        own = {place_of(each): each for each in directory.store.snapshots() if each.problem is None}
        steps: dict[str | None, list[int]] = {}
        for each in {**sound, **own}.values():
            steps[each.name] = sorted({*steps.get(each.name, []), each.step})
        # Named ones first: a script that resumes from the numbered one would not request them again.
        for place, each in sorted(own.items(), key=lambda item: item[1].name is None):
            is_there = place in sound and each.is_same(sound[place])
            if is_there or each.step < steps[each.name][-1]:
                continue
            if place in there:
                self._store.remove(place)
            self._store.push(each)
        for place, each in there.items():
            if each.step < steps.get(each.name, [0])[-keep if each.name is None else -1 :][0]:
                self._store.remove(place)

    def push_status(self, directory: RunDirectory) -> None:
        """Upload the status of the run, if possible."""
        with suppress(Error, OSError):
            self._store.check()
            self._push_files(directory)

    def _push_files(self, directory: RunDirectory) -> None:
        for name in (*SHARED, *list_orders(directory.path)):
            self._push_file(directory, name)

    def _push_file(self, directory: RunDirectory, name: str) -> None:
        """Upload a file that exists and has changed. Raises Unreachable or OSError."""
        path = directory.path / name
        if not path.exists():
            return
        with open(path, "rb", opener=open_regular) as file:
            content = file.read()
        if self._pushed.get(name) != (now := hash_bytes(content)):
            self._store.write(name, content)
            self._pushed[name] = now
