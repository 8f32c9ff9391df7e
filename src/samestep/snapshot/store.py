"""The snapshots of a run: written whole or not at all, found by reading them."""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from samestep.errors import Error
from samestep.snapshot.encoding import decode, digest, digest_of, encode, read_tensors, write_tensors
from samestep.snapshot.manifest import MANIFEST, Pieces, build_manifest, find_damage, read_manifest

__all__ = ["Snapshot", "Store", "digest"]

STATE = "state.json"
TENSORS = "tensors.safetensors"
_NUMBERED = re.compile(r"step-(\d{8,})")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_RESERVED = ("latest", "never")  # they mean something else to `resume`
_WRITING = ".tmp-"  # begun, or about to be removed
_ASIDE = ".old-"  # stands for a snapshot that is just being replaced


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

    @property
    def size_bytes(self) -> int:
        """What its files take; 0 where the manifest cannot be read."""
        return sum(file["size"] for file in self.manifest.get("files", {}).values())


class Store:
    """The snapshots under `run_dir/snapshots`. Any process may read; one at a time may write, prune and clean.

    Args:
        run_dir: the run's directory; nothing is made in it before the first `write`.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = Path(run_dir) / "snapshots"
        self._damaged: set[Path] = set()  # what `find` saw: right sizes, wrong checksums

    def write(
        self, state: Mapping[str, Any], *, step: int, name: str | None = None, meta: Mapping[str, Any]
    ) -> Path:
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
        import torch

        if name is not None and (not _NAME.fullmatch(name) or _NUMBERED.fullmatch(name) or name in _RESERVED):
            raise Error(f"a snapshot cannot be named {name!r}: use letters, digits and underscores, such as best")
        structure, tensors = encode(state)
        target = self.path / (name or f"step-{step:08d}")
        self.path.mkdir(exist_ok=True)
        with self._staging(target) as directory:
            with _create(directory / TENSORS) as file:
                pieces, hashes = write_tensors(file, tensors)
            files = {TENSORS: pieces, STATE: _write_json(directory / STATE, structure)}
            manifest = build_manifest(
                step=step, name=name, digest=digest_of(structure, hashes), files=files,
                versions={"torch": torch.__version__}, meta=meta,
            )  # fmt: skip
            _write_json(directory / MANIFEST, manifest, indent=1)
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

    def find(self, which: int | str, *, warn: Callable[[str], None] = warnings.warn) -> Snapshot | None:
        """The snapshot to read, after checking every byte of it. None if `which` is "latest" and there is none.

        Args:
            which: "latest", the number of steps done, or a name.
            warn: called with a sentence for each unsound snapshot that is passed over for an older one.

        Raises:
            Error: no sound snapshot is what was asked for.
        """
        found = self.snapshots()
        wanted = found if which == "latest" else [s for s in found if which == (s.name if isinstance(which, str) else s.step)]
        for snapshot in reversed(wanted):
            problem = snapshot.problem or find_damage(snapshot.path, snapshot.manifest)
            if problem is None:
                return snapshot
            self._damaged.add(snapshot.path)
            warn(f"snapshot {snapshot.path} is passed over: {problem}")
        if which == "latest" and not found:
            return None
        sound = [s.name or f"step {s.step}" for s in found if s.problem is None and s.path not in self._damaged]
        there = f"there is {', '.join(sound)}" if sound else "there is no sound one"
        if wanted:
            raise Error(f"no snapshot in {self.path} is sound ..." )
        return None

    def read(self, snapshot: Snapshot) -> dict[str, Any]:
        """The state of a snapshot that `find` returned, its tensors in host memory."""
        return self.read_path(snapshot.path)
