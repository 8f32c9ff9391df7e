"""A snapshot's directory and manifest: written last, read first, with checksums of every byte of the other files."""

import json
import os
import platform
import re
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import UNSET, Meta, Struct, UnsetType

from samestep.decoding import Count, Json, Object, convert, decode
from samestep.files import open_regular, read_bytes
from samestep.hashing import hash_bytes, hash_chunks
from samestep.version import __version__

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\.(json|safetensors)")  # in the manifest's directory
NAME = re.compile(r"(?!(?:latest|never)\b)[A-Za-z_][A-Za-z0-9_]{0,63}")  # of a snapshot; not another value of `resume`
DIRECTORY = re.compile(rf"(?:({NAME.pattern})\.)?step-(\d{{8,18}})")  # of a snapshot
_BUFFER_BYTES = 1 << 20
_NUM_READERS = 4

METADATA = "__metadata__"  # the name of extents without a tensor, which safetensors reserves
_Hash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class Extent(NamedTuple):
    """A tensor in a file, or some of its rows.

    One pass over the bytes of a tensor serves the check of the file and the digest of the state.

    Attributes:
        name: of the tensor.
        num_bytes: its size.
        sha256: of its bytes.
    """

    name: str
    num_bytes: Count
    sha256: _Hash


Extents = list[Extent]  # those of a file, one after the other


def build_manifest(
    *, step: int, name: str | None, digest: str | None, files: Mapping[str, Extents], meta: Json
) -> dict[str, Any]:
    """Return the manifest of a snapshot whose other files are complete. `digest`: None if it was not computed."""
    import torch

    written = {
        "format": FORMAT,
        "step": step,
        "name": name,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "digest": digest,
        "versions": {"samestep": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "files": files,
        "meta": meta,
    }
    return seal(written)


def name_part(rank: int) -> str:
    """Return the name of a rank's file. Sorted by name, the files are in the order of the ranks."""
    return f"tensors-{rank:05d}.safetensors"


def list_tensor_files(files: Iterable[str]) -> list[str]:
    """Return the names of the files with tensors, in the order of the ranks that wrote them."""
    return sorted(file for file in files if file.endswith(".safetensors"))


def seal(manifest: Json) -> dict[str, Any]:
    """Return a manifest with its own checksum, as it is in the file. Inverse of `parse_manifest`."""
    return {**manifest, "sha256": _checksum(manifest)}


def read_manifest(directory: Path) -> tuple[dict[str, Any], str | None]:
    """Return the manifest of a directory ({} if it cannot be read), and a problem with it or with file sizes."""
    try:
        manifest, problem = parse_manifest(read_bytes(directory / MANIFEST))
    except OSError as error:
        return {}, f"{MANIFEST} cannot be read ({error.strerror})"
    sizes = {}
    for file in manifest.get("files", {}):
        with suppress(OSError):  # then it is missing
            status = os.lstat(directory / file)
            if stat.S_ISREG(status.st_mode):
                sizes[file] = status.st_size
    return manifest, problem or find_wrong_size(manifest["files"], sizes)


def parse_manifest(text: bytes) -> tuple[dict[str, Any], str | None]:
    """Return the manifest in a file ({} if it cannot be read), and a problem with it.

    All checks of manifests are here, because a file from an untrusted source can have the right checksum, too.
    """
    try:
        manifest = decode(text, dict[str, Any])
        found = manifest.get("format")
        if type(found) is int and found > FORMAT:
            return {}, f"{MANIFEST} has format {found} of a newer samestep, this one reads up to {FORMAT}"
        if manifest.pop("sha256", None) != _checksum(manifest):
            return {}, f"{MANIFEST} is damaged"
        convert(manifest, _Manifest)
    except ValueError:
        return {}, f"{MANIFEST} is damaged"
    return manifest, None


_FileName = Annotated[str, Meta(pattern=rf"\A(?!{re.escape(MANIFEST)}\Z){FILE.pattern}\Z")]


class _Tally(Struct):
    num_skipped: Count = 0
    epoch: Annotated[int, Meta(ge=-1)] = -1
    sums: dict[str, tuple[str, str]] = {}


class _Meta(Struct):
    epoch: Count = 0
    metrics_bytes: Count = 0
    world_size: Count = 0
    rewinds: Count = 0
    numbers: Object = {}
    settings: Object = {}
    tally: _Tally | UnsetType = UNSET
    stopped: str = ""


class _Manifest(Struct, forbid_unknown_fields=True):
    format: Literal[1]
    step: Count
    name: Annotated[str, Meta(pattern=rf"\A{NAME.pattern}\Z")] | None
    time: Annotated[datetime, Meta(tz=True)]
    digest: _Hash | None
    versions: dict[str, str]
    files: dict[_FileName, Extents]
    meta: _Meta

    def __post_init__(self) -> None:
        if STATE not in self.files:
            raise ValueError(f"there is no {STATE}")


@dataclass(frozen=True)
class Snapshot:
    """A snapshot's directory, which may be damaged.

    Attributes:
        step: number of completed steps.
        name: None for a numbered one.
        manifest: {} if it cannot be read.
        problem: damage that the manifest and the files' sizes show; None if there is none.
    """

    path: Path
    step: int
    name: str | None
    manifest: Json
    problem: str | None

    @classmethod
    def from_manifest(cls, path: Path, manifest: Json, problem: str | None) -> "Snapshot":
        """Return the snapshot in a directory, whose name matches `DIRECTORY`."""
        name, _, numbered = path.name.rpartition(".")
        step = int(numbered.removeprefix("step-"))
        if (found := manifest.get("step", step)) != step:
            problem = f"{MANIFEST} is of step {found}"
        return cls(path, step, name or None, manifest, problem)

    @property
    def age(self) -> tuple[int, bool, str]:
        """Return a sort key, the oldest snapshot first. Among snapshots of one step, the numbered one is the newest."""
        return self.step, self.name is None, self.path.name

    @property
    def size_bytes(self) -> int:
        """Total size of the files; 0 if the manifest cannot be read."""
        return sum(measure(extents) for extents in self.manifest.get("files", {}).values())

    @property
    def is_divided(self) -> bool:
        """Return whether each rank has written a file of its own."""
        return len(list_tensor_files(self.manifest.get("files", {}))) > 1

    def is_same(self, other: "Snapshot") -> bool:
        """Return whether a snapshot in another copy of the run has the same name and content."""
        if not self.manifest or not other.manifest or self.path.name != other.path.name:
            return False
        keys = ("digest" if self.manifest["digest"] else "files", "step", "meta")
        return all(self.manifest[key] == other.manifest[key] for key in keys)

    def matches(self, which: int | str) -> bool:
        """Return whether the snapshot matches a request: "latest", a number of completed steps, or a name."""
        return which in ("latest", self.name, self.step)

    def was_left(self, rewinds: Sequence[int]) -> bool:
        """Return whether the run has since gone back to an earlier step. `rewinds`: as in `run.json`."""
        if not self.manifest:
            return False
        return self.step > min(rewinds[self.manifest["meta"].get("rewinds", 0) :], default=self.step)


def name_directory(step: int, name: str | None) -> str:
    """Return the name of a snapshot's directory."""
    return f"step-{step:08d}" if name is None else f"{name}.step-{step:08d}"


def list_outdated(snapshots: Collection[Snapshot], keep: int) -> list[Snapshot]:
    """Return the snapshots that are older than the newest undamaged one of their name.

    Args:
        keep: number of undamaged snapshots without a name that are kept.
    """
    outdated = []
    for name in {each.name for each in snapshots}:
        same = [each for each in snapshots if each.name == name]
        sound = sorted(each.step for each in same if each.problem is None)
        oldest_kept = min(sound[-keep:] if name is None else sound[-1:], default=0)
        outdated += [each for each in same if each.step < oldest_kept]
    return outdated


def find_damage(directory: Path, manifest: Json, rank: int = 0, num_ranks: int = 1) -> str | None:
    """Read every byte of all files. Return a description of damage according to the manifest's checksums, or None.

    Args:
        rank, num_ranks: divide the extents. Each of `num_ranks` callers reads about the same number of bytes.
    """
    total = sum(measure(extents) for extents in manifest["files"].values())
    before = 0
    own: list[tuple[str, int, Extent]] = []
    for file, extents in manifest["files"].items():
        start = 0
        for name, num_bytes, sha256 in extents:
            if before * num_ranks // max(total, 1) == rank:
                own.append((file, start, Extent(name, num_bytes, sha256)))
            start += num_bytes
            before += num_bytes
    with ThreadPoolExecutor(_NUM_READERS) as pool:  # hashing takes the time, and releases the GIL
        return next(filter(None, pool.map(partial(_check_extent, directory), own)), None)


def _check_extent(directory: Path, placed: tuple[str, int, Extent]) -> str | None:
    """Return a description of damage to an extent of a file that begins at a byte, or None."""
    file, start, (_, num_bytes, sha256) = placed
    end = start + num_bytes
    try:
        with open(directory / file, "rb", opener=open_regular) as opened:
            opened.seek(start)
            checksum = hash_chunks(opened.read(min(_BUFFER_BYTES, end - at)) for at in range(start, end, _BUFFER_BYTES))
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
    return None if checksum == sha256 else f"{file} is damaged (somewhere in bytes {start} to {end})"


def measure(extents: Iterable[Sequence[Any]]) -> int:
    """Return the size of a file in bytes."""
    return sum(num_bytes for _, num_bytes, _ in extents)


def find_wrong_size(files: Mapping[str, Any], sizes: Mapping[str, int]) -> str | None:
    """Return a description of wrong sizes (in bytes) of a manifest's files, or None."""
    for file, expected in files.items():
        if file not in sizes:
            return f"{file} is missing"
        if sizes[file] != measure(expected):
            return f"{file} has {sizes[file]} bytes, not {measure(expected)}"
    return None


def _checksum(manifest: Json) -> str:
    return hash_bytes(json.dumps(manifest, sort_keys=True, allow_nan=False).encode())
