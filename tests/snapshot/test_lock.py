"""The lock of a run's directory; tests/promises/test_restarts.py and test_bad_input.py hold it in real runs."""

import fcntl
import time
from pathlib import Path

import pytest

from samestep.errors import RunDirectoryError
from samestep.snapshot.lock import Lock, build_token


def test_the_holder_has_not_written_its_name_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that starts at the same moment waits for it, so that the error names the holder."""
    path = tmp_path / "lock"
    token = build_token()
    with path.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(time, "sleep", lambda _: path.write_text(token))
        with pytest.raises(RunDirectoryError) as caught:
            Lock(path, tmp_path)
    assert f"is locked by {token.splitlines()[0]}: stop it" in str(caught.value)


def test_the_holder_releases_the_lock_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the process that waits gets it."""
    path = tmp_path / "lock"
    with path.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(held, fcntl.LOCK_UN))
        lock = Lock(path, tmp_path)
    lock.check()
    lock.release()
