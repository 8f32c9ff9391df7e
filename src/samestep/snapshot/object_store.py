"""A run whose directory is a URL: in an object store, or wherever else fsspec reaches.

At the URL is the layout of a run's directory, except that the directory of a named snapshot contains its step
(`snapshots/best.step-00000007`): stores cannot rename directories, so a new one is written beside the old one. A
snapshot's manifest is written last and removed first; without a manifest, the snapshot does not exist.
"""

import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from samestep.config import is_url
from samestep.console import say
from samestep.errors import Error, explain
from samestep.files import MOST_BYTES, open_regular, replace_file
from samestep.snapshot.lock import build_token
from samestep.snapshot.manifest import FILE, MANIFEST, NAME, describe_wrong_size, find_damage, parse_manifest
from samestep.snapshot.run_directory import RunDirectory, explain_never
from samestep.snapshot.run_record import read_record
from samestep.snapshot.store import ABANDONED, SNAPSHOTS, Snapshot, Store, describe_which, explain_no_sound
from samestep.watch.records import LOCK, ORDERS, RECORD, SHARED, list_orders, parse_record
from samestep.world.environment import advise, read_cache_dir, read_host
from samestep.world.forking import at_rest
from samestep.world.workdir import WorkDir

_PLACE = re.compile(rf"(?:({NAME.pattern})\.)?step-(\d{{8,18}})")
_ORDER = re.compile(r"epoch-\d{8,}\.npy")


class Unreachable(Exception):
    """A request to the store failed. The message is the store's."""


class Unpushed(Exception):
    """A snapshot is on this machine's disk only. The message continues a sentence that begins with the snapshot."""


def find_copies(local_dir: str | None) -> Path:
    """The directory of the working copies of runs at URLs. Default: in the user's cache directory."""
    return Path(local_dir).expanduser() if local_dir else read_cache_dir() / "runs"


def find_copy(url: str, run: str, local_dir: str | None) -> Path:
    """The directory of a run's working copy on rank 0's machine. It differs between runs, even at the same URL.

    Args:
        run: the run's id, see `ObjectStore.read_lock`.
        local_dir: as in `find_copies`.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", url.rpartition("::")[2]).strip("-")[-80:]
    return find_copies(local_dir) / f"{name}-{run[:12]}"


@contextmanager
def reaching(url: str, what: str = "be read") -> Iterator[None]:
    """Turns `Unreachable` into an Error: the run directory cannot `what`."""
    try:
        yield
    except Unreachable as error:
        raise Error(f"the run directory {url} cannot {what} ({error}): fix that, or name another one") from None


class ObjectStore:
    """The files at a URL. Methods raise `Unreachable` if the store fails.

    Raises:
        Error: the protocol is unknown, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._token = ""
        if not re.split("::|://", url, maxsplit=1)[1].strip("/"):
            raise Error(f"the run directory {url} names no place: give a path after it")
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise Error(f"the run directory {url} needs fsspec: pip install 'samestep[remote]'") from None
        try:
            self._fs, root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:  # fsspec says what to install
            raise Error(f"the run directory {url} cannot be used: {error}") from None
        except Exception as error:
            raise Error(f"the run directory {url} cannot be reached ({_describe(error)})") from None
        self._root = str(root).rstrip("/")

    # --- files ------------------------------------------------------------------------------------------------

    def is_empty(self) -> bool:
        """Whether there are no files at the URL."""
        with self._requesting():
            self._fs.invalidate_cache()
            return not self._find("")

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it does not exist."""
        with self._requesting():
            try:
                content: bytes = self._fs.cat_file(self._at(name))
            except FileNotFoundError:
                return None
            return content

    def write(self, name: str, content: bytes) -> None:
        """Writes or replaces a file. Object stores do this atomically; for a local disk, a rename does."""
        with self._requesting():
            if not getattr(self._fs, "local_file", False):
                self._in_parent(name, lambda: self._fs.pipe_file(self._at(name), content))
                return
            folder, _, last = name.rpartition("/")
            partial = f"{folder}/.{last}".lstrip("/")
            self._in_parent(partial, lambda: self._fs.pipe_file(self._at(partial), content))
            self._fs.mv(self._at(partial), self._at(name))

    def list_files(self) -> list[str]:
        """The names of files that a copy of the run holds besides its snapshots. Some of them may not exist."""
        with self._requesting():
            names = [path.rpartition("/")[2] for path in self._find(ORDERS)]
        return [*SHARED, *(f"{ORDERS}/{name}" for name in names if _ORDER.fullmatch(name))]

    def _find(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._fs.find(self._at(name), detail=True)
        except FileNotFoundError:
            return {}
        return found

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _in_parent(self, name: str, put: Callable[[], None]) -> None:
        """Calls `put`, and again after creating the directory if the store has directories."""
        try:
            put()
        except FileNotFoundError:
            top = self._root[: f"{self._root}/".index("/", 1)]
            if not self._fs.exists(top):  # a bucket with a mistyped name must not be created
                raise
            self._fs.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
            put()

    @contextmanager
    def _requesting(self) -> Iterator[None]:
        try:
            yield
        except Unreachable:
            raise
        except Exception as error:  # each store has exceptions of its own
            raise Unreachable(_describe(error)) from error

    # --- snapshots --------------------------------------------------------------------------------------------

    def snapshots(self) -> dict[str, Snapshot]:
        """Snapshots with a manifest, by the names of their directories; judged by manifests and file sizes.

        Their paths are the names that they have in a run's directory on a disk.
        """
        with self._requesting():
            return {
                place: self._read_manifest(place, sizes) for place, sizes in self._list().items() if MANIFEST in sizes
            }

    def _list(self) -> dict[str, dict[str, int]]:
        """The size of each file in the snapshots' directories.

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
        text = self._fs.cat_file(self._at_place(place, MANIFEST)) if sizes[MANIFEST] <= MOST_BYTES else b""
        manifest, problem = parse_manifest(text)
        match = _PLACE.fullmatch(place)
        name, step = (match[1], int(match[2])) if match else (place, manifest.get("step", -1))
        for file, expected in manifest.get("files", {}).items():
            problem = problem or describe_wrong_size(file, sizes.get(file), expected["size"])
        return Snapshot(Path(name or f"step-{step:08d}"), step, name, manifest, problem)

    def _at_place(self, place: str, file: str = "") -> str:
        return self._at(f"{SNAPSHOTS}/{place}/{file}")

    def clean(self) -> None:
        """Removes incomplete snapshots of killed writers."""
        with self._requesting():
            incomplete = [place for place, sizes in self._list().items() if MANIFEST not in sizes]
        for place in incomplete:
            self.remove(place)

    def push(self, snapshot: Snapshot) -> None:
        """Uploads a snapshot of a `Store`. Its directory at the URL must not have a manifest.

        Raises:
            Error: another process has taken the run over.
        """
        place = f"{SNAPSHOTS}/{place_of(snapshot)}"
        for file in snapshot.manifest["files"]:
            with self._requesting():
                target = f"{place}/{file}"
                self._in_parent(target, lambda: self._fs.put_file(str(snapshot.path / file), self._at(target)))  # noqa: B023
        self.check()
        self.write(f"{place}/{MANIFEST}", (snapshot.path / MANIFEST).read_bytes())

    def remove(self, place: str) -> None:
        """Removes a snapshot, or the rest of one."""
        with self._requesting():
            if self._fs.exists(self._at_place(place, MANIFEST)):
                self._fs.rm_file(self._at_place(place, MANIFEST))
            with suppress(FileNotFoundError):  # in an object store, a directory is gone with its last file
                self._fs.rm(self._at_place(place), recursive=True)

    def abandon(self, place: str, snapshot: Snapshot) -> None:
        """Moves a snapshot to `abandoned/`."""
        target = f"{ABANDONED}/{place}-{time.time_ns()}"
        with self._requesting():
            for file in (*snapshot.manifest.get("files", {}), MANIFEST):
                source = self._at_place(place, file)
                if self._fs.exists(source):
                    goal = f"{target}/{file}"
                    self._in_parent(goal, lambda: self._fs.cp_file(source, self._at(goal)))  # noqa: B023
        self.remove(place)

    def pull(
        self, store: Store, which: int | str, *, rewinds: Sequence[int] = (), warn: Callable[[str], None] = say,
        before_put: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Downloads the newest sound snapshot that matches, unless `store` has it, or has a newer one.

        Args:
            which: as for `Store.find`.
            rewinds: as in `run.json`; snapshots that the run went back behind are ignored.
            warn: called with a sentence for each unsound snapshot that is skipped.
            before_put: called before a snapshot is put into the store.

        Raises:
            Error: no snapshot that matches is sound.
        """
        usable = [(place, each) for place, each in sorted(self.snapshots().items()) if not each.was_left(rewinds)]
        places = {each.path.name: place for place, each in usable}
        there = {each.path.name: each for _, each in usable}
        here = {each.path.name: each for each in store.snapshots() if each.problem is None}
        newer = {name: each for name, each in here.items() if name not in there or each.step >= there[name].step}
        problem = ""
        for name, each in sorted((there | newer).items(), key=lambda item: _order(item[1]), reverse=True):
            if which not in ("latest", each.name, each.step):
                continue
            local, remote, place = here.get(name), there.get(name), places.get(name, "")
            is_current = local is not None and (remote is None or local.is_same(remote) or local.step > remote.step)
            if local is not None and is_current and find_damage(local.path, local.manifest) is None:
                return
            if remote is None:
                continue
            problem = remote.problem or ""
            if not problem:
                before_put()
                problem = self._download(store, place, remote) or ""
            if not problem:
                return
            problem = f"{self.url}/{SNAPSHOTS}/{place}: {problem}"
            warn(f"skipping a snapshot that is not sound: {problem}")
        if problem and which == "latest":
            raise explain_no_sound(self.url, problem)
        if which != "latest":
            sound = ", ".join(places[name] for name, each in there.items() if each.problem is None)
            what = describe_which(which)
            raise Error(f"there is no sound snapshot {what} in {self.url}: there is {sound or 'no other'}")

    def _download(self, store: Store, place: str, snapshot: Snapshot) -> str | None:
        """Puts a snapshot into a store. Returns what is wrong with it; None if nothing is."""
        store.make_inbox()
        for file in snapshot.manifest["files"]:
            with self._requesting():
                self._fs.get_file(self._at_place(place, file), str(store.inbox / file))
        return store.adopt(snapshot)

    def copy(self, place: str, directory: Path, *, is_whole: bool) -> None:
        """Downloads a snapshot's files to a directory, damaged or not.

        Args:
            is_whole: if False, creates empty files of the same sizes for all but the manifest.
        """
        directory.mkdir(parents=True, exist_ok=True)
        with self._requesting():
            for file, size in self._list()[place].items():
                if file == MANIFEST or (is_whole and FILE.fullmatch(file)):
                    self._fs.get_file(self._at_place(place, file), str(directory / file))
                elif FILE.fullmatch(file):
                    (directory / file).touch()
                    os.truncate(directory / file, size)

    # --- lock -------------------------------------------------------------------------------------------------

    def read_lock(self) -> tuple[str, str]:
        """The last process that wrote here, and the run's id; "" if there is none."""
        holder, _, run, *_ = [*(self.read(LOCK) or b"").decode(errors="replace").split("\n"), "", "", ""]
        return holder, run

    def take(self, run: str) -> None:
        """Makes this process the writer. `check` ends the earlier one. `run`: the run's id, unique for each run."""
        self._token = f"{build_token()}{run}\n"
        self.write(LOCK, self._token.encode())

    def check(self) -> bool:
        """Whether the files written since `take` still exist. False if the directory was removed meanwhile.

        Raises:
            Error: another process has taken the run over.
        """
        text = self.read(LOCK)
        if text is None:
            self.write(LOCK, self._token.encode())
            return False
        if text.decode(errors="replace") != self._token:
            holder = self.read_lock()[0] or "another process"
            raise Error(
                f"the run in {self.url} was taken over by {holder}: this process ends, and leaves the files as they are"
            )
        return True


class RemoteRun:
    """A run at a URL, and its working copy on a disk. Only rank 0 has one.

    Args:
        url: as `samestep.Run` got it. With `fresh`, the first of x, x-2, x-3 ... that is empty.
        local_dir: as in `find_copies`.
        warn: prints a sentence.

    Attributes:
        url: the run's.
        path: the working copy's directory.

    Raises:
        Error: the URL cannot be used or reached.
    """

    def __init__(self, url: str, *, fresh: bool, local_dir: str | None, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._pushed: dict[str, str] = {}  # file -> sha256 of the content uploaded last
        self._is_begun = False
        store = ObjectStore(url)
        with reaching(store.url, "be reached"):
            for number in count(2) if fresh else ():
                if store.is_empty():
                    break
                store = ObjectStore(f"{url.rstrip('/')}-{number}")
            self._holder, run = store.read_lock()
        self._store, self.url = store, store.url
        self._run = run or uuid.uuid4().hex
        self.path = find_copy(self.url, self._run, local_dir)

    def pull(self, directory: RunDirectory, resume: str | int | None) -> None:
        """Downloads the snapshot to resume from and the files that belong to it, unless the working copy has them.

        Raises:
            Error: nothing that matches is sound, or the URL cannot be read.
            OSError: the working copy cannot be written.
        """
        with reaching(self.url):
            record, there = self._store.read(RECORD), self._store.snapshots()
            if record is None:
                if there:
                    raise Error(f"{self.url} holds snapshots but no {RECORD}: name another run directory")
                return
            if not directory.record:
                replace_file(directory.path / RECORD, record)
                directory.read_record()
            try:
                directory.rewinds = max(directory.rewinds, parse_record(RECORD, record).get("rewinds", []), key=len)
            except ValueError:
                what = f"{self.url}/{RECORD} cannot be read as JSON"
                raise Error(f"{what}: repair it, or start with {advise(fresh=True)}") from None
            if resume is None:
                if there:
                    raise explain_never(self.url)
                return
            directory.store.clean()
            directory.store.abandon([each for each in directory.store.snapshots() if each.was_left(directory.rewinds)])
            self.download(directory, resume, before_put=lambda: self._download_files(directory))

    def download(self, directory: RunDirectory, which: int | str, **more: Any) -> None:
        """Downloads a snapshot to the working copy, unless it is there. Raises Error as `pull`."""
        with reaching(self.url):
            self._store.pull(directory.store, which, rewinds=directory.rewinds, warn=self._warn, **more)

    def _download_files(self, directory: RunDirectory) -> None:
        download_files(self._store, directory.path, [name for name in self._store.list_files() if name != RECORD])

    def is_ahead(self, step: int) -> bool:
        """Whether there are snapshots of later steps. Raises Error as `pull`."""
        with reaching(self.url):
            return any(each.step > step for each in self._store.snapshots().values())

    def begin(self, directory: RunDirectory, step: int) -> None:
        """Makes this process the writer, and moves snapshots of later steps to `abandoned/`. Only the first call.

        Raises:
            Error: the URL cannot be written.
        """
        if self._is_begun:
            return
        if self._holder and f" on {read_host()} since " not in self._holder:
            self._warn(f"{self.url} was written by {self._holder}: if it still runs, it ends at its next snapshot")
        with reaching(self.url, "be written"):
            self._store.take(self._run)
            self._store.clean()
            self._push_file(directory, RECORD)  # first: it lists the steps that the run went back to
            for place, each in sorted(self._store.snapshots().items(), key=lambda item: -item[1].step):
                if each.step > step:
                    self._store.abandon(place, each)
        self._is_begun = True

    @at_rest()  # the network may take long
    def push(self, directory: RunDirectory, keep: int) -> None:
        """Uploads the newest numbered snapshot, the newest of each name, and the other files that changed.

        Of the numbered snapshots at the URL, keeps the `keep` newest.

        Raises:
            Error: another process has taken the run over.
            Unpushed: the URL cannot be written; what was there is unchanged.
        """
        try:
            self._push(directory, keep)
        except (Unreachable, OSError) as error:
            raise Unpushed(f"is in {self.path} only: it could not be uploaded to {self.url} ({error})") from error

    def _push(self, directory: RunDirectory, keep: int) -> None:
        if not self._store.check():
            self._pushed.clear()
        self._push_files(directory)
        there = self._store.snapshots()
        sound = {place: each for place, each in there.items() if each.problem is None}
        own = {place_of(each): each for each in directory.store.snapshots() if each.problem is None}
        steps: dict[str | None, list[int]] = {}
        for each in {**sound, **own}.values():
            steps[each.name] = sorted({*steps.get(each.name, []), each.step})
        # Named ones first: a script that resumes from the numbered one would not ask for them again.
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
        """Uploads how the run ended, if possible."""
        with suppress(Error, Unreachable, OSError):
            self._store.check()
            self._push_files(directory)

    def _push_files(self, directory: RunDirectory) -> None:
        for name in (*SHARED, *list_orders(directory.path)):
            self._push_file(directory, name)

    def _push_file(self, directory: RunDirectory, name: str) -> None:
        """Uploads a file that exists and has changed. Raises Unreachable or OSError."""
        path = directory.path / name
        if not path.exists():
            return
        with open(path, "rb", opener=open_regular) as file:
            content = file.read()
        if self._pushed.get(name) != (now := hashlib.sha256(content).hexdigest()):
            self._store.write(name, content)
            self._pushed[name] = now


def download_files(store: ObjectStore, directory: Path, names: Sequence[str]) -> None:
    """Downloads those of some files that exist. Raises Unreachable or OSError."""
    for name in names:
        if (content := store.read(name)) is not None:
            (directory / name).parent.mkdir(exist_ok=True)
            replace_file(directory / name, content)


@contextmanager
def open_run(run: str, *, which: int | str | None = None, is_whole: bool = False) -> Iterator[Path]:
    """A run's directory for a tool to read; for a URL, a copy that is removed at the end of the block.

    Args:
        which: of a copy, the only snapshot that is downloaded, as for `Store.find`. None: all of them, but with empty
            files of the same sizes for tensors and states.
        is_whole: downloads those files, too.

    Raises:
        Error: the directory or the URL cannot be read, or no snapshot that was asked for is sound.
    """
    if not is_url(run):
        try:
            yield Path(run)
        except BrokenPipeError:  # the reader of the output has closed it
            raise
        except OSError as error:
            if error.filename is None and explain(error) is not None:  # from writing the output
                raise
            where = f"{error.filename or run} cannot be read ({error.strerror})"
            raise Error(f"{where}: fix that, or name another one") from None
        return
    remote = ObjectStore(run)
    with WorkDir() as home:
        with reaching(run):
            download_files(remote, home.path, remote.list_files())
            store = Store(home.path)
            if which is not None:
                remote.pull(store, which, rewinds=read_run(home.path, remote.url).get("rewinds", []))
            else:
                for place, snapshot in sorted(remote.snapshots().items()):
                    remote.copy(place, store.path / snapshot.path.name, is_whole=is_whole)
        yield home.path


def read_run(run: Path, called: str) -> dict[str, Any]:
    """Reads a run's `run.json` for a tool. `called`: the run as the user gave it. Raises Error."""
    if not run.is_dir():
        raise Error(f"there is no directory {called}: name a run's directory")
    try:
        return read_record(run, called)
    except FileNotFoundError:
        raise Error(
            f"{called} is no run's directory, it has no {RECORD}: name the directory that holds {SNAPSHOTS}/"
        ) from None


def place_of(snapshot: Snapshot) -> str:
    """The name of a snapshot's directory at a URL."""
    return f"{snapshot.name}.step-{snapshot.step:08d}" if snapshot.name else f"step-{snapshot.step:08d}"


def _order(snapshot: Snapshot) -> tuple[int, bool, str]:
    return snapshot.step, snapshot.name is None, snapshot.path.name  # of one step, the numbered one is the newest


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
