"""One writer per run: a lock that ends with its process, and a token against a writer who has lost the lock."""

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from samestep.errors import Error
from samestep.files import open_regular, read_bytes
from samestep.world.environment import advise, read_host

# What flock says on file systems that have none (some mounts of Lustre and NFS). The token remains.
NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
TEXT_BYTES = 400

_held: set[int] = set()  # descriptors


def _let_go() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


# Or a DataLoader worker would hold on to it for as long as it lives.
os.register_at_fork(after_in_child=_let_go)


class Lock:
    """The lock on a run's directory, held by this process until `release`. The file says by whom.

    flock keeps a second process out on one machine, and on most network file systems. (A POSIX lock would be lost as
    soon as anything in this process reads and closes the file.) Where the file system has no such locks, or has
    forgotten those of a machine that was cut off, the file's text is a token: whoever comes last has written its own,
    and `check` ends the one before.

    Args:
        named: its directory, as a person named it, for messages.

    Attributes:
        is_new: the file was not there before.
        was_elsewhere: who held it before was on another machine, and may live.

    Raises:
        Error: another process holds it, or another run of this process.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, named: Path | None = None) -> None:
        self.path, self._named = path, named or path.parent
        while True:
            self.is_new = not path.exists()
            self._descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in NO_FLOCK:
                    holder = _name_holder(os.read(self._descriptor, TEXT_BYTES))
                    os.close(self._descriptor)
                    raise Error(
                        f"the run in {self._named} is alive, in {holder}: wait for it or stop it, or start with "
                        f"{advise(fresh=True)}"
                    ) from None
            if self._is_there():
                break
            os.close(self._descriptor)  # whoever held it has just removed it
        _held.add(self._descriptor)
        before = os.read(self._descriptor, TEXT_BYTES)
        self.was_elsewhere = bool(before) and f" on {read_host()} since ".encode() not in before
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        text = f"process {os.getpid()} on {read_host()} since {now}\n{uuid.uuid4().hex}\n".encode()
        self._text: bytes | None = None
        with suppress(OSError):  # a full disk
            os.pwrite(self._descriptor, text, 0)
            os.ftruncate(self._descriptor, len(text))
            self._text = text

    def check(self) -> None:
        """Returns where no one has come since. To be called before anything in the directory is replaced.

        Raises:
            Error: someone has.
        """
        if text := self._find_successor():
            raise Error(
                f"the run in {self._named} was taken over by {_name_holder(text)}: this one ends, and leaves what "
                "is there as it is"
            )

    def _find_successor(self) -> bytes:
        """What whoever has come since has written into the file; nothing where no one has."""
        try:
            text = read_bytes(self.path)  # opened anew, or a network file system might tell what it knew before
        except OSError:
            return b""  # the directory is gone, and no one is to be protected
        return text if self._text is not None and text != self._text else b""

    def _is_there(self) -> bool:
        try:
            return os.fstat(self._descriptor).st_ino == self.path.stat().st_ino
        except FileNotFoundError:
            return False

    def release(self, *, remove: bool = False) -> None:
        """Gives it up, and removes the file if so told."""
        if remove and not self._find_successor():
            self.path.unlink(missing_ok=True)  # before others can take it
        _held.discard(self._descriptor)
        os.close(self._descriptor)


def refuse_links(run_dir: Path, names: Sequence[str]) -> None:
    """Raises Error where one of these directories is a symbolic link: what is written must stay in the run's own."""
    for path in (run_dir / name for name in names):
        if path.is_symlink():
            raise Error(
                f"{path} is a symbolic link, and nothing is written through it: make {run_dir} itself the link, or "
                "name another run directory"
            )


def _name_holder(text: bytes) -> str:
    """Who holds a lock, as its file says."""
    return text.decode(errors="replace").partition("\n")[0].strip() or "another process"


def part_from_old_writers(path: Path) -> None:
    """Puts a copy in a file's place: who may still have it open, on a machine that was cut off, adds to the old one."""
    if path.exists():
        copy = path.with_name(f".{path.name}")
        copy.unlink(missing_ok=True)
        with open(path, "rb", opener=open_regular) as old, open(copy, "xb", opener=open_regular) as new:
            shutil.copyfileobj(old, new)
            new.flush()
            os.fsync(new.fileno())
        os.replace(copy, path)
