"""The snapshots of a run: written whole or not at all, found by reading them."""

import hashlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.errors import Error
from samestep.files import fits, is_count, is_object, open_regular
from samestep.snapshot.manifest import MANIFEST, NAME, STATE, Pieces, build_manifest, find_damage, read_manifest, seal
from samestep.snapshot.serialization import decode, digest, digest_of, encode, read_tensors, write_tensors
from samestep.world.environment import advise
from samestep.world.forking import at_rest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Snapshot", "Store", "digest"]

TENSORS = "tensors.safetensors"
OF_RUN = {"objects": is_object, "position": {"step": is_count, "epoch": is_count}}  # the shape of a run's state
_NUMBERED = re.compile(r"step-(\d{8,})")
_WRITING = ".tmp-"  # begun, or about to be removed
_ASIDE = ".old-"  # stands for a snapshot that is just being replaced
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Snapshot:
    """A directory that is, or was to be, a snapshot.

    Attributes:
        step: the number of steps done; -1 where a named one's manifest cannot be read.
        name: None for a numbered one.
        problem: why it is not sound, as far as the manifest and the files' sizes tell; None if it is.
    """

    path: Path
    step: int
    name: str | None
    manifest: Mapping[str, Any]
    problem: str | None

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Snapshot":
        """What `to_plain` took apart."""
        return cls(**{**plain, "path": Path(plain["path"])})

    def to_plain(self) -> dict[str, Any]:
        """Its attributes as JSON has them, for another rank."""
        return {**vars(self), "path": str(self.path)}

    @property
    def size_bytes(self) -> int:
        """What its files take; 0 where the manifest cannot be read."""
        return sum(file["size"] for file in self.manifest.get("files", {}).values())

    def is_same(self, other: "Snapshot") -> bool:
        """Whether another copy of the run has this by the same name, and what they hold is the same."""
        if not self.manifest or not other.manifest or self.path.name != other.path.name:
            return False
        return all(self.manifest[key] == other.manifest[key] for key in ("digest", "step", "meta"))

    def was_left(self, rewinds: Sequence[int]) -> bool:
        """Whether the run has gone back to a step before it since. `rewinds`: as in `run.json`."""
        if not self.manifest:
            return False
        return self.step > min(rewinds[self.manifest["meta"].get("rewinds", 0) :], default=self.step)


class Store:
    """The snapshots under `run_dir/snapshots`. Any process may read; one at a time may write, prune and clean.

    Args:
        run_dir: the run's directory; nothing is made in it before the first `write`.
        named: as a person named it, for messages.
    """

    def __init__(self, run_dir: Path, named: Path | None = None) -> None:
        self.path, self._named = Path(run_dir) / "snapshots", Path(named or run_dir) / "snapshots"
        self._damaged: set[Path] = set()  # what `find` saw: right sizes, wrong checksums

    def write(self, state: Mapping[str, Any], *, step: int, name: str | None = None, meta: Mapping[str, Any]) -> Path:
        """Writes a snapshot, in place of one of the same step or name. A crash leaves the old state or the new.

        Args:
            state: nested dicts, lists and tuples of tensors, numpy arrays and scalars, as state_dicts have.
            step: the number of steps done.
            name: for a named snapshot.
            meta: JSON that the manifest is to carry.

        Raises:
            Error: the state holds something else, or the name will not do.
            OSError: the disk is full, read-only or gone; what was begun is removed, older snapshots stand.
        """
        return self.write_encoded(*encode(state), step=step, name=name, meta=meta)

    def write_encoded(
        self, structure: Any, tensors: Mapping[str, "Tensor"], *, step: int, name: str | None,
        meta: Mapping[str, Any], confirm: Callable[[], None] = lambda: None,
    ) -> Path:  # fmt: skip
        """As `write`, of what `encode` gave.

        Args:
            confirm: called when all is written but the manifest. If it raises, nothing is left of the snapshot.
        """
        import torch

        if name is not None and not NAME.fullmatch(name):
            raise Error(f"a snapshot cannot be named {name!r}: use letters, digits and underscores, such as best")
        target = self.path / (name or f"step-{step:08d}")
        with self._staging(target) as directory:
            with open(directory / TENSORS, "xb", _BUFFER_BYTES, opener=open_regular) as file:
                pieces, hashes = write_tensors(file, tensors)
            files = {TENSORS: pieces, STATE: _write_json(directory / STATE, structure)}
            confirm()
            manifest = build_manifest(
                step=step, name=name, digest=digest_of(structure, hashes), files=files,
                versions={"torch": torch.__version__}, meta=meta,
            )  # fmt: skip
            _write_json(directory / MANIFEST, manifest)
            _sync(directory)
            self._put(directory, target)
        self._damaged.discard(target)
        return target

    def snapshots(self) -> list[Snapshot]:
        """All of them, the oldest first; sound or not, by their manifests and their files' sizes."""
        try:
            present = {entry.name for entry in os.scandir(self.path) if entry.is_dir()}
        except FileNotFoundError:
            return []
        aside = {entry.removeprefix(_ASIDE) for entry in present if entry.startswith(_ASIDE)} - present
        found = [self._look(entry, self.path / entry) for entry in present if not entry.startswith(".")]
        found += [self._look(entry, self.path / (_ASIDE + entry)) for entry in aside]
        return sorted(found, key=lambda snapshot: (snapshot.step, snapshot.name is None, snapshot.path.name))

    def find(
        self, which: int | str, *, warn: Callable[[str], None] = warnings.warn,
        judge: Callable[[Snapshot], str] = lambda _: "",
    ) -> Snapshot | None:  # fmt: skip
        """The snapshot to read, after checking every byte of it. None if `which` is "latest" and there is none.

        Args:
            which: "latest", a number of steps done, or a name.
            warn: called with a sentence for each unsound snapshot that is passed over.
            judge: says what else is wrong with a snapshot whose manifest is sound; "" where nothing is.

        Raises:
            Error: there is nothing sound of what was asked for.
        """
        found = self.snapshots()
        if which == "latest":
            wanted = found
        elif isinstance(which, int):
            wanted = [snapshot for snapshot in found if snapshot.step == which]
        else:
            wanted = [snapshot for snapshot in found if snapshot.name == which]
        problem = ""
        for snapshot in reversed(wanted):
            problem = snapshot.problem or judge(snapshot) or find_damage(snapshot.path, snapshot.manifest) or ""
            if not problem:
                return snapshot
            self._damaged.add(snapshot.path)
            problem = f"{snapshot.path.relative_to(self.path.parent)}: {problem}"
            warn(f"a snapshot is not sound and is passed over: {problem}")
        if which == "latest" and not found:
            return None
        if which == "latest":
            raise Error(
                f"no snapshot in {self._named} is sound ({problem}): bring one back from a backup, or start with "
                f"{advise(fresh=True)}"
            )
        sound = [s.name or f"step {s.step}" for s in found if s.problem is None and s.path not in self._damaged]
        there = f"there is {', '.join(sound)}" if sound else "there is no other"
        what = f"of step {which}" if isinstance(which, int) else f"named {which}"
        fault = f"the snapshot {what} is not sound ({problem})" if wanted else f"there is no snapshot {what}"
        raise Error(f"{fault} in {self._named}: {there}")

    def read(self, snapshot: Snapshot, shape: Any = is_object) -> dict[str, Any]:
        """The state in a snapshot that `find` returned, here or on another node, its tensors in host memory.

        Args:
            shape: what it must fit (`files.fits`).

        Raises:
            Error: it is not sound any more.
        """
        path = self.path / snapshot.path.name
        manifest, problem = read_manifest(path)
        if problem is not None:
            raise Error(f"the snapshot {self._named / path.name} is not sound any more: {problem}")
        tensors = {}
        try:
            for file in manifest["files"]:
                if file.endswith(".safetensors"):
                    tensors.update(read_tensors(path / file))
            with open(path / STATE, "rb", opener=open_regular) as opened:
                state: dict[str, Any] = decode(json.load(opened), tensors)
            if not fits(state, shape):
                raise ValueError("it has not what a run's state has")
        except OSError:
            raise
        except Exception as error:  # its checksums are right, and what they vouch for was not written by samestep
            why = f"{type(error).__name__}: {error}"
            raise Error(f"the snapshot {self._named / path.name} holds no state that can be read ({why})") from None
        return state

    @property
    def inbox(self) -> Path:
        """Where files of another store may be put for `adopt`, after `make_inbox`. `clean` removes it."""
        return self.path / f"{_WRITING}inbox"

    def make_inbox(self) -> None:
        """Makes the inbox, empty, in place of whatever has its name. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.inbox.is_symlink() or self.inbox.exists():
            _delete(self.inbox)
        self.inbox.mkdir()

    def adopt(self, snapshot: Snapshot) -> str | None:
        """Makes another store's snapshot of the files in `inbox`, in place of one of the same name.

        Returns:
            What is wrong with them, where they are not what the manifest says; nothing is left of them then.

        Raises:
            OSError: the disk is full or gone.
        """
        if problem := find_damage(self.inbox, snapshot.manifest):
            shutil.rmtree(self.inbox)
            return problem
        _write_json(self.inbox / MANIFEST, seal(snapshot.manifest))
        _sync(self.inbox)
        self._put(self.inbox, self.path / snapshot.path.name)
        self._damaged.discard(self.path / snapshot.path.name)
        return None

    def prune(self, keep: int) -> None:
        """Removes numbered snapshots older than the `keep` (at least 1) newest sound ones; never named ones."""
        numbered = [snapshot for snapshot in self.snapshots() if snapshot.name is None]
        sound = [s for s in numbered if s.problem is None and s.path not in self._damaged]
        if sound:
            for snapshot in numbered[: numbered.index(sound[-max(keep, 1) :][0])]:
                self._remove(snapshot.path)

    def abandon(self, snapshots: Sequence[Snapshot]) -> None:
        """Moves snapshots to `run_dir/abandoned`, the newest first. Raises OSError."""
        for snapshot in sorted(snapshots, key=lambda each: -each.step):
            target = self.path.parent / "abandoned" / f"{snapshot.path.name}-{time.time_ns()}"
            target.parent.mkdir(exist_ok=True)
            os.rename(snapshot.path, target)

    def clean(self) -> None:
        """Removes what dead writers left; a snapshot that one of them was about to replace is put back."""
        for entry in sorted(self.path.glob(".*")):
            target = self.path / entry.name.removeprefix(_ASIDE)
            if entry.name.startswith(_ASIDE) and not target.exists():
                os.rename(entry, target)
            elif entry.name.startswith((_ASIDE, _WRITING)):
                _delete(entry)

    def _look(self, name: str, path: Path) -> Snapshot:
        manifest, problem = read_manifest(path)
        numbered = _NUMBERED.fullmatch(name)
        if numbered is None:
            return Snapshot(path, manifest.get("step", -1), name, manifest, problem)
        step = int(numbered[1])
        if manifest.get("step", step) != step:
            problem = f"{MANIFEST} is of step {manifest['step']}"
        return Snapshot(path, step, None, manifest, problem)

    @contextmanager
    def _staging(self, target: Path) -> Iterator[Path]:
        """A directory to write in; nothing is left of it if that fails."""
        if not self.path.exists():
            self.path.mkdir()
            _sync(self.path.parent)
        directory = self.path / f"{_WRITING}{target.name}"
        shutil.rmtree(directory, ignore_errors=True)
        try:
            directory.mkdir()
            yield directory
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    def _put(self, directory: Path, target: Path) -> None:
        """Gives a written snapshot its name. There is no moment at which neither it nor the old one is found."""
        aside = self.path / f"{_ASIDE}{target.name}"
        if target.exists():
            if aside.exists():
                self._remove(aside)
            os.rename(target, aside)
        try:
            os.rename(directory, target)
        except BaseException:
            if aside.exists():
                os.rename(aside, target)
            raise
        _sync(self.path)
        if aside.exists():
            with suppress(OSError):  # the next `clean` removes it
                self._remove(aside)

    def _remove(self, path: Path) -> None:
        # Renamed first: no one is to find a snapshot of which half is gone.
        doomed = self.path / f"{_WRITING}doomed-{path.name}"
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        _delete(doomed)


def _delete(path: Path) -> None:
    """Removes a directory; of one that someone has moved elsewhere, the link that stands for it."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


def _write_json(path: Path, value: Any) -> Pieces:
    """Makes a new file, which is on the disk when this returns."""
    text = json.dumps(value, allow_nan=False).encode()
    with open(path, "xb", opener=open_regular) as file:
        file.write(text)
        file.flush()
        with at_rest():
            os.fsync(file.fileno())
    return [(len(text), hashlib.sha256(text).hexdigest())]


def _sync(directory: Path) -> None:
    """Brings the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with at_rest():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
