"""A run whose directory is a URL: rank 0's working copy on a disk, and what of it goes there and comes from there."""

import hashlib
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

from samestep.errors import Error
from samestep.files import open_regular, replace_file
from samestep.snapshot.object_store import FILES, RECORD, Remote, Unreachable, find_copy, place_of
from samestep.train.arguments import build_never_error
from samestep.train.directory import Directory
from samestep.watch.records import parse_record
from samestep.world.environment import advise, read_host
from samestep.world.forking import at_rest


class Mirror:
    """A URL and the working copy of the run there. Rank 0's alone.

    Args:
        url: as `samestep.Run` got it; with `fresh` the first of x, x-2, x-3 ... where nothing is.
        local_dir: holds the working copies; None: the user's cache directory.
        say: says a sentence.

    Attributes:
        url: the run's.
        path: the working copy's directory. It is another one for another run, although that be at the same URL.

    Raises:
        Error: the URL cannot be used, or not be reached.
    """

    def __init__(self, url: str, *, fresh: bool, local_dir: str | None, say: Callable[[str], None]) -> None:
        self._say = say
        self._pushed: dict[str, str] = {}  # of a file, the hash of what was written there last
        self._is_begun = False
        self._remote = remote = Remote(url)
        with _blaming(remote, "be reached"):
            for number in count(2) if fresh else ():
                if remote.is_empty():
                    break
                remote = self._remote = Remote(f"{url.rstrip('/')}-{number}")
            self._holder, run = remote.read_lock()
        self.url = remote.url
        self._run = run or uuid.uuid4().hex
        self.path = find_copy(self.url, self._run, local_dir)

    def pull(self, directory: Directory, resume: str | int | None) -> None:
        """Brings the snapshot to go on from, and what belongs to it, unless the working copy has them.

        Raises:
            Error: there is nothing sound of what was asked for; the URL cannot be read.
            OSError: the working copy cannot be written.
        """
        with _blaming(self._remote, "be read"):
            record = self._remote.read(RECORD)
            there = self._remote.snapshots()
            if record is None and not there:
                return
            if record is None:
                raise Error(f"{self.url} holds snapshots but no run.json: name another run directory")
            if not directory.record:
                self._bring_file(directory, RECORD, record)
                directory.read_record_again()
            try:
                directory.rewinds = max(directory.rewinds, parse_record(RECORD, record).get("rewinds", []), key=len)
            except ValueError:
                what = f"{self.url}/run.json cannot be read as JSON"
                raise Error(f"{what}: repair it, or start with {advise(fresh=True)}") from None
            if resume is None and there:
                raise build_never_error(self.url)
            directory.store.clean()
            directory.store.abandon([each for each in directory.store.snapshots() if each.was_left(directory.rewinds)])
            if resume is not None:
                self._remote.pull(
                    directory.store, resume, rewinds=directory.rewinds, warn=self._say,
                    bring_files=lambda: self._bring_files(directory),
                )  # fmt: skip

    def bring(self, directory: Directory, which: int | str) -> None:
        """Brings one more snapshot into the working copy, unless it is there. Raises Error as `pull`."""
        with _blaming(self._remote, "be read"):
            self._remote.pull(directory.store, which, rewinds=directory.rewinds, warn=self._say)

    def _bring_files(self, directory: Directory) -> None:
        for name in (*FILES[1:], *self._remote.list_orders()):
            content = self._remote.read(name)
            if content is not None:
                self._bring_file(directory, name, content)

    def _bring_file(self, directory: Directory, name: str, content: bytes) -> None:
        path = directory.path / name
        path.parent.mkdir(exist_ok=True)
        replace_file(path, content)

    def is_ahead(self, step: int) -> bool:
        """Whether there are snapshots of later steps. Raises Error as `pull`."""
        with _blaming(self._remote, "be read"):
            return any(each.step > step for each in self._remote.snapshots().values())

    def begin(self, directory: Directory, step: int) -> None:
        """This process is the one that writes from here on: says so there, and moves what it goes back behind.

        Raises:
            Error: the URL cannot be written.
        """
        if self._is_begun:
            return
        if self._holder and f" on {read_host()} since " not in self._holder:
            self._say(f"{self.url} was written by {self._holder}: if that still runs, it ends with its next snapshot")
        with _blaming(self._remote, "be written"):
            self._remote.take(self._run)
            self._remote.clean()
            self._push_file(directory, RECORD)  # says what was gone back to, whatever comes next
            for place, each in sorted(self._remote.snapshots().items(), key=lambda item: -item[1].step):
                if each.step > step:
                    self._remote.abandon(place, each)
        self._is_begun = True

    @at_rest()  # for as long as the network takes
    def push(self, directory: Directory, keep: int) -> None:
        """Brings there the newest numbered snapshot and the newest of each name, and what goes with them.

        Of the numbered ones the `keep` newest stay.

        Raises:
            Error: another process writes there by now.
            Unpushed: the URL cannot be written; what was there stands.
        """
        try:
            self._push(directory, keep)
        except (Unreachable, OSError) as error:
            raise Unpushed(f"is in {self.path} alone: it could not be brought to {self.url} ({error})") from error

    def _push(self, directory: Directory, keep: int) -> None:
        if not self._remote.check():
            self._pushed.clear()
        self._push_files(directory)
        there = self._remote.snapshots()
        sound = {place: each for place, each in there.items() if each.problem is None}
        own = {place_of(each): each for each in directory.store.snapshots() if each.problem is None}
        newest, oldest = {}, {}
        for name in {each.name for each in (*own.values(), *sound.values())}:
            steps = sorted({each.step for each in (*own.values(), *sound.values()) if each.name == name})
            newest[name], oldest[name] = steps[-1], steps[-keep if name is None else -1 :][0]
        # The named ones first: resumed from the numbered one, the script would not ask for them again.
        for place, each in sorted(own.items(), key=lambda item: item[1].name is None):
            is_there = place in sound and each.is_same(sound[place])
            if is_there or each.step < newest[each.name]:
                continue
            if place in there:
                self._remote.remove(place)
            self._remote.push(each)
        for place, each in there.items():
            if each.step < oldest.get(each.name, 0):
                self._remote.remove(place)

    def push_status(self, directory: Directory) -> None:
        """Brings there how the run has ended, where that can be done."""
        with suppress(Error, Unreachable, OSError):
            self._remote.check()
            self._push_files(directory)

    def _push_files(self, directory: Directory) -> None:
        """Brings there the files beside the snapshots that have changed. Raises Unreachable or OSError."""
        orders = (f"orders/{path.name}" for path in (directory.path / "orders").glob("*.npy"))
        for name in (*FILES, *orders):
            self._push_file(directory, name)

    def _push_file(self, directory: Directory, name: str) -> None:
        path = directory.path / name
        if not path.exists():
            return
        with open(path, "rb", opener=open_regular) as file:
            content = file.read()
        if self._pushed.get(name) != (now := hashlib.sha256(content).hexdigest()):
            self._remote.write(name, content)
            self._pushed[name] = now


class Unpushed(Exception):
    """A snapshot is on this machine's disk alone: the rest of a sentence that begins with it."""


@contextmanager
def _blaming(remote: Remote, what: str) -> Iterator[None]:
    try:
        yield
    except Unreachable as error:
        raise Error(f"the run directory {remote.url} cannot {what} ({error}): mend that, or name another one") from None
