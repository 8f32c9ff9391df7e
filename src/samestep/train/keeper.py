"""Saving and restoring a run: rank 0 writes in the directory, every rank knows what was written."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from samestep.errors import Error
from samestep.snapshot.store import Snapshot, Store
from samestep.train import objects as prepared
from samestep.train.directory import Directory
from samestep.train.settings import Settings
from samestep.world.group import Group

T = TypeVar("T")


class Keeper:
    """What a run leaves on disk. With `run_dir` None every call does nothing.

    Attributes:
        path: the run's directory, None without one.
        directory: on rank 0, the directory itself.
        saved_step: the step of the newest numbered snapshot, None when there is none.
    """

    def __init__(self, settings: Settings, group: Group, say: Callable[[str], None]) -> None:
        self._settings, self._group, self._say = settings, group, say
        self.directory: Directory | None = None
        self.saved_step: int | None = None
        self._names_due: list[str] = []
        self.path: Path | None = None if settings.run_dir is None else group.once(self._open, settings.run_dir)

    def _open(self, path: Path) -> Path:
        directory = Directory(path, fresh=self._settings.fresh, warn=self._say)
        try:
            directory.check_numbers(self._settings.numbers())
        except Error:
            directory.close()
            raise
        self.directory = directory
        return directory.path

    def _once(self, fn: Callable[[], T]) -> T:
        """`fn` on rank 0; a disk that is full or gone is an Error."""

        def call() -> T:
            try:
                return fn()
            except OSError as error:
                reason = f"({error.strerror}): make room, or name another one"
                raise Error(f"the run directory {self.path} cannot be written {reason}") from None

        return self._group.once(call)

    def restore(self, objects: prepared.Objects, numbers: Mapping[str, Any]) -> tuple[dict[str, Any], int] | None:
        """Brings `objects` to where the snapshot to resume from has them.

        Returns:
            The whole state in the snapshot and the world size that wrote it; None to begin.
        """
        if self.path is None:
            return None
        found = self._once(lambda: self._find(numbers))
        if found is None:
            return None
        state = Store(self.path).read(found)
        prepared.load(objects, state["objects"], self._say)
        self.saved_step = state["position"]["step"]
        return state, found.manifest["meta"]["world_size"]

    def _find(self, numbers: Mapping[str, Any]) -> Snapshot | None:
        assert self.directory is not None
        self.directory.check_numbers(numbers)
        return self.directory.find(self._settings.resume)

    def record(self, numbers: Mapping[str, Any], machine: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Compares with the run that is here, and writes down which one it is."""

        def write() -> None:
            assert self.directory is not None
            self.directory.check_numbers(numbers)
            self.directory.write_record(numbers, machine, config)

        if self.path is not None:
            self._once(write)

    def ask_for(self, name: str) -> None:
        """A named snapshot is due at the end of the present body. Raises Error for what is no name."""
        usable = isinstance(name, str) and name.isascii() and name.isidentifier() and len(name) <= 64
        if not usable or name in ("latest", "never"):
            raise Error(f"a snapshot's name is letters, digits and underscores, such as best, not {name!r}")
        if name not in self._names_due:
            self._names_due.append(name)

    def drop_names(self) -> None:
        """Named snapshots that are due are not taken."""
        for name in self._names_due:
            self._say(f"the snapshot {name} is not taken: the run stopped within the epoch that asks for it")
        self._names_due = []

    def save_what_is_due(
        self,
        build_state: Callable[[], dict[str, Any]],
        objects: prepared.Objects,
        *,
        step: int,
        epochs_done: int | None,
        numbered: bool,
        ending: bool,
    ) -> None:
        """Writes the snapshots that are due between two steps.

        Args:
            step: the steps done.
            epochs_done: at an epoch's end, after its body.
            numbered: whether the position can be resumed from, so that a numbered one may be written.
            ending: the run ends here, so a numbered one is due.

        Raises:
            Error: the state is poisoned.
        """
        every = self._settings.snapshot_every
        due = numbered and self.saved_step != step and every is not None
        due = due and every is not None and (ending or every.is_due(step, epochs_done))
        names, self._names_due = self._names_due, []
        if self.path is None or not (due or names):
            return
        prepared.check_finite(objects, step)
        if due:
            self.saved_step = step
        if self.directory is not None:
            state = build_state()
            # The numbered one last: resumed from, it would not have the script ask for the named ones again.
            for name in [*names, *([None] if due else [])]:
                saved = self.directory.save(state, name=name, world_size=self._group.world_size)
                if name is None and not saved:
                    self.saved_step = None
            self.directory.prune(self._settings.keep)

    def close(self) -> bool:
        """Gives the directory up. False where there was none to give up, since a later run has taken it over."""
        was_open = self.path is not None and (self.directory is None or self.directory.is_open)
        if self.directory is not None:
            self.directory.close()
            self.directory = None
        return was_open
