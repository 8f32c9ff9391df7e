"""The snapshots of a run on disk: written atomically, and checked before they are read."""

import json
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from samestep.decoding import Count, Json, Number, Object, convert, decode
from samestep.errors import InvalidValue, RunDirectoryError
from samestep.files import move_directory, open_regular, read_bytes, replace_file, sync_directory
from samestep.hashing import hash_bytes
from samestep.processes import at_rest
from samestep.snapshot.manifest import (
    DIRECTORY,
    MANIFEST,
    METADATA,
    STATE,
    Extent,
    Extents,
    Snapshot,
    build_manifest,
    find_damage,
    list_outdated,
    list_tensor_files,
    name_directory,
    name_part,
    read_manifest,
    seal,
)
from samestep.world.environment import advise

if TYPE_CHECKING:
    from torch import Tensor

    from samestep.snapshot.serialization import SavedState

# directories of a run
SNAPSHOTS = "snapshots"
ABANDONED = "abandoned"
_WRITING = ".tmp-"  # incomplete, or about to be removed

_BUFFER_BYTES = 1 << 20
_MAX_RECEIPT_BYTES = 1 << 30


class _SavedOrder(Struct):
    epoch: Count
    indices: Any  # `check_order` checks them

    def __post_init__(self) -> None:
        if getattr(self.indices, "ndim", 0) != 1 or not len(self.indices):
            raise ValueError("the indices are no array of one dimension")


_SavedLane = tuple[Count, Count, str, Count, Annotated[int, Meta(ge=-1)], Any]  # a `LanePosition`


class _Position(Struct):
    step: Count
    epoch: Count
    precision: dict[str, Number]
    order: _SavedOrder | None = None
    lanes: list[_SavedLane] = []
    loops: list[tuple[Count, Count]] = []
    begins: list[tuple[Count, Count, Count, Count]] = []
    frozen: list[str] = []
    frozen_at_start: list[str] = []


class SavedObjects(Struct):
    """The type of a state, as far as tools read it, for `Store.open`."""

    objects: Object


class SavedRun(SavedObjects):
    """The type of a run's state, for `Store.open`."""

    position: _Position
    state: Object


class Store:
    """The snapshots under `run_dir/snapshots`. Any process may read; one at a time may write, prune and clean.

    Args:
        run_dir: the run's directory. Nothing is created in it before the first `write`.
        named: the same as the user gave it, for messages.
        judge: returns a further problem of a snapshot whose manifest is valid; "" for none.

    Attributes:
        path: the directory of the snapshots.
        inbox: the directory for a snapshot's files from another store, see `make_inbox` and `adopt`.
        remote: the snapshots at the run's URL, see `note_remote`.
    """

    def __init__(
        self, run_dir: Path, named: Path | None = None, judge: Callable[[Snapshot], str] = lambda snapshot: ""
    ) -> None:
        self.judge = judge
        self.remote: Sequence[Snapshot] = ()
        self._url = self._remote_problem = ""
        self.path = run_dir / SNAPSHOTS
        self.inbox = self.path / f"{_WRITING}inbox"
        self._named = (named or run_dir) / SNAPSHOTS
        # Of snapshots whose manifests and sizes show none, by the names of their directories. None: this store has
        # written it.
        self._problems: dict[str, str | None] = {}
        self._has_created = False

    # --- read -------------------------------------------------------------------------------------------------

    def snapshots(self) -> list[Snapshot]:
        """Return all snapshots, including damaged ones, the oldest first; judged by manifests and file sizes."""
        return sorted(map(self._read, self._list()), key=lambda snapshot: snapshot.age)

    def _list(self) -> list[Path]:
        """Return the directories of the snapshots."""
        try:
            # Unlike `entry.is_dir`, `isdir` raises no error for a link to itself.
            names = [entry.name for entry in os.scandir(self.path) if os.path.isdir(entry)]
        except FileNotFoundError:
            return []
        return [self.path / name for name in names if DIRECTORY.fullmatch(name)]

    def note_remote(self, url: str, snapshots: Sequence[Snapshot], problem: str = "") -> None:
        """Note the snapshots at the run's URL. `problem`: why none of them can be used, if one was wanted."""
        self._url = url
        self.remote = snapshots
        self._remote_problem = problem

    def _read(self, path: Path) -> Snapshot:
        manifest, problem = read_manifest(path)
        return Snapshot.from_manifest(path, manifest, problem or self._problems.get(path.name))

    def find(
        self,
        which: int | str,
        *,
        warn: Callable[[str], None] = warnings.warn,
        checks_parts: bool = True,
    ) -> Snapshot | None:
        """Find the snapshot to read, and check every byte of it.

        Args:
            which: "latest", a number of completed steps, or a name.
            warn: called with a message for each damaged snapshot for which an older one is tried. The error names the
                last one.
            checks_parts: False to leave a divided snapshot to the caller, who checks it and may `refuse` it.

        Returns:
            The newest undamaged snapshot that matches; None if `which` is "latest" and there are no snapshots.

        Raises:
            RunDirectoryError: no undamaged snapshot matches.
            OSError: the disk is gone.
        """
        problem = ""
        for snapshot in reversed([each for each in self.snapshots() if each.matches(which)]):
            if problem:
                warn(f"skipping a snapshot that cannot be used: {problem}")
            problem = snapshot.problem or self.judge(snapshot)
            if not problem and (checks_parts or not snapshot.is_divided):
                problem = find_damage(snapshot.path, snapshot.manifest) or ""
            if not problem:
                return snapshot
            self._problems[snapshot.path.name] = problem
            problem = f"{snapshot.path.relative_to(self.path.parent)}: {problem}"
        problem = problem or self._remote_problem
        where = self._url or str(self._named)
        if which == "latest":
            if not problem:
                return None
            raise RunDirectoryError(
                f"no snapshot in {where} can be used ({problem}): restore one from a backup, or start with "
                f"{advise(fresh=True)}",
                code="SS410",
            )
        sound = [each for each in (*self.remote, *self.snapshots()) if each.problem is None]
        others = ", ".join(dict.fromkeys(each.name or f"step {each.step}" for each in sound)) or "no other"
        what = f"of step {which}" if isinstance(which, int) else f"named {which}"
        fault = f"the snapshot {what} cannot be used ({problem})" if problem else f"there is no snapshot {what}"
        raise RunDirectoryError(f"{fault} in {where}: there is {others}", code="SS410" if problem else "SS411")

    def holds(self, snapshot: Snapshot) -> bool:
        """Return whether this store has another copy's snapshot, undamaged."""
        same = [each for each in self.snapshots() if each.problem is None and each.is_same(snapshot)]
        return bool(same) and find_damage(same[0].path, same[0].manifest) is None

    def refuse(self, snapshot: Snapshot, problem: str) -> None:
        """Let `find` skip a snapshot that it has returned, because of a problem with it."""
        self._problems[snapshot.path.name] = problem

    def open(self, snapshot: Snapshot, kind: Any = Object) -> "SavedState":
        """Return the state in a snapshot that `find` returned, here or on another node, to read its tensors.

        Args:
            kind: the type that the state must convert to.

        Raises:
            RunDirectoryError: the snapshot has been damaged since.
        """
        from samestep.snapshot.serialization import SavedState

        path = self.path / snapshot.path.name
        manifest, problem = read_manifest(path)
        if problem is not None:
            raise RunDirectoryError(
                f"the snapshot {self._named / path.name} can no longer be used: {problem}", code="SS410"
            )
        files = manifest["files"]
        try:
            with open(path / STATE, "rb", opener=open_regular) as opened:
                structure = json.load(opened)  # noqa: TID251 of any size; `convert` checks it
            saved = SavedState(structure, path, {file: files[file] for file in list_tensor_files(files)})
            convert(saved.contents, kind)
        except OSError:
            raise
        except Exception as error:  # the checksums are right, but samestep did not write this content
            raise RunDirectoryError(
                f"the snapshot {self._named / path.name} holds no state that can be read ({type(error).__name__}: "
                f"{error})",
                code="SS410",
            ) from None
        return saved

    def read_digest(self, snapshot: Snapshot) -> str:
        """Return the digest of the state in a snapshot that `find` returned, see `serialization.digest`.

        The manifest has it, unless the ranks have divided tensors. Then every byte is read. Errors as for `open`.
        """
        return snapshot.manifest["digest"] or self.open(snapshot).digest()

    # --- write ------------------------------------------------------------------------------------------------

    def begin(self, step: int, name: str | None) -> str:
        """Create the directory in which the ranks write a snapshot, its draft. Return its name. Raises OSError."""
        # A new name each time: a rank of an earlier start may still write to its directory.
        directory = self.path / f"{_WRITING}{name_directory(step, name)}.{secrets.token_hex(4)}"
        self._create(directory)
        return directory.name

    def prepare(self, draft: str, tensors: Mapping[str, "Tensor"], rank: int = 0) -> Extents:
        """Write the part of a rank to a draft, in any thread. Raises OSError."""
        from samestep.snapshot.serialization import write_tensors

        directory = self.path / draft
        with open(directory / name_part(rank), "xb", _BUFFER_BYTES, opener=open_regular) as file:
            extents = write_tensors(file, tensors)
        if rank:
            replace_file(directory / _name_receipt(rank), json.dumps(extents).encode())
        return extents

    def commit(
        self,
        draft: str,
        own: Extents,
        structure: Any,
        *,
        step: int,
        name: str | None,
        meta: Json,
        num_parts: int = 1,
    ) -> Path:
        """Make a draft a snapshot, on rank 0, once all of its ranks have prepared theirs.

        Args:
            own: the part of rank 0.
            structure: of the state, from `encode`.

        Raises:
            InvalidValue: the parts together are not the state.
            OSError: the disk is full, read-only or gone. Older snapshots are unchanged.
        """
        directory = self.path / draft
        target = self.path / name_directory(step, name)
        receipts = [directory / _name_receipt(rank) for rank in range(1, num_parts)]
        parts = [own, *(decode(read_bytes(receipt, _MAX_RECEIPT_BYTES), Extents) for receipt in receipts)]
        for receipt in receipts:
            receipt.unlink()
        digest = _check_parts(structure, parts)
        files = {STATE: _write_json(directory / STATE, structure)}
        files |= {name_part(rank): part for rank, part in enumerate(parts)}
        _write_json(directory / MANIFEST, build_manifest(step=step, name=name, digest=digest, files=files, meta=meta))
        self._put(directory, target)
        return target

    def abort(self, draft: str) -> None:
        """Remove a draft."""
        shutil.rmtree(self.path / draft, ignore_errors=True)

    def make_inbox(self) -> None:
        """Create the inbox, empty. Raises OSError."""
        if os.path.lexists(self.inbox):
            _delete(self.inbox)
        self._create(self.inbox)

    def adopt(self, snapshot: Snapshot) -> str:
        """Make the files in the inbox this snapshot of another store.

        Returns:
            A problem with the files, which are then removed; "" if there is none.
        """
        if problem := find_damage(self.inbox, snapshot.manifest):
            shutil.rmtree(self.inbox)
            return problem
        _write_json(self.inbox / MANIFEST, seal(snapshot.manifest))
        self._put(self.inbox, self.path / snapshot.path.name)
        return ""

    def prune(self, keep: int) -> None:
        """Remove the snapshots of `list_outdated`. Those that this store has written are not read again."""
        found = [
            Snapshot.from_manifest(path, {}, self._problems[path.name])
            if path.name in self._problems
            else self._read(path)
            for path in self._list()
        ]
        for snapshot in list_outdated(found, keep):
            self._remove(snapshot.path)

    def abandon(self, snapshots: Sequence[Snapshot]) -> None:
        """Move snapshots, in their order, to `run_dir/abandoned`, the newest first. Nothing uses them again.

        Raises OSError.
        """
        for snapshot in reversed(snapshots):
            target = self.path.parent / ABANDONED / f"{snapshot.path.name}-{time.time_ns()}"
            target.parent.mkdir(exist_ok=True)
            move_directory(snapshot.path, target)

    def clean(self) -> None:
        """Remove incomplete files of killed writers."""
        for entry in self.path.glob(f"{_WRITING}*"):
            _delete(entry)

    def _create(self, directory: Path) -> None:
        """Create a directory for the files of a snapshot."""
        if not self._has_created or not self.path.exists():  # who created it may have been killed before the sync
            self.path.mkdir(exist_ok=True)
            _sync(self.path.parent)
            self._has_created = True
        directory.mkdir()

    def _put(self, directory: Path, target: Path) -> None:
        """Rename a complete snapshot to its name. What has the name is damaged, or of another run."""
        _sync(directory)
        if os.path.lexists(target):
            self._remove(target)
        move_directory(directory, target)
        _sync(self.path)
        self._problems[target.name] = None

    def _remove(self, path: Path) -> None:
        # Renamed first, so that no reader finds a snapshot of which half is gone.
        doomed = self.path / f"{_WRITING}doomed-{path.name}.{secrets.token_hex(4)}"
        move_directory(path, doomed)
        self._problems.pop(path.name, None)
        _delete(doomed)


def _name_receipt(rank: int) -> str:
    """Return the name of the file in which a rank describes its part to rank 0, for the manifest."""
    return f".receipt-{rank:05d}"


def _check_parts(structure: Any, parts: Sequence[Extents]) -> str | None:
    """Check that parts together are the state. Return its digest if no tensor is in several of them, else None.

    Raises:
        InvalidValue: they are not.
    """
    from samestep.snapshot.serialization import digest_of, list_tensors

    extents = [extent for part in parts for extent in part if extent.name != METADATA]
    sizes: dict[str, int] = {}
    for extent in extents:
        sizes[extent.name] = sizes.get(extent.name, 0) + extent.num_bytes
    for name, wanted in list_tensors(structure).items():
        if (written := sizes.get(name, 0)) != wanted:
            raise InvalidValue(
                f"the ranks have not written all of the state: {name} has {written} of {wanted} bytes: make "
                "the objects for run.prepare the same on all ranks",
                code="SS504",
            )
    is_split = len(sizes) < len(extents)
    return None if is_split else digest_of(structure, {extent.name: extent.sha256 for extent in extents})


def _delete(path: Path) -> None:
    """Remove a directory, or what a user has created instead, such as a symbolic link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()  # `rmtree` blocks on a FIFO


def _write_json(path: Path, value: Any) -> Extents:
    """Create a file and wait until it is on the disk."""
    text = json.dumps(value, allow_nan=False).encode()
    with open(path, "xb", opener=open_regular) as file:
        file.write(text)
        file.flush()
        with at_rest():
            os.fsync(file.fileno())
    return [Extent(METADATA, len(text), hash_bytes(text))]


@at_rest()
def _sync(directory: Path) -> None:
    sync_directory(directory)
