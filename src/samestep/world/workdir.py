"""Temporary directories that only this user can enter, in places such as /tmp where every user can create names.

Each start removes those that killed processes have left.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from samestep.files import open_regular
from samestep.world.environment import read_host

PREFIX = "samestep-"


class WorkDir:
    """A temporary directory. Use as a context manager, or call `close`, to remove it.

    Attributes:
        path: the directory.
        lock: an open, locked file. The directory belongs to the processes that hold it, so a child can inherit it. The
            kernel releases the lock when the last of them ends, and process ids, which are reused, play no part.
    """

    def __init__(self, name: str = "") -> None:
        lock_name = f"lock-{read_host()}"  # other machines can share the directory, and do not see this one's locks
        for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{lock_name}"):
            with suppress(OSError):
                _remove_if_left(lock)
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}"))
        self.lock = open(self.path / "unlocked", "wb", opener=open_regular)  # noqa: SIM115
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            # Renamed only now: another process that found it before the lock is held would remove the directory.
            os.rename(self.path / "unlocked", self.path / lock_name)  # noqa: TID251 it is empty, and held open

    def __enter__(self) -> "WorkDir":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the directory. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.lock.close()


def _remove_if_left(lock: Path) -> None:
    """Remove the directory of a lock that no process holds, if it belongs to this user. Follows no link."""
    status = os.lstat(lock.parent)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    file = open_regular(lock, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent, ignore_errors=True)
    finally:
        os.close(file)


def make_private(directory: Path) -> None:
    """Create a directory with mode 0700, or check the existing one. (/tmp can be cleaned during a run.)

    Raises OSError; PermissionError if the existing one is not this user's, or others can enter it.
    """
    try:
        directory.mkdir(0o700)
    except FileExistsError:
        _check(directory, os.lstat(directory))


def read_private(path: Path) -> bytes:
    """Read a file of a directory that only this user can enter, so that no other user can have written it.

    Raises OSError; PermissionError if the directory is not this user's, or others can enter it.
    """
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check(path.parent, os.fstat(directory))
        with open(os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory), "rb") as file:
            return file.read()
    finally:
        os.close(directory)


def _check(directory: Path, status: os.stat_result) -> None:
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(
            f"{directory} is not a directory that only this user can enter, so its files are not read: remove it, or "
            "set TMPDIR to a directory of your own"
        )
