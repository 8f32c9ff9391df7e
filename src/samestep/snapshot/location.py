"""The location of a run: the interface between a run and the directories and the URL that store its files.

All of samestep above this package uses a `Location`; docs/dev/run_location.md describes it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

from samestep.config import RunConfig, is_url
from samestep.errors import KINDS, Error, InvalidValue, NotHealed, RunDirectoryError, name_kind
from samestep.launch.rank_reports import start_log
from samestep.snapshot.async_copy import SnapshotOrder, TrainingState
from samestep.snapshot.continued_run import continue_run
from samestep.snapshot.copies import Copies, find_writers, warn
from samestep.snapshot.logs import Heal, KeptLogs
from samestep.snapshot.manifest import Extents, Snapshot, find_damage
from samestep.snapshot.mirror import Mirror
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.run_record import CopyContent, ResumePoint, StartOptions, choose
from samestep.snapshot.serialization import SavedState
from samestep.snapshot.store import SavedRun, Store
from samestep.watch.records import LOCK, LOGS
from samestep.world.environment import read_host
from samestep.world.group import Group

T = TypeVar("T")


class Location:
    """The location of a run: a directory, of which each machine may keep a copy, and which a URL may mirror; or none.

    A run without a directory stores nothing and resumes nothing. The calls in the order of a run; all ranks make those
    without a comment together, the constructor included::

        point = location.find_resume_point(resume, numbers)
        if not point.is_beginning:
            state = location.open(point)                      # each rank
        location.begin(point, options)
        for each snapshot:
            order = location.align(order, state)
            parts = location.prepare(order)                   # each rank, in a thread
            location.commit(order, parts)                     # each rank, in a thread; or `abort`
        location.end()
        location.write_status(status, reason, end)            # each rank
        location.close()                                      # each rank

    Args:
        config: the directory or URL, and the run's identity.
        say: prints a message, on rank 0.
        keeps: whether ranks that do not write keep what they need to take the place of rank 0.

    Attributes:
        group: the ranks.
        path: the run's directory or, of a run at a URL, the working copy; None without one.
        named: the same as the user gave it.
        shown: the directory or the URL, for messages.
        directory: the run directory, on ranks that write one; None on others, and after `close`.
        kept: what this rank keeps to take the place of rank 0; None on ranks that write, and if none takes its place.
        is_replicated: whether several ranks write a copy of the run each.
        is_divided: whether each rank writes the part of the state that it holds. If not, a writer needs all of it.
        warn: prints a message about this rank's files, on this rank and in any thread.
        logs: the directory for the logs of this start's ranks, `<rank>.log`; None before `begin`.

    Raises:
        Error: the directory or the URL cannot be used, or holds another run. It is closed then.
    """

    def __init__(self, config: RunConfig, group: Group, say: Callable[[str], None], *, keeps: bool = False) -> None:
        if config.continue_from is not None and not isinstance(config.run_dir, Path):
            raise InvalidValue(
                "--continue-from begins a run in a directory: set run_dir to a new one, not to None or a URL",
                code="SS104",
            )
        self.group = group
        self._config = config
        self._say = self.warn = say
        self.directory: RunDirectory | None = None
        self.logs: Path | None = None
        self._mirror: Mirror | None = None  # on rank 0
        self._copies: Copies | None = None
        self._rewinds: Sequence[int] = ()
        self._writers: Sequence[int] = (0,)  # the ranks that write: rank 0, or one for each disk
        self.named = config.run_dir if isinstance(config.run_dir, Path) else None
        self.shown = str(config.run_dir)
        if isinstance(config.run_dir, str):
            self.shown, self.named = self._join_mirror(config.run_dir)
        if self.named is not None:
            self.named, writer_of = find_writers(group, self.named)
            self._writers = sorted({*writer_of.values()})
        if config.fresh and isinstance(config.run_dir, Path):
            self.named = self._find_unused(config.run_dir)
            self.shown = str(self.named)
        self.path = None if self.named is None else self.named.absolute()  # the script may change the working directory
        self._store = None if self.path is None else Store(self.path)  # to open snapshots, and to write parts of them
        self.is_replicated = len(self._writers) > 1
        has_shared = self.path is not None and not self.is_replicated
        has_parts = config.divides_state or group.ranks_per_replica > 1
        self.is_divided = has_shared and has_parts and group.world_size > 1
        self.kept = KeptLogs() if has_shared and keeps and group.rank else None
        if self.is_replicated:
            self._copies = Copies(group, self._writers, self._each_directory)
            self.warn = say if group.rank == 0 else warn
            say(f"{self.named} is not shared by all nodes: {len(self._writers)} of them keep a copy of the run each")
        if self.named is not None:
            try:
                self._each(partial(self._open_directory, self.named))
            except Error:
                self.close()
                raise

    def _join_mirror(self, wanted: str) -> tuple[str, Path]:
        """Join the run at a URL, on rank 0. Return its URL and the directory of its working copy there."""

        def join() -> tuple[str, Path]:
            url = wanted.rstrip("/")
            if self._config.fresh:
                url = next(each for each in _list_names(url) if Mirror(each).is_empty())
            self._mirror = Mirror(url, self._say)
            path = self._mirror.join(self._config.local_dir)
            self._say(f"the working copy of {url} is {path}")
            return url, path

        return self.group.once(join)

    def _find_unused(self, wanted: Path) -> Path:
        """Return the first of x, x-2, x-3 ... that has no files on any node."""
        named = wanted if wanted.name else wanted.absolute()  # "." has no name
        return next(
            each
            for each in map(Path, _list_names(str(named)))
            if not any(self.group.each(partial(_holds_files, each), on=self._writers))
        )

    def _open_directory(self, named: Path) -> None:
        self.directory = RunDirectory(named, warn=self.warn)
        identity = self._config.identity()
        continue_run(self.directory, self._config.continue_from, identity, self.warn)
        self.directory.check_numbers(identity)

    def once(self, fn: Callable[[], T]) -> T:
        """Call `fn` on each rank that writes. Return rank 0's result on every rank.

        Raises:
            Error: `fn` raised it on a rank, or a disk is full.
        """
        return self._each(fn)[0]

    def _each_directory(self, fn: Callable[[RunDirectory], T], on: Sequence[int] | None = None) -> list[T]:
        """Call `fn` with the directory of each rank that writes one, or of some of them.

        Return the results on every rank. Raises Error.
        """

        def call() -> T:
            assert self.directory is not None
            return fn(self.directory)

        return self._each(call, on)

    def _each(self, fn: Callable[[], T], on: Sequence[int] | None = None) -> list[T]:
        """Call `fn` on the ranks that write, and name the host of an error if each writes a copy."""
        host = f" on {read_host()}" if self.is_replicated else ""

        def call() -> T:
            try:
                return fn()
            except OSError as error:
                raise RunDirectoryError(
                    f"{error.filename or self.named}{host} cannot be written ({error.strerror or error}): fix that, or "
                    "name another run directory",
                    code="SS401",
                ) from None
            except Error as error:
                if not host:
                    raise
                raise KINDS[name_kind(error)](f"{host.lstrip()}: {error}", code=error.code) from None

        return self.group.each(call, on=self._writers if on is None else on)

    # --- start ------------------------------------------------------------------------------------------------

    def find_resume_point(self, resume: str | int | None, numbers: Mapping[str, Any]) -> ResumePoint:
        """Find where the run begins or continues, and copy here what is needed to continue.

        Args:
            resume: as in `RunConfig`.
            numbers: the numbers of the run, which must be those of the run here.

        Raises:
            Error: this is another run, all snapshots are damaged, or a directory or the URL cannot be read or written.
        """
        if self.path is None:
            return ResumePoint()

        def check(directory: RunDirectory) -> Sequence[int]:
            pulled = () if self._mirror is None else self._mirror.pull_record(directory)
            directory.check_numbers(numbers)
            return max(pulled, directory.record.get("rewinds", []), key=len)

        rewinds = max(self._each_directory(check), key=len)
        checks_parts = self.is_replicated or self.group.world_size == 1

        def look(directory: RunDirectory) -> CopyContent:
            store = directory.store
            store.clean()
            if resume is not None:
                store.abandon([each for each in store.snapshots() if each.was_left(rewinds)])
            if self._mirror is not None:
                self._mirror.pull(store, resume, rewinds, with_files=True)
            return directory.look(resume, checks_parts=checks_parts)

        while True:
            contents = self._each_directory(look)
            source, point = choose(contents, rewinds)
            if self._copies is not None:
                self._copies.complete(self.directory, contents, source, point)
            if checks_parts or not self._refuse_damaged(point):
                self._rewinds = point.rewinds
                return point

    def _refuse_damaged(self, point: ResumePoint) -> bool:
        """Check a divided snapshot on all ranks. If it is damaged, let the next search skip it, and return True.

        Each rank checks as many bytes: rank 0 alone would need the time to read the state of all ranks.
        """
        found = point.snapshot
        if found is None or not found.is_divided:
            return False
        own = find_damage(found.path, found.manifest, self.group.rank, self.group.world_size)
        problem = next((each for each in self.group.gather(own) if each), None)
        if problem is not None:
            self._each_directory(lambda directory: directory.store.refuse(found, problem))
        return problem is not None

    def open(self, point: ResumePoint) -> SavedState:
        """Open the state at a point that is not the beginning, on this rank. Raises Error."""
        assert self._store is not None
        assert point.snapshot is not None
        return self._store.open(point.snapshot, SavedRun)

    def find(self, which: int | str) -> Snapshot | None:
        """Find a snapshot during the run, on rank 0. Arguments, result and errors as for `Store.find`."""
        assert self.path is not None
        store = Store(self.path, self.named)
        if self._mirror is not None:
            self._mirror.pull(store, which, self._rewinds)
        return store.find(which, warn=self._say)

    def begin(self, point: ResumePoint, options: StartOptions) -> None:
        """Take the run back to a point, make this start its writer, and start the logs. Called once. Raises Error."""
        if self.path is None:
            return

        def begin_one(directory: RunDirectory) -> tuple[int, int]:
            directory.check_numbers(options.numbers)
            begun = directory.begin(point, options)
            if self._mirror is not None:
                self._mirror.begin(directory, point.step)
            return begun

        start, num_bytes = self._each_directory(begin_one)[0]
        self.logs = self.path / LOGS / str(start)
        start_log(self.group.number, self.logs / f"{self.group.number}.log")
        if self.kept is not None and not point.is_beginning:
            self.kept.resume(num_bytes)

    # --- under way --------------------------------------------------------------------------------------------

    def align(self, order: SnapshotOrder, state: TrainingState) -> SnapshotOrder:
        """Return the order that this rank executes, with the values that only one rank had. Exchanges them.

        Args:
            state: the state in the order.

        Raises:
            InvalidValue: the states of the ranks have different tensors.
            OSError: this rank could not write the rows of metrics; they are kept, and written with the next ones.
        """
        if self._copies is not None:
            order = self._copies.align(self.directory, order, state)
        drafts: list[str] = []
        problem: OSError | None = None
        if self.directory is not None:
            store = self.directory.store
            try:
                store.clean()  # what failed attempts have left; no rank writes now
                drafts = [store.begin(order.step, name) for name in order.names]
            except OSError as error:
                problem = error
        if self.is_divided:
            drafts = self.group.broadcast(drafts)
        if self._copies is not None:  # last, because a full disk of this rank must not let the others wait
            self._copies.share(self.directory)
        if problem is not None:
            raise problem
        return replace(order, drafts=drafts)

    def prepare(self, order: SnapshotOrder) -> list[Extents]:
        """Write what this rank stores of the snapshots of an order, in any thread. Raises OSError."""
        assert self._store is not None
        return [self._store.prepare(draft, order.tensors, order.share.number) for draft in order.drafts]

    def commit(self, order: SnapshotOrder, parts: Sequence[Extents]) -> None:
        """Complete the snapshots of an order that all ranks have prepared, and remove old ones, in any thread.

        Args:
            parts: those of this rank.

        Raises:
            Error: another process has taken the run over.
            OSError: a disk is full or gone; older snapshots are unchanged.
        """
        if self.directory is None or not order.drafts or order.share.number:  # perhaps it has taken over
            return
        self.directory.sync()  # first: a power cut must not leave a snapshot of steps that the ledger lacks
        for name, draft, own in zip(order.names, order.drafts, parts, strict=True):
            self.directory.store.commit(
                draft,
                own,
                order.structure,
                step=order.step,
                name=name,
                meta=order.meta,
                num_parts=order.share.num_parts,
            )
        try:
            self.directory.store.prune(self._config.keep_last)
        except OSError as error:
            self.warn(f"old snapshots could not be removed ({error}): the run continues")
        if not order.is_last and (problem := self._push()):  # `end` uploads the last one
            self.warn(f"the snapshot of step {order.step} {problem}, and the run continues")

    def abort(self, order: SnapshotOrder) -> None:
        """Remove what the ranks have written of the snapshots of an order, in any thread."""
        if self.directory is not None:
            for draft in order.drafts:
                self.directory.store.abort(draft)

    def _push(self) -> str:
        """Upload what is new. Return the end of a message about the snapshot if that fails; "" otherwise."""
        if self._mirror is None or self.directory is None:
            return ""
        return self._mirror.push(self.directory, self._config.keep_last)

    def write_status(self, status: str, reason: str, end: Mapping[str, Any] | None) -> None:
        """Call `RunDirectory.write_status`, on this rank, for all copies of the run."""
        if self.directory is not None:
            self.directory.write_status(status, reason, end)
            if self._mirror is not None:
                self._mirror.push_status(self.directory)

    def write_heal(self, heal: Heal) -> None:
        """Record a change of the ranks. Call it on all ranks: those that do not write keep it."""
        if self.directory is not None:
            self.directory.write_heal(heal)
        elif self.kept is not None:
            self.kept.heals.append(heal)

    def take_over(self, steps_done: int, *, is_in_loop: bool) -> None:
        """Write the run from now on, on a rank that has become rank 0 because others have died.

        Args:
            steps_done: the number of steps that this rank has finished.
            is_in_loop: whether the loop has not ended yet.

        Raises:
            NotHealed: it cannot.
        """
        if self.path is None:
            return
        if self.kept is None or self.logs is None:
            raise NotHealed("no other rank can write the run")
        try:
            self.directory = RunDirectory(self.path, warn=self.warn)  # the script may have changed the directory
            self.directory.continue_start(int(self.logs.name), self.kept, steps_done, is_in_loop=is_in_loop)
            if is_url(self.shown):
                self._mirror = Mirror(self.shown, self.warn)
                self._mirror.join(self._config.local_dir)
                self._mirror.take()
        except (Error, OSError) as error:
            raise NotHealed(f"no other rank can write the run ({error})") from error
        self.kept = None
        if not is_in_loop and (problem := self._push()):  # what the other rank was uploading at the end
            raise NotHealed(f"the snapshot of step {steps_done} {problem}")

    # --- end --------------------------------------------------------------------------------------------------

    def end(self) -> str:
        """Complete the copies of the run at the end of a loop.

        Returns:
            The end of a message about the newest snapshot if it is not everywhere; "" otherwise.
        """
        if self._copies is not None:
            with suppress(OSError):  # `RunDirectory.complete_logs` reports it
                self._copies.share(self.directory)  # the last rows
        return self._push()

    def close(self) -> bool:
        """Release the files of this rank. Return False if a later run of this process has taken them over before."""
        was_open = self.path is not None
        if self.directory is not None:
            was_open = self.directory.close()
            self.directory = None
        return was_open


def _list_names(name: str) -> Iterator[str]:
    """Yield x, x-2, x-3 ..."""
    return chain([name], (f"{name}-{number}" for number in count(2)))


def _holds_files(directory: Path) -> bool:
    """Return whether a directory exists, and holds more than a lock. Raises RunDirectoryError."""
    try:
        return directory.exists() and any(each.name != LOCK for each in directory.iterdir())
    except OSError as error:
        raise RunDirectoryError(
            f"{directory} cannot be read ({error.strerror}): name another directory", code="SS401"
        ) from None
