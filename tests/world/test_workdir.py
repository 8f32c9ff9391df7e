"""Temporary directories: those of killed processes are removed, and no others."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from samestep.world.workdir import WorkDir


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def leave_one(place: Path) -> Path:
    """Create the directory of a process that was killed."""
    if (pid := os.fork()) == 0:
        _kept = WorkDir()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (left,) = place.glob("samestep-*")
    return left


def test_what_a_killed_process_leaves_is_removed_by_the_next(place: Path) -> None:
    left = leave_one(place)
    (left / "pymp").mkdir()
    with WorkDir("doctor-") as home:
        assert [*place.iterdir()] == [home.path]
        with WorkDir() as other:  # an owner that is alive
            assert {*place.iterdir()} == {home.path, other.path}
    assert [*place.iterdir()] == []


def test_other_directories_stay(place: Path) -> None:
    left = leave_one(place)
    os.rename(left, place / "elsewhere")
    left.symlink_to("elsewhere")
    shutil.copytree(place / "elsewhere", place / "samestep-other")
    lock = next((place / "samestep-other").iterdir())
    lock.unlink()
    lock.symlink_to(place / "elsewhere" / lock.name)
    os.mkdir(place / "samestep-unlocked")
    before = {*place.rglob("*")}
    WorkDir().close()
    assert {*place.rglob("*")} == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_directories_of_other_users_stay(place: Path) -> None:
    left = leave_one(place)
    os.chown(left, 12345, 12345)
    WorkDir().close()
    assert left.exists()
