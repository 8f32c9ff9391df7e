"""Temporary directories of samestep's processes. Each start removes those that killed processes have left."""

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
            os.rename(self.path / "unlocked", self.path / lock_name)

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
