"""One writer per run: a lock that ends with its process, however that dies."""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from samestep.errors import Error
from samestep.world.environment import read_host

_held: set[int] = set()  # descriptors


def _let_go() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


# Or a DataLoader worker would hold on to it for as long as it lives.
os.register_at_fork(after_in_child=_let_go)


class Lock:
    """The lock on a run's directory, held by this process until `release`. The file says by whom.

    (flock: a POSIX lock would be lost as soon as anything in this process reads and closes the file.)

    Attributes:
        is_new: the file was not there before.

    Raises:
        Error: another process holds it, or another run of this process.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            self.is_new = not path.exists()
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.read(self._descriptor, 200).decode(errors="replace").strip() or "another process"
                os.close(self._descriptor)
                raise Error(
                    f"the run in {path.parent} is alive, in {holder}: wait for it or stop it, or start with --fresh"
                ) from None
            if self._is_there():
                break
            os.close(self._descriptor)  # whoever held it has just removed it
        _held.add(self._descriptor)
        with suppress(OSError):  # a full disk
            os.ftruncate(self._descriptor, 0)
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            os.write(self._descriptor, f"process {os.getpid()} on {read_host()} since {now}\n".encode())

    def _is_there(self) -> bool:
        try:
            return os.fstat(self._descriptor).st_ino == self.path.stat().st_ino
        except FileNotFoundError:
            return False

    def release(self, *, remove: bool = False) -> None:
        """Gives it up, and removes the file if so told."""
        if remove:
            self.path.unlink(missing_ok=True)  # before others can take it
        _held.discard(self._descriptor)
        os.close(self._descriptor)
