"""Temporary directories that only this user can enter, in places such as /tmp where every user can create names."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "samestep-"


def create_workdir(name: str = "") -> Path:
    """Create a temporary directory, with `name` in its name."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}"))


@contextmanager
def open_workdir(name: str = "") -> Iterator[Path]:
    """Create a temporary directory, and remove it at the end of the `with` block."""
    path = create_workdir(name)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


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
