"""The files of a run at a URL: in an object store, or in any other file system of fsspec.

The files at the URL have the layout of a run directory, except that the directory of a named snapshot contains its step
(`snapshots/best.step-00000007`): stores cannot rename directories, so a new one is written beside the old one. A
snapshot's manifest is written last and removed first; without a manifest, the snapshot does not exist.
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from samestep.data.order_files import ORDERS
from samestep.errors import Error, RunDirectoryError, needing
from samestep.files import MAX_BYTES, read_bytes, replace_file
from samestep.snapshot.lock import build_token, explain_takeover
from samestep.snapshot.manifest import FILE, MANIFEST, NAME, find_wrong_size, parse_manifest
from samestep.snapshot.store import ABANDONED, SNAPSHOTS, Elsewhere, Snapshot, Unreachable
from samestep.watch.records import LOCK, SHARED
from samestep.world.environment import read_cache_dir

P = ParamSpec("P")
T = TypeVar("T")

_PLACE = re.compile(rf"(?:({NAME.pattern})\.)?step-(\d{{8,18}})")
_RUN = re.compile(r"[0-9a-f]{32}")  # the run's id
_ORDER = re.compile(r"epoch-\d{8,}\.npy|shards-[0-9a-f]{16}\.json")


def find_copies(local_dir: str | None) -> Path:
    """Return the directory of the working copies of runs at URLs. Default: in the user's cache directory."""
    return Path(local_dir).expanduser() if local_dir else read_cache_dir() / "runs"


def find_copy(url: str, run: str, local_dir: str | None) -> Path:
    """Return the directory of a run's working copy on rank 0's machine. It differs between runs, even at the same URL.

    Args:
        run: the run's id, see `ObjectStore.read_lock`.
        local_dir: as in `find_copies`.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", url.rpartition("::")[2]).strip("-")[-80:]
    return find_copies(local_dir) / f"{name}-{run[:12]}"


def _requests(method: "Callable[Concatenate[ObjectStore, P], T]") -> "Callable[Concatenate[ObjectStore, P], T]":
    """Convert the exceptions of the store, which differ between stores, to `Unreachable`."""

    @wraps(method)
    def request(self: "ObjectStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except Error:
            raise
        except Exception as error:
            raise Unreachable(self.url, _describe(error)) from error

    return request


class ObjectStore:
    """The files at a URL. Methods raise `Unreachable` if the store fails.

    Raises:
        RunDirectoryError: the protocol is unknown.
        Error: fsspec is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._token = ""
        if not re.split("::|://", url, maxsplit=1)[1].strip("/"):
            raise RunDirectoryError(f"the run directory {url} names no place: give a path after it", code="SS416")
        with needing(f"the run directory {url} needs fsspec", "'samestep[remote]'"):
            from fsspec.core import url_to_fs
        try:
            self._fs, root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:  # fsspec says what to install
            raise RunDirectoryError(f"the run directory {url} cannot be used: {error}", code="SS416") from None
        except Exception as error:
            raise Unreachable(url, _describe(error)) from None
        self._root = str(root).rstrip("/")

    # --- files ------------------------------------------------------------------------------------------------

    @_requests
    def is_empty(self) -> bool:
        """Return whether there are no files at the URL."""
        self._fs.invalidate_cache()
        return not self._find("")

    @_requests
    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""
        try:
            return bytes(self._fs.cat_file(self._at(name)))
        except FileNotFoundError:
            return None

    @_requests
    def write(self, name: str, content: bytes) -> None:
        """Write or replace a file. Object stores do this atomically; for a local disk, a rename does."""
        if not getattr(self._fs, "local_file", False):
            self._put(name, lambda path: self._fs.pipe_file(path, content))
            return
        folder, _, last = name.rpartition("/")
        partial = f"{folder}/.{last}".lstrip("/")
        self._put(partial, lambda path: self._fs.pipe_file(path, content))
        self._fs.mv(self._at(partial), self._at(name))

    @_requests
    def list_files(self) -> list[str]:
        """Return the names of the files of a run besides its snapshots. Some of them may not exist."""
        names = [path.rpartition("/")[2] for path in self._find(ORDERS)]
        return [*SHARED, *(f"{ORDERS}/{name}" for name in names if _ORDER.fullmatch(name))]

    def download(self, names: Sequence[str], directory: Path) -> None:
        """Download the files that exist to the same places in a directory. Raises OSError, too."""
        for name in names:
            if (content := self.read(name)) is not None:
                (directory / name).parent.mkdir(exist_ok=True)
                replace_file(directory / name, content)

    def _find(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._fs.find(self._at(name), detail=True)
        except FileNotFoundError:
            return {}
        return found

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _put(self, name: str, put: Callable[[str], None]) -> None:
        """Call `put` with a file's path, and again after creating the directory if the store has directories."""
        path = self._at(name)
        try:
            put(path)
        except FileNotFoundError:
            top = self._root[: f"{self._root}/".index("/", 1)]
            if not self._fs.exists(top):  # a bucket with a mistyped name must not be created
                raise
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            put(path)

    # --- snapshots --------------------------------------------------------------------------------------------

    @_requests
    def snapshots(self) -> list[Snapshot]:
        """Return the snapshots with a manifest, the oldest first; judged by manifests and file sizes.

        Their paths are the names of their directories.
        """
        found = [self._read_manifest(place, sizes) for place, sizes in self._list().items() if MANIFEST in sizes]
        return sorted(found, key=lambda snapshot: snapshot.age)

    def _list(self) -> dict[str, dict[str, int]]:
        """Return the size of each file in the snapshots' directories.

        Other names are left out: object stores allow any text, and these names become those of local files.
        """
        self._fs.invalidate_cache()
        sizes: dict[str, dict[str, int]] = {}
        for path, info in self._find(SNAPSHOTS).items():
            place, file = path.split("/")[-2:]
            if _PLACE.fullmatch(place) or NAME.fullmatch(place):
                sizes.setdefault(place, {})[file] = info["size"]
        return sizes

    def _read_manifest(self, place: str, sizes: Mapping[str, int]) -> Snapshot:
        text = self._fs.cat_file(self._at_place(place, MANIFEST)) if sizes[MANIFEST] <= MAX_BYTES else b""
        manifest, problem = parse_manifest(text)
        match = _PLACE.fullmatch(place)
        name, step = (match[1], int(match[2])) if match else (place, None)
        problem = problem or find_wrong_size(manifest["files"], sizes)
        return Snapshot.from_manifest(Path(place), name, step, manifest, problem)

    def _at_place(self, place: str, file: str = "") -> str:
        return self._at(f"{SNAPSHOTS}/{place}/{file}")

    def find_elsewhere(self, rewinds: Sequence[int] = (), before_fetch: Callable[[], None] = lambda: None) -> Elsewhere:
        """Return the snapshots at the URL for `Store.find`.

        Args:
            rewinds: as in `run.json`; snapshots that the run has left (`Snapshot.was_left`) are omitted.
            before_fetch: called before a snapshot is downloaded.
        """

        def fetch(snapshot: Snapshot, directory: Path) -> None:
            before_fetch()
            self._fetch(snapshot.path.name, snapshot.manifest["files"], directory)

        return Elsewhere(self.url, [each for each in self.snapshots() if not each.was_left(rewinds)], fetch, rewinds)

    @_requests
    def _fetch(self, place: str, files: Sequence[str], directory: Path) -> None:
        for file in files:
            self._fs.get_file(self._at_place(place, file), str(directory / file))

    @_requests
    def copy_snapshots(self, directory: Path, *, is_whole: bool, has_digests: bool = False) -> None:
        """Download all snapshots to a directory, damaged or not.

        Args:
            is_whole: if False, creates empty files of the same sizes for all but the manifests.
            has_digests: whether to download a snapshot whose manifest has no digest in any case.
        """
        sizes = self._list()
        for snapshot in self.snapshots():
            target = directory / snapshot.label
            target.mkdir(parents=True, exist_ok=True)
            present = [file for file in sizes[snapshot.path.name] if FILE.fullmatch(file)]
            is_fetched = is_whole or (has_digests and snapshot.manifest.get("digest", "") is None)
            self._fetch(snapshot.path.name, present if is_fetched else [MANIFEST], target)
            for file in () if is_fetched else {*present} - {MANIFEST}:
                (target / file).touch()
                os.truncate(target / file, sizes[snapshot.path.name][file])

    @_requests
    def clean(self) -> None:
        """Remove incomplete snapshots of killed writers."""
        for place, sizes in self._list().items():
            if MANIFEST not in sizes:
                self.remove(place)

    @_requests
    def push(self, snapshot: Snapshot) -> None:
        """Upload a snapshot of a `Store`. Its directory at the URL must not have a manifest.

        Raises:
            RunDirectoryError: another process has taken the run over.
        """
        place = f"{SNAPSHOTS}/{place_of(snapshot)}"
        for file in snapshot.manifest["files"]:
            self._put(f"{place}/{file}", lambda path: self._fs.put_file(str(snapshot.path / file), path))  # noqa: B023
        self.check()
        self.write(f"{place}/{MANIFEST}", read_bytes(snapshot.path / MANIFEST))

    @_requests
    def remove(self, place: str) -> None:
        """Remove a snapshot, or what is left of one."""
        if self._fs.exists(self._at_place(place, MANIFEST)):
            self._fs.rm_file(self._at_place(place, MANIFEST))
        with suppress(FileNotFoundError):  # in an object store, a directory is gone with its last file
            self._fs.rm(self._at_place(place), recursive=True)

    @_requests
    def abandon(self, snapshot: Snapshot) -> None:
        """Move a snapshot to `abandoned/`."""
        place = snapshot.path.name
        target = f"{ABANDONED}/{place}-{time.time_ns()}"
        for file in (*snapshot.manifest.get("files", {}), MANIFEST):
            if self._fs.exists(source := self._at_place(place, file)):
                self._put(f"{target}/{file}", lambda path: self._fs.cp_file(source, path))
        self.remove(place)

    # --- lock -------------------------------------------------------------------------------------------------

    def read_lock(self) -> tuple[str, str]:
        """Return the last process that wrote here, and the run's id; "" if there is none.

        The id is part of the path of the working copy, so a lock with any other text has none.
        """
        holder, _, run, *_ = [*(self.read(LOCK) or b"").decode(errors="replace").split("\n"), "", "", ""]
        return holder, run if _RUN.fullmatch(run) else ""

    def take(self, run: str) -> None:
        """Make this process the writer, and end the earlier one at its next `check`. `run`: the run's unique id."""
        self._token = f"{build_token()}{run}\n"
        self.write(LOCK, self._token.encode())

    def check(self) -> bool:
        """Return whether the files written since `take` still exist. False if the directory was removed meanwhile.

        Raises:
            RunDirectoryError: another process has taken the run over.
        """
        text = self.read(LOCK)
        if text is None:
            self.write(LOCK, self._token.encode())
        elif text != self._token.encode():
            raise explain_takeover(self.url, text)
        return text is not None


def place_of(snapshot: Snapshot) -> str:
    """Return the name of a snapshot's directory at a URL."""
    return f"{snapshot.name}.step-{snapshot.step:08d}" if snapshot.name else snapshot.label


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
