"""The lock of a run's directory; tests/promises/test_restarts.py and test_bad_input.py hold it in real runs."""

import fcntl
from pathlib import Path

import pytest

from samestep.errors import RunDirectoryError
from samestep.snapshot.lock import Lock


def test_the_holder_has_not_written_its_name(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RunDirectoryError, match="is locked by another process: stop it"):
            Lock(path, tmp_path)
    lock = Lock(path, tmp_path)
    lock.check()
    lock.release()
