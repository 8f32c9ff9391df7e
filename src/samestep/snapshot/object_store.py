"""A run's directory at a URL: in an object store, or wherever else fsspec reaches.

What is there has the layout of a run's directory on a disk, but that the directory of a named snapshot says its step as
well (`snapshots/best.step-00000007`): stores rename no directories, so a new one is written beside the old one. A
snapshot's manifest goes last, and comes off first; without one, nothing is there.
"""

import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from samestep.errors import Error
from samestep.files import MOST_BYTES
from samestep.snapshot.manifest import FILE, MANIFEST, NAME, describe_wrong_size, find_damage, parse_manifest
from samestep.snapshot.store import Snapshot, Store
from samestep.world.environment import advise, read_cache_dir, read_host

LOCK, RECORD = "lock", "run.json"
FILES = (RECORD, "restarts.jsonl", "status.json", "ledger.bin", "metrics.jsonl")
_PLACE = re.compile(rf"(?:({NAME.pattern})\.)?step-(\d{{8,18}})")
_ORDER = re.compile(r"epoch-\d{8,}\.npy")


class Unreachable(Exception):
    """The store did not do what was asked of it: why, in its own words."""


def find_copies(local_dir: str | None) -> Path:
    """What holds the working copies of runs at URLs on a machine; None: in the user's cache directory."""
    return Path(local_dir).expanduser() if local_dir else read_cache_dir() / "runs"


def find_copy(url: str, run: str, local_dir: str | None) -> Path:
    """Where rank 0's machine has the working copy of a run: another one for another run, although at the same URL.

    Args:
        url: the run's.
        run: what tells it from others, as `Remote.read_lock` has it.
        local_dir: as in `find_copies`.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", url.rpartition("::")[2]).strip("-")[-80:]
    return find_copies(local_dir) / f"{name}-{run[:12]}"


def place_of(snapshot: Snapshot) -> str:
    """The name of a snapshot's directory at a URL."""
    return f"{snapshot.name}.step-{snapshot.step:08d}" if snapshot.name else f"step-{snapshot.step:08d}"


class Remote:
    """What is at a URL. Methods raise `Unreachable` where the store fails.

    Raises:
        Error: there is no such protocol, or its package is not installed.
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
        """Whether there is nothing at all."""
        with self._asking():
            self._fs.invalidate_cache()
            return not self._find("")

    def read(self, name: str) -> bytes | None:
        """A file's content; None where there is none."""
        with self._asking():
            try:
                content: bytes = self._fs.cat_file(self._at(name))
            except FileNotFoundError:
                return None
            return content

    def write(self, name: str, content: bytes) -> None:
        """Puts a file there, in place of another one. A store does so whole or not at all; a disk, by a renaming."""
        with self._asking():
            if not getattr(self._fs, "local_file", False):
                self._in_parent(name, lambda: self._fs.pipe_file(self._at(name), content))
                return
            folder, _, last = name.rpartition("/")
            partial = f"{folder}/.{last}".lstrip("/")
            self._in_parent(partial, lambda: self._fs.pipe_file(self._at(partial), content))
            self._fs.mv(self._at(partial), self._at(name))

    def list_orders(self) -> list[str]:
        """The names of the files in `orders/`."""
        with self._asking():
            names = [path.rpartition("/")[2] for path in self._find("orders")]
        return [f"orders/{name}" for name in names if _ORDER.fullmatch(name)]

    def _find(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._fs.find(self._at(name), detail=True)
        except FileNotFoundError:
            return {}
        return found

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _in_parent(self, name: str, put: Callable[[], None]) -> None:
        """Calls `put`; once more with the directory made, where the store has directories."""
        try:
            put()
        except FileNotFoundError:
            top = self._root[: f"{self._root}/".index("/", 1)]
            if not self._fs.exists(top):  # a bucket: whoever mistypes its name wants none made
                raise
            self._fs.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
            put()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except Unreachable:
            raise
        except Exception as error:  # each store has exceptions of its own
            raise Unreachable(_describe(error)) from error

    # --- snapshots --------------------------------------------------------------------------------------------

    def snapshots(self) -> dict[str, Snapshot]:
        """Those with a manifest, by the names of their directories; sound as far as it and the files' sizes tell.

        Their paths are what they are called in a run's directory on a disk.
        """
        with self._asking():
            return {place: self._look(place, sizes) for place, sizes in self._list().items() if MANIFEST in sizes}

    def clean(self) -> None:
        """Removes what dead writers have begun."""
        with self._asking():
            begun = [place for place, sizes in self._list().items() if MANIFEST not in sizes]
        for place in begun:
            self.remove(place)

    def _list(self) -> dict[str, dict[str, int]]:
        """The files in each directory of `snapshots/` that has the name of a snapshot, and their sizes.

        A store's listing is not to be trusted with names: they become those of files here.
        """
        self._fs.invalidate_cache()
        sizes: dict[str, dict[str, int]] = {}
        for path, info in self._find("snapshots").items():
            place, file = path.split("/")[-2:]
            if _PLACE.fullmatch(place) or NAME.fullmatch(place):
                sizes.setdefault(place, {})[file] = info["size"]
        return sizes

    def _look(self, place: str, sizes: Mapping[str, int]) -> Snapshot:
        is_short = sizes[MANIFEST] <= MOST_BYTES
        manifest, problem = parse_manifest(
            self._fs.cat_file(self._at(f"snapshots/{place}/{MANIFEST}")) if is_short else b""
        )
        match = _PLACE.fullmatch(place)
        name, step = (match[1], int(match[2])) if match else (place, manifest.get("step", -1))
        for file, expected in manifest.get("files", {}).items():
            problem = problem or describe_wrong_size(file, sizes.get(file), expected["size"])
        return Snapshot(Path(name or f"step-{step:08d}"), step, name, manifest, problem)

    def push(self, snapshot: Snapshot) -> None:
        """Puts a snapshot of a store there, unless another run has come. Its place holds no manifest.

        Raises:
            Error: one has.
        """
        place = f"snapshots/{place_of(snapshot)}"
        for file in snapshot.manifest["files"]:
            with self._asking():
                target = f"{place}/{file}"
                self._in_parent(target, lambda: self._fs.put_file(str(snapshot.path / file), self._at(target)))  # noqa: B023
        self.check()
        self.write(f"{place}/{MANIFEST}", (snapshot.path / MANIFEST).read_bytes())

    def remove(self, place: str) -> None:
        """Removes a snapshot, or what there is of one."""
        with self._asking():
            if self._fs.exists(self._at(f"snapshots/{place}/{MANIFEST}")):
                self._fs.rm_file(self._at(f"snapshots/{place}/{MANIFEST}"))
            with suppress(FileNotFoundError):  # where directories are but names, it is gone with its last file
                self._fs.rm(self._at(f"snapshots/{place}"), recursive=True)

    def abandon(self, place: str, snapshot: Snapshot) -> None:
        """Moves a snapshot to `abandoned/`."""
        target = f"abandoned/{place}-{time.time_ns()}"
        with self._asking():
            for file in (*snapshot.manifest.get("files", {}), MANIFEST):
                source = self._at(f"snapshots/{place}/{file}")
                if self._fs.exists(source):
                    goal = f"{target}/{file}"
                    self._in_parent(goal, lambda: self._fs.cp_file(source, self._at(goal)))  # noqa: B023
        self.remove(place)

    def pull(
        self, store: Store, which: int | str, *, rewinds: Sequence[int] = (), warn: Callable[[str], None],
        bring_files: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Sees to it that the store has the newest sound snapshot of what is asked for, as `Store.find` takes it.

        One that only the store has counts as well: it could not be brought here before.

        Args:
            rewinds: as in `run.json`: what the run has left behind does not count.
            warn: called with a sentence for each snapshot that is passed over.
            bring_files: called before a snapshot is put into the store.

        Raises:
            Error: there is nothing sound of what was asked for.
        """
        theirs = {each.path.name: (place, each) for place, each in sorted(self.snapshots().items())}
        theirs = {name: (place, each) for name, (place, each) in theirs.items() if not each.was_left(rewinds)}
        own = {each.path.name: each for each in store.snapshots() if each.problem is None}
        called = {**{name: each for name, (_, each) in theirs.items()}, **own}
        newest = {name: max(each.step, theirs[name][1].step if name in theirs else -1) for name, each in called.items()}
        problem = ""
        # As in a store: of one step, the numbered one.
        for name in sorted(called, key=lambda name: (newest[name], called[name].name is None, name), reverse=True):
            place, there = theirs.get(name, ("", None))
            here = own.get(name)
            if which != "latest" and which not in (called[name].name, newest[name]):
                continue
            counts = here is not None and (there is None or here.is_same(there) or here.step > there.step)
            if here is not None and counts and find_damage(here.path, here.manifest) is None:
                return
            if there is None:
                continue
            problem = there.problem or ""
            if not problem:
                bring_files()
                problem = self._bring(store, place, there) or ""
            if not problem:
                return
            problem = f"{self.url}/snapshots/{place}: {problem}"
            warn(f"a snapshot is not sound and is passed over: {problem}")
        if problem and which == "latest":
            raise Error(
                f"no snapshot in {self.url} is sound ({problem}): bring one back from a backup, or start with "
                f"{advise(fresh=True)}"
            )
        if which != "latest":
            what = f"of step {which}" if isinstance(which, int) else f"named {which}"
            sound = ", ".join(place for place, each in theirs.values() if each.problem is None)
            raise Error(f"there is no sound snapshot {what} in {self.url}: there is {sound or 'no other'}")

    def _bring(self, store: Store, place: str, snapshot: Snapshot) -> str | None:
        """Puts a snapshot into a store. Returns what is wrong with it, where something is."""
        store.make_inbox()
        for file in snapshot.manifest["files"]:
            with self._asking():
                self._fs.get_file(self._at(f"snapshots/{place}/{file}"), str(store.inbox / file))
        return store.adopt(snapshot)

    def copy(self, place: str, directory: Path, *, is_whole: bool) -> None:
        """Copies a snapshot's files to a directory, damaged or not.

        Args:
            is_whole: else, empty files of the same sizes stand for all but the manifest.
        """
        directory.mkdir(parents=True, exist_ok=True)
        with self._asking():
            for file, size in self._list()[place].items():
                if file == MANIFEST or (is_whole and FILE.fullmatch(file)):
                    self._fs.get_file(self._at(f"snapshots/{place}/{file}"), str(directory / file))
                elif FILE.fullmatch(file):
                    (directory / file).touch()
                    os.truncate(directory / file, size)

    # --- whose it is ------------------------------------------------------------------------------------------

    def read_lock(self) -> tuple[str, str]:
        """Who has written here last, and which run it is; "" where nobody has."""
        holder, _, run, *_ = [*(self.read(LOCK) or b"").decode(errors="replace").split("\n"), "", "", ""]
        return holder, run

    def take(self, run: str) -> None:
        """Makes this process the one that writes here: `check` ends whoever did before.

        Args:
            run: tells this run from others that were here before, or will be.
        """
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self._token = f"process {os.getpid()} on {read_host()} since {now}\n{uuid.uuid4().hex}\n{run}\n"
        self.write(LOCK, self._token.encode())

    def check(self) -> bool:
        """Whether what was written since `take` is there still: False where the directory was removed meanwhile.

        Raises:
            Error: someone else has come since.
        """
        text = self.read(LOCK)
        if text is None:
            self.write(LOCK, self._token.encode())
            return False
        if text.decode(errors="replace") != self._token:
            holder = self.read_lock()[0] or "another process"
            raise Error(f"the run in {self.url} was taken over by {holder}: this one ends, and leaves what is there")
        return True


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
