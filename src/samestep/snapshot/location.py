"""The location of a run: the interface between a run and the places that store its files.

All of samestep above this package uses a `RunLocation`. Which one it is, `open_location` decides;
docs/dev/run_location.md says how further ones fit.
"""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from samestep.config import RunConfig
from samestep.errors import Error, NotHealed, RunDirectoryError
from samestep.launch.output_recorder import start_log
from samestep.snapshot.inspection import TrainingState
from samestep.snapshot.kept_logs import Heal, KeptLogs
from samestep.snapshot.manifest import find_damage
from samestep.snapshot.parts import OtherParts
from samestep.snapshot.resume_point import Holding, ResumePoint, choose
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.run_record import StartOptions
from samestep.snapshot.serialization import SavedState
from samestep.snapshot.store import SNAPSHOTS, Elsewhere, SavedRun, Snapshot, Store
from samestep.watch.records import LOGS
from samestep.world.group import Group

T = TypeVar("T")


@dataclass(frozen=True)
class SnapshotOrder:
    """Snapshots of one step to be written.

    Attributes:
        names: names of the snapshots; None for a numbered one. Empty on ranks that do not write.
        structure, tensors: the encoded state.
        meta: see `RunDirectory.mark`.
        is_last: whether the loop ends here.
        places: of a divided state: the directories of the snapshots, see `Store.begin_parts`.
    """

    step: int
    names: Sequence[str | None] = ()
    structure: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    is_last: bool = False
    places: Sequence[str] = ()


class RunLocation:
    """The location of a run. This base class stores nothing: the run has no directory and resumes nothing.

    The calls in the order of a run. All ranks make those without a comment together::

        point = location.find_resume_point(resume, numbers)
        if not point.is_beginning:
            state = location.open(point)                      # each rank
        location.begin(point, numbers, machine, config, options)
        for each snapshot:
            order = location.align(order, state)
            location.write(order, tensors, confirm)           # each rank, in a thread
        location.end()
        location.write_status(status, reason, end)            # each rank
        location.close()                                      # each rank

    Args:
        say: prints a message, on rank 0.

    Attributes:
        path: the run's directory or, of a run at a URL, the working copy; None without one.
        named: the same as the user gave it.
        shown: the directory or the URL, for messages.
    """

    def __init__(self, group: Group, say: Callable[[str], None], named: Path | None = None, shown: str = "") -> None:
        self._group = group
        self._say = say
        self.named = named
        self.path = None if named is None else named.absolute()  # the script may change the working directory
        self.shown = shown or str(named)

    @property
    def is_divided(self) -> bool:
        """Whether each rank writes the part of the state that it holds. If not, a writer needs all of it."""
        return False

    def limit_wait(self, reason: str, patience_s: float = 0.0) -> None:
        """Let `write` fail if other ranks do not write their parts. As `OtherParts.limit_wait`."""

    @property
    def directory(self) -> RunDirectory | None:
        """The run directory, on ranks that write one; None on others, and after `close`."""
        return None

    @property
    def kept(self) -> KeptLogs | None:
        """What this rank keeps to take the place of rank 0; None on ranks that write, and if none takes its place."""
        return None

    @property
    def is_replicated(self) -> bool:
        """Whether several ranks write a copy of the run each."""
        return False

    @property
    def logs(self) -> Path | None:
        """The directory for the output of this start's ranks, `<rank>.log`; None before `begin`."""
        return None

    def once(self, fn: Callable[[], T]) -> T:
        """Call `fn` on each rank that writes. Return rank 0's result on every rank.

        Raises:
            Error: `fn` raised it on a rank, or a disk is full.
        """
        return self._group.once(fn)

    def warn(self, sentence: str) -> None:
        """Print a message about this rank's files, on this rank and in any thread."""
        self._say(sentence)

    # --- start ------------------------------------------------------------------------------------------------

    def find_resume_point(self, resume: str | int | None, numbers: Mapping[str, Any]) -> ResumePoint:
        """Find where the run begins or continues, and copy here what is needed to continue.

        Args:
            resume: as in `RunConfig`.
            numbers: the numbers of the run, which must be those of the run here.

        Raises:
            Error: this is another run, all snapshots are damaged, or a place cannot be read or written.
        """
        return ResumePoint()

    def open(self, point: ResumePoint) -> SavedState:
        """Open the state at a point that is not the beginning, on this rank. Raises Error."""
        raise NotImplementedError

    def find(self, which: int | str) -> Snapshot | None:
        """Find a snapshot during the run, on rank 0. Arguments, result and errors as for `Store.find`."""
        raise NotImplementedError

    def begin(
        self,
        point: ResumePoint,
        numbers: Mapping[str, Any],
        machine: Mapping[str, Any],
        config: Mapping[str, Any],
        options: StartOptions,
    ) -> None:
        """Take the run back to a point, make this start its writer, and start the logs. Called once.

        Arguments as for `build_record`. Raises Error.
        """

    # --- under way --------------------------------------------------------------------------------------------

    def align(self, order: SnapshotOrder, state: TrainingState) -> SnapshotOrder:
        """Return the order that this rank executes, with the values that only one rank had. Exchanges them.

        Args:
            state: the state in the order.

        Raises:
            InvalidValue: the states of the ranks have different tensors.
            OSError: this rank could not write the rows of metrics; they are kept, and written with the next ones.
        """
        return order

    def write(self, order: SnapshotOrder, tensors: Mapping[str, Tensor], confirm: Callable[[], None]) -> float:
        """Write the snapshots of an order, and remove old ones, on this rank and in any thread.

        Args:
            tensors: copies of the order's tensors.
            confirm: called before the first manifest. May raise; then nothing is left of the snapshot.

        Returns:
            The duration in seconds, without that of `confirm`.

        Raises:
            Error: another process has taken the run over.
            OSError: a disk is full or gone; older snapshots are unchanged.
        """
        confirm()
        return 0.0

    def write_status(self, status: str, reason: str, end: Mapping[str, Any] | None) -> None:
        """Call `RunDirectory.write_status`, on this rank, for all copies of the run."""

    def write_heal(self, heal: Heal) -> None:
        """Record a change of the ranks. Call it on all ranks: those that do not write keep it."""

    def take_over(self, steps_done: int, *, is_in_loop: bool) -> None:
        """Write the run from now on, on a rank that has become rank 0 because others have died.

        Args:
            steps_done: the number of steps that this rank has finished.
            is_in_loop: whether the loop has not ended yet.

        Raises:
            NotHealed: it cannot.
        """
        if self.path is not None:
            raise NotHealed("no other rank can write the run")

    # --- end --------------------------------------------------------------------------------------------------

    def end(self) -> str:
        """Complete the copies of the run at the end of a loop.

        Returns:
            The end of a message about the newest snapshot if it is not everywhere; "" otherwise.
        """
        return ""

    def close(self) -> bool:
        """Release the files of this rank. Return False if a later run of this process has taken them over before."""
        return False


class LocalLocation(RunLocation):
    """A run in a directory that all nodes share. Rank 0 writes it.

    Args:
        named: the directory as the user gave it.
        config: `keep_last` and the run's identity.
        writers: the ranks that write.
        keeps: whether the others keep what they need to take the place of rank 0.

    Raises:
        Error: the directory cannot be used, or holds another run. It is closed then.
    """

    def __init__(
        self,
        group: Group,
        named: Path,
        config: RunConfig,
        say: Callable[[str], None],
        writers: Sequence[int] = (0,),
        *,
        keeps: bool = False,
    ) -> None:
        super().__init__(group, say, named)
        self._writers = writers
        self._is_divided = config.shard is not None and group.world_size > 1 and len(writers) == 1
        self._others: OtherParts | None = None  # of the last order, on rank 0
        self._keep = config.keep_last
        self._named = named
        self._path = named.absolute()
        self._directory: RunDirectory | None = None
        self._logs: Path | None = None
        self._kept = KeptLogs() if keeps and group.rank else None

        def open_one() -> None:
            self._directory = RunDirectory(named, warn=self.warn)
            self._directory.check_numbers(config.identity())

        try:
            self._each(open_one)
        except Error:
            self.close()
            raise

    @property
    def is_divided(self) -> bool:
        return self._is_divided

    @property
    def is_replicated(self) -> bool:
        return len(self._writers) > 1

    def limit_wait(self, reason: str, patience_s: float = 0.0) -> None:
        if self._others is not None:
            self._others.limit_wait(reason, patience_s)

    @property
    def directory(self) -> RunDirectory | None:
        return self._directory

    @property
    def kept(self) -> KeptLogs | None:
        return self._kept

    @property
    def logs(self) -> Path | None:
        return self._logs

    def once(self, fn: Callable[[], T]) -> T:
        return self._each(fn)[0]

    def _each(self, fn: Callable[[], T]) -> list[T]:
        """Call `fn` on the ranks that write. Return their results on every rank. Raises Error as `once`."""
        return self._group.each(lambda: self._call(fn), on=self._writers)

    def _call(self, fn: Callable[[], T]) -> T:
        try:
            return fn()
        except OSError as error:
            raise explain_unwritable(f"the run directory {self._named}", error) from None

    def _each_directory(self, fn: Callable[[RunDirectory], T]) -> list[T]:
        """Like `_each`, with the writer's directory as argument."""

        def call() -> T:
            assert self._directory is not None
            return fn(self._directory)

        return self._each(call)

    # --- start ------------------------------------------------------------------------------------------------

    def find_resume_point(
        self,
        resume: str | int | None,
        numbers: Mapping[str, Any],
        pull: Callable[[RunDirectory], Elsewhere | None] = lambda _: None,
    ) -> ResumePoint:
        """Find where the run begins or continues. See `RunLocation`.

        Args:
            pull: called on each writer before it looks; returns the snapshots of the run that are elsewhere.
        """
        elsewhere: Elsewhere | None = None

        def check(directory: RunDirectory) -> list[int]:
            nonlocal elsewhere
            elsewhere = pull(directory)
            directory.check_numbers(numbers)
            return [*(directory.record.get("rewinds", []) if elsewhere is None else elsewhere.rewinds)]

        rewinds = max(self._each_directory(check), key=len)
        checks_parts = self.is_replicated or self._group.world_size == 1
        while True:
            plain = self._each_directory(
                lambda directory: directory.look(resume, rewinds, elsewhere, checks_parts=checks_parts).to_plain()
            )
            point = self._agree([Holding.from_plain(each) for each in plain], rewinds)
            found = point.snapshot
            if checks_parts or found is None or not found.is_divided:
                return point
            # Each rank checks as many bytes: rank 0 alone would need the time to read the state of all ranks.
            path = self._path / SNAPSHOTS / found.path.name
            own = find_damage(path, found.manifest, self._group.rank, self._group.world_size)
            problem = next((each for each in self._group.gather(own) if each), None)
            if problem is None:
                return point
            self._each_directory(lambda directory: directory.store.refuse(found, problem))  # noqa: B023

    def _agree(self, held: Sequence[Holding], rewinds: Sequence[int]) -> ResumePoint:
        """Return the point, once each writer holds its files. Arguments as for `choose`."""
        return choose(held, rewinds)[1]

    def open(self, point: ResumePoint) -> SavedState:
        assert point.snapshot is not None
        return Store(self._path).open(point.snapshot, SavedRun)

    def find(self, which: int | str, elsewhere: Elsewhere | None = None) -> Snapshot | None:
        return Store(self._path, self._named).find(which, warn=self._say, elsewhere=elsewhere)

    def begin(
        self,
        point: ResumePoint,
        numbers: Mapping[str, Any],
        machine: Mapping[str, Any],
        config: Mapping[str, Any],
        options: StartOptions,
    ) -> None:
        def begin_one(directory: RunDirectory) -> tuple[int, int]:
            directory.check_numbers(numbers)
            num_bytes = directory.begin(point, numbers=numbers, machine=machine, config=config, options=options)
            return directory.find_restart(), num_bytes

        start, num_bytes = self._each_directory(begin_one)[0]
        self._logs = self._path / LOGS / str(start)
        number = self._group.number
        start_log(number, self._logs / f"{number}.log")
        if self._kept is not None and not point.is_beginning:
            self._kept.resume(num_bytes)

    # --- under way --------------------------------------------------------------------------------------------

    def align(self, order: SnapshotOrder, state: TrainingState) -> SnapshotOrder:
        if not self._is_divided:
            return order
        problem: OSError | None = None
        places: list[tuple[str | None, str]] = []
        if self._directory is not None:
            try:
                store = self._directory.store
                store.clean()  # what ranks have left of failed attempts; none of them writes now
                places = [(name, store.begin_parts(order.step, name)) for name in order.names]
            except OSError as error:
                problem = error
        places = self._group.broadcast(places)
        if problem is not None:
            raise problem
        self._others = None if self._directory is None else OtherParts(self._group.world_size)
        return replace(order, names=[name for name, _ in places], places=[place for _, place in places])

    def write(self, order: SnapshotOrder, tensors: Mapping[str, Tensor], confirm: Callable[[], None]) -> float:
        if self._directory is None:
            for place in order.places:
                Store(self._path).deliver(place, self._group.rank, tensors, confirm)
            confirm()
            return 0.0
        took_s = 0.0
        for name, place in zip(order.names, order.places or [""] * len(order.names), strict=True):
            took_s = self._directory.save(
                order.structure,
                tensors,
                step=order.step,
                name=name,
                meta=order.meta,
                confirm=confirm,
                place=place,
                others=self._others,
            )
        try:
            self._directory.prune(self._keep)
        except Error:
            raise
        except Exception as error:
            self.warn(f"old snapshots could not be removed ({error}): the run continues")
        return took_s

    def write_status(self, status: str, reason: str, end: Mapping[str, Any] | None) -> None:
        if self._directory is not None:
            self._directory.write_status(status, reason, end)

    def write_heal(self, heal: Heal) -> None:
        if self._directory is not None:
            self._directory.write_heal(heal)
        elif self._kept is not None:
            self._kept.keep_heal(heal)

    def take_over(self, steps_done: int, *, is_in_loop: bool) -> None:
        if self._kept is None or self._logs is None:
            raise NotHealed("no other rank can write the run")
        try:
            self._directory = RunDirectory(self._path, warn=self.warn)  # the script may have changed the directory
            self._directory.continue_start(int(self._logs.name), self._kept, steps_done, is_in_loop=is_in_loop)
        except (Error, OSError) as error:
            raise NotHealed(f"no other rank can write the run ({error})") from error
        self._kept = None

    # --- end --------------------------------------------------------------------------------------------------

    def close(self) -> bool:
        was_open = self._directory is None or self._directory.is_open
        if self._directory is not None:
            self._directory.close()
            self._directory = None
        return was_open


def explain_unwritable(place: str, error: OSError) -> RunDirectoryError:
    """Return the error for a place, such as "the run directory runs/a", that cannot be written."""
    reason = error.strerror or str(error)
    advice = "make room"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        advice = "fix that"
        name = os.path.basename(error.filename or "")
        reason = reason if name in reason else f"{name}: {reason}"
    return RunDirectoryError(f"{place} cannot be written ({reason}): {advice}, or name another one", code="SS401")
