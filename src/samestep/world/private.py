"""Directories of this user alone, in places such as /tmp where everybody may make one of any name."""

import os
import stat
from pathlib import Path


def make_private(directory: Path) -> None:
    """Makes a directory, or takes the one that is there, since /tmp may be tidied up while a run takes weeks.

    Raises:
        PermissionError: the one that is there is not this user's alone.
        OSError: it cannot be made.
    """
    try:
        directory.mkdir(0o700)
    except FileExistsError:
        _check(directory, os.lstat(directory))


def read_private(path: Path) -> bytes:
    """The bytes of a file in a directory of this user alone: nobody else can have put it there.

    Raises:
        PermissionError: the directory is not this user's alone.
        OSError: the file cannot be read.
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
            f"{directory} is not a directory that this user alone can enter, so nothing in it is used: remove it, or "
            "set TMPDIR to a directory of your own"
        )
