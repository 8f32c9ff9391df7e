"""The mirror of a run at a URL: in an object store, or in any other file system of fsspec.

A run at a URL works in a directory on the disk of rank 0, its working copy. A start pulls what the directory lacks, and
each snapshot is pushed, with its manifest last. Without a manifest, a snapshot does not exist.

The files at the URL have the layout of a run directory.
"""

import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

from samestep.console import say
from samestep.data.source import ORDERS, list_orders
from samestep.errors import Error, RunDirectoryError, needing
from samestep.files import MAX_BYTES, open_regular, read_bytes, replace_file
from samestep.hashing import hash_bytes
from samestep.processes import at_rest
from samestep.snapshot.lock import build_token, explain_takeover
from samestep.snapshot.manifest import DIRECTORY, MANIFEST, Snapshot, find_wrong_size, list_outdated, parse_manifest
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.run_record import parse_run_record
from samestep.snapshot.store import ABANDONED, SNAPSHOTS, Store
from samestep.watch.records import LOCK, RECORD, SHARED
from samestep.world.environment import read_cache_dir, read_host

F = TypeVar("F", bound=Callable[..., Any])

_RUN = re.compile(r"[0-9a-f]{32}")  # the run's id
_ORDER = re.compile(r"epoch-\d{8,}\.npy|shards-[0-9a-f]{16}\.json")


class Unreachable(RunDirectoryError):
    """A request to a URL failed. `reason`: its message."""

    code = "SS416"

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"the run directory {url} cannot be reached ({reason}): fix that, or name another one")
        self.reason = reason


def _requests(method: F) -> F:
    """Convert the exceptions of the store, which differ between stores, to `Unreachable`."""

    @wraps(method)
    def request(self: "Mirror", *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Error:
            raise
        except Exception as error:
            raise Unreachable(self.url, _describe(error)) from error

    return request  # type: ignore[return-value]


class Mirror:
    """The files of a run at a URL. Methods raise `Unreachable` if the store fails.

    Args:
        warn: prints a message.

    Raises:
        RunDirectoryError: the protocol is unknown.
        Error: fsspec is not installed.
    """

    def __init__(self, url: str, warn: Callable[[str], None] = say) -> None:
        self.url = url.rstrip("/")
        self._warn = warn
        self._token = b""
        self._holder = self._run = ""
        self._pushed: dict[str, str] = {}  # file -> sha256 of the content uploaded last
        if not re.split("::|://", url, maxsplit=1)[1].strip("/"):
            raise RunDirectoryError(f"the run directory {url} names no directory: give a path after it", code="SS416")
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
        is_local = getattr(self._fs, "local_file", False)
        folder, _, last = name.rpartition("/")
        written = f"{folder}/.{last}".lstrip("/") if is_local else name
        self._put(written, lambda path: self._fs.pipe_file(path, content))
        if is_local:
            self._fs.mv(self._at(written), self._at(name))

    def download(self, directory: Path) -> None:
        """Download the files of a run besides its snapshots, without one that does not exist. Raises OSError, too.

        `pull_record` downloads `run.json`.
        """
        for name in (*SHARED[1:], *self._list_orders()):
            if (content := self.read(name)) is not None:
                (directory / name).parent.mkdir(exist_ok=True)
                replace_file(directory / name, content)

    @_requests
    def _list_orders(self) -> list[str]:
        names = [path.rpartition("/")[2] for path in self._find(ORDERS)]
        return [f"{ORDERS}/{name}" for name in names if _ORDER.fullmatch(name)]

    def _find(self, name: str) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            return dict(self._fs.find(self._at(name), detail=True))
        return {}

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
        found = [self._read_manifest(folder, sizes) for folder, sizes in self._list().items() if MANIFEST in sizes]
        return sorted(found, key=lambda snapshot: snapshot.age)

    def _list(self) -> dict[str, dict[str, int]]:
        """Return the size of each file in the snapshots' directories.

        Other names are left out: object stores allow any text, and these names become those of local files.
        """
        self._fs.invalidate_cache()
        sizes: dict[str, dict[str, int]] = {}
        for path, info in self._find(SNAPSHOTS).items():
            folder, file = path.split("/")[-2:]
            if DIRECTORY.fullmatch(folder):
                sizes.setdefault(folder, {})[file] = info["size"]
        return sizes

    def _read_manifest(self, folder: str, sizes: Mapping[str, int]) -> Snapshot:
        text = self._fs.cat_file(self._at(f"{SNAPSHOTS}/{folder}/{MANIFEST}")) if sizes[MANIFEST] <= MAX_BYTES else b""
        manifest, problem = parse_manifest(text)
        return Snapshot.from_manifest(Path(folder), manifest, problem or find_wrong_size(manifest["files"], sizes))

    @_requests
    def _fetch(self, folder: str, files: Sequence[str], directory: Path) -> None:
        for file in files:
            self._fs.get_file(self._at(f"{SNAPSHOTS}/{folder}/{file}"), str(directory / file))

    @_requests
    def _remove(self, folder: str) -> None:
        """Remove a snapshot, or what is left of one."""
        manifest = self._at(f"{SNAPSHOTS}/{folder}/{MANIFEST}")
        if self._fs.exists(manifest):
            self._fs.rm_file(manifest)
        with suppress(FileNotFoundError):  # in an object store, a directory is gone with its last file
            self._fs.rm(self._at(f"{SNAPSHOTS}/{folder}"), recursive=True)

    # --- pull -------------------------------------------------------------------------------------------------

    def pull_record(self, directory: RunDirectory) -> Sequence[int]:
        """Download `run.json` unless the working copy has one. Return the steps to which the run has gone back.

        Raises:
            RunDirectoryError: there is no run at the URL, or it cannot be read.
            OSError: the working copy cannot be written.
        """
        text = self.read(RECORD)
        if text is None:
            if self.snapshots():
                raise RunDirectoryError(
                    f"{self.url} holds snapshots but no {RECORD}: name another run directory", code="SS407"
                )
            return []
        record = parse_run_record(text, self.url)
        if not directory.record:
            replace_file(directory.path / RECORD, text)
            directory.read_record()
        rewinds: Sequence[int] = record.get("rewinds", [])
        return rewinds

    def pull(
        self,
        store: Store,
        which: int | str | None,
        rewinds: Sequence[int] = (),
        *,
        with_files: bool = False,
    ) -> None:
        """Copy the newest undamaged snapshot at the URL that matches to a store, unless that has it or a newer one.

        Tells the store which snapshots the URL has.

        Args:
            which: as for `Store.find`; None: copy none.
            rewinds: as in `run.json`; snapshots that the run has left are ignored.
            with_files: whether to download the other files of the run with a snapshot.

        Raises:
            OSError: the store cannot be written.
        """
        there = [each for each in self.snapshots() if not each.was_left(rewinds)]
        store.note_remote(self.url, there)
        problem = ""
        for snapshot in reversed([each for each in there if which is not None and each.matches(which)]):
            if problem:
                self._warn(f"skipping a snapshot that cannot be used: {problem}")
            if store.holds(snapshot):
                return
            problem = snapshot.problem or store.judge(snapshot)
            if not problem:
                if with_files:  # first: a snapshot without the rows before it must not be found
                    self.download(store.path.parent)
                store.make_inbox()
                self._fetch(snapshot.path.name, snapshot.manifest["files"], store.inbox)
                problem = store.adopt(snapshot)
            if not problem:
                return
            problem = f"{self.url}/{SNAPSHOTS}/{snapshot.path.name}: {problem}"
        store.note_remote(self.url, there, problem)

    # --- push -------------------------------------------------------------------------------------------------

    def begin(self, directory: RunDirectory, step: int) -> None:
        """Make this process the writer, and move snapshots of later steps to `abandoned/`. Called once.

        Raises:
            RunDirectoryError: the URL cannot be written.
        """
        if self._holder and f" on {read_host()} since " not in self._holder:
            self._warn(f"{self.url} was written by {self._holder}: if it still runs, it ends at its next snapshot")
        self.take()
        self._push_files(directory)  # first: `run.json` lists the steps that the run went back to
        for each in reversed(self.snapshots()):
            if each.step > step:
                self._abandon(each)

    @_requests
    def _abandon(self, snapshot: Snapshot) -> None:
        folder = snapshot.path.name
        target = f"{ABANDONED}/{folder}-{time.time_ns()}"
        for file in (*snapshot.manifest.get("files", {}), MANIFEST):
            if self._fs.exists(source := self._at(f"{SNAPSHOTS}/{folder}/{file}")):
                self._put(f"{target}/{file}", partial(self._fs.cp_file, source))
        self._remove(folder)

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
            self._check()
            self._push_files(directory)
            self._push_snapshots(directory.store, keep)
        except (Unreachable, OSError) as error:
            why = error.reason if isinstance(error, Unreachable) else error
            return f"is in {directory.path} only: it could not be uploaded to {self.url} ({why})"
        return ""

    def push_status(self, directory: RunDirectory) -> None:
        """Upload the status of the run, if possible."""
        with suppress(Error, OSError):
            self._check()
            self._push_files(directory)

    def _push_snapshots(self, store: Store, keep: int) -> None:
        there = {each.path.name: each for each in self.snapshots()}
        newest = {each.name: each for each in store.snapshots() if each.problem is None}
        # Named ones first: a script that resumes from the numbered one would not request them again.
        for own in sorted(newest.values(), key=lambda each: each.name is None):
            before = there.get(own.path.name)
            if before is None or before.problem is not None or not own.is_same(before):
                self._remove(own.path.name)
                self._push_snapshot(own)
                there[own.path.name] = own
        for each in list_outdated(there.values(), keep):
            self._remove(each.path.name)

    @_requests
    def _push_snapshot(self, snapshot: Snapshot) -> None:
        folder = f"{SNAPSHOTS}/{snapshot.path.name}"
        for file in snapshot.manifest["files"]:
            self._put(f"{folder}/{file}", partial(self._fs.put_file, str(snapshot.path / file)))
        self._check()
        self.write(f"{folder}/{MANIFEST}", read_bytes(snapshot.path / MANIFEST))

    def _push_files(self, directory: RunDirectory) -> None:
        """Upload the files that exist and have changed, `run.json` first. Raises OSError, too."""
        for name in (*SHARED, *list_orders(directory.path)):
            path = directory.path / name
            if not path.exists():
                continue
            with open(path, "rb", opener=open_regular) as file:
                content = file.read()
            if self._pushed.get(name) != (now := hash_bytes(content)):
                self.write(name, content)
                self._pushed[name] = now

    # --- lock -------------------------------------------------------------------------------------------------

    def join(self, local_dir: str | None) -> Path:
        """Join the run at the URL, or begin a new one. Return the directory of its working copy on this machine.

        It differs between runs, even at the same URL: the run's id in the lock is a part of its name.

        Args:
            local_dir: the directory of all working copies. Default: in the user's cache directory.
        """
        self._holder, _, run, *_ = [*(self.read(LOCK) or b"").decode(errors="replace").split("\n"), "", "", ""]
        self._run = run if _RUN.fullmatch(run) else uuid.uuid4().hex
        copies = Path(local_dir).expanduser() if local_dir else read_cache_dir() / "runs"
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.url.rpartition("::")[2]).strip("-")[-80:]
        return copies / f"{name}-{self._run[:12]}"

    def take(self) -> None:
        """Make this process the writer: the earlier one ends at its next check. Remove what it has left incomplete."""
        self._token = f"{build_token()}{self._run}\n".encode()
        self.write(LOCK, self._token)
        for folder, sizes in self._list().items():
            if MANIFEST not in sizes:
                self._remove(folder)

    def _check(self) -> None:
        """Check that this process is still the writer. If the directory was removed, all files are uploaded again.

        Raises:
            RunDirectoryError: another process has taken the run over.
        """
        text = self.read(LOCK)
        if text is None:
            self._pushed.clear()
            self.write(LOCK, self._token)
        elif text != self._token:
            raise explain_takeover(self.url, text)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
