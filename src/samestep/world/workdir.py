"""Temporary directories of samestep's processes. What a killed process leaves is removed by the next one's start."""

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


class Home:
    """A temporary directory, made after those whose owners are gone were removed. A `with` block removes it.

    Attributes:
        path: the directory.
        lock: an open file. The owners are the processes that hold it, so children may be given it, too. The kernel
            frees it when the last of them ends, however it ends: no process number can be mistaken for another's.
    """

    def __init__(self, name: str = "") -> None:
        lock_name = f"lock-{read_host()}"  # other machines may share the directory, and do not see who holds a lock
        for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{lock_name}"):
            with suppress(OSError):
                _remove_if_left(lock)
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}"))
        self.lock = open(self.path / "unlocked", "wb", opener=open_regular)  # noqa: SIM115
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            os.rename(self.path / "unlocked", self.path / lock_name)  # only now, or it could be found before it is held

    def __enter__(self) -> "Home":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the directory. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.lock.close()


def _remove_if_left(lock: Path) -> None:
    """Removes the directory of a lock that nobody holds, where it is this user's own. Follows no link."""
    status = os.lstat(lock.parent)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    file = open_regular(lock, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent, ignore_errors=True)
    finally:
        os.close(file)
