"""One writer per run: a lock that ends with its process, and a token that stops a writer that lost the lock."""

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from samestep.errors import RunDirectoryError
from samestep.files import copy_file, open_regular, read_bytes, replacing
from samestep.processes import Held, hold
from samestep.world.environment import advise, read_host

# The errors of flock on file systems without locks (some mounts of Lustre and NFS). The token still works there.
NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
TEXT_BYTES = 400


class Lock(Held):
    """The lock of a run's directory, held by this process until `forget`. The file names the process.

    flock excludes a second process on one machine, and on most network file systems. (A POSIX lock would be lost as
    soon as anything in this process reads and closes the file.) Some file systems have no such locks, or drop the locks
    of a machine that lost its connection. There, the file's text is a token: each process writes a new one, and `check`
    ends a process that finds a different one.

    Args:
        path: path of the lock file.
        named: the run's directory as the user gave it, for messages.

    Attributes:
        was_elsewhere: whether the previous holder was on another machine, and may still be running.

    Raises:
        RunDirectoryError: another process, or another run of this process, holds the lock.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, named: Path) -> None:
        self.path = path
        self._named = named
        self._descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_FLOCK:
                text = os.read(self._descriptor, TEXT_BYTES)
                os.close(self._descriptor)
                raise RunDirectoryError(
                    f"the run in {self._named} is locked by {_name_holder(text)}: stop it, or start beside it with "
                    f"{advise(fresh=True)}",
                    code="SS402",
                ) from None
        hold(self)
        before = os.read(self._descriptor, TEXT_BYTES)
        self.was_elsewhere = bool(before) and f" on {read_host()} since ".encode() not in before
        text = build_token().encode()
        self._text: bytes | None = None
        with suppress(OSError):  # a full disk
            os.pwrite(self._descriptor, text, 0)
            os.ftruncate(self._descriptor, len(text))
            self._text = text

    def check(self) -> None:
        """Check that this process is still the writer, before replacing anything in the directory.

        Raises:
            RunDirectoryError: another process has taken the run over.
        """
        try:
            text = read_bytes(self.path)  # opened anew, because network file systems cache what is open
        except OSError:
            return  # the directory was removed: there is nothing to protect
        if self._text is not None and text != self._text:
            raise explain_takeover(self._named, text)

    def forget(self) -> None:
        """Release the lock; in a forked child, which would hold it until it ends, only its copy."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def build_token() -> str:
    """Return a unique text whose first line names this process."""
    return f"process {os.getpid()} on {read_host()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n{uuid.uuid4().hex}\n"


def refuse_links(run_dir: Path, names: Sequence[str]) -> None:
    """Raise Error if one of these directories is a symbolic link: a run writes only in its directory."""
    for path in (run_dir / name for name in names):
        if path.is_symlink():
            raise RunDirectoryError(
                f"{path} is a symbolic link, and nothing is written through it: make {run_dir} itself the link, or "
                "name another run directory",
                code="SS401",
            )


def detach(path: Path) -> None:
    """Replace a file by a copy, so that a writer on another machine that still has it open appends to the old one."""
    if path.exists():
        with replacing(path, sync=True) as copy:
            copy_file(path, copy)


def explain_takeover(directory: object, token: bytes) -> RunDirectoryError:
    """Return the error for a writer of a directory or URL that finds the token of another process there."""
    return RunDirectoryError(
        f"the run in {directory} was taken over by {_name_holder(token)}: this process ends, and leaves the files as "
        "they are",
        code="SS402",
    )


def _name_holder(text: bytes) -> str:
    return text.decode(errors="replace").partition("\n")[0].strip() or "another process"
