"""The directory that the runs of a verification are in."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from samestep.world.environment import read_host

PREFIX = "samestep-verify-"


@contextmanager
def make_home() -> Iterator[tuple[Path, tuple[int, ...]]]:
    """A temporary directory for as long as the block lasts, and its lock, for what is started there to inherit.

    Directories whose lock nobody holds any more are removed: they are of verifications that were killed.
    """
    name = f"lock-{read_host()}"  # other machines may not see who holds it
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{name}"):
        with suppress(OSError), open(lock, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    home = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with open(home / "unlocked", "w") as file:
            with suppress(OSError):  # a file system that has no locks
                fcntl.flock(file, fcntl.LOCK_EX)
                os.rename(home / "unlocked", home / name)  # only now, or it could be found before it is held
            yield home, (file.fileno(),)
    finally:
        shutil.rmtree(home, ignore_errors=True)
