"""Directories that another user of this machine has created first."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from samestep.errors import Error
from samestep.launch.local_ranks import Ranks
from samestep.launch.spawn import _read_value
from samestep.world.workdir import make_private, read_private

NOBODY = 65534


def make_open(path: Path, elsewhere: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def make_foreign(path: Path, elsewhere: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be two users")
    path.mkdir(0o700)
    os.chown(path, NOBODY, NOBODY)


def make_link(path: Path, elsewhere: Path) -> None:
    elsewhere.mkdir(0o700)
    path.symlink_to(elsewhere)


class Planted:
    """Runs code when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("plant", [make_open, make_foreign, make_link])
def test_a_directory_that_others_have_made_is_not_used(tmp_path: Path, plant: Callable[[Path, Path], None]) -> None:
    ranks = Ranks(None)  # type: ignore[arg-type]
    ranks.close()  # as after a cleanup of /tmp
    ranks.directory = tmp_path / "launch"
    plant(ranks.directory, tmp_path / "elsewhere")
    (ranks.directory / "value.pickle").write_bytes(pickle.dumps(Planted(tmp_path / "trace")))
    for use in (lambda: ranks.start(None, []), lambda: _read_value(ranks.directory)):  # type: ignore[arg-type]
        with pytest.raises((Error, OSError)):
            use()
    assert not (tmp_path / "trace").exists()


def test_a_private_directory_is_created_and_reused(tmp_path: Path) -> None:
    for _ in range(2):
        make_private(tmp_path / "launch")
    assert (tmp_path / "launch").stat().st_mode & 0o777 == 0o700
    (tmp_path / "launch" / "file").write_bytes(b"x")
    assert read_private(tmp_path / "launch" / "file") == b"x"
    (tmp_path / "launch" / "link").symlink_to(tmp_path / "launch" / "file")
    with pytest.raises(OSError, match="link"):
        read_private(tmp_path / "launch" / "link")
