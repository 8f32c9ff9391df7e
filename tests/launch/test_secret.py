"""The secret of the nodes: where it comes from, and who can read it."""

import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from samestep.errors import Error
from samestep.launch.nodes import parse_nodes
from samestep.launch.secret import read_secret, share_secret

SECRET = "a secret of this run's nodes"


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (SECRET, 0o600, None),
        (SECRET, 0o640, "can be read by other users: chmod 600"),
        ("short", 0o600, "has 5 characters: use at least 16"),
        ("", 0o600, "has 0 characters"),
        (None, 0, r"cannot be read \(No such file"),
    ],
)
def test_files_with_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, mode: int, said: str | None
) -> None:
    monkeypatch.setenv("SAMESTEP_RDZV_SECRET", "another secret, which counts less")
    file = tmp_path / "secret"
    if text is not None:
        file.write_text(f"{text}\n")
        os.chmod(file, mode)
    if said is None:
        assert read_secret(str(file)) == SECRET
    else:
        with pytest.raises(Error, match=f"--rdzv-secret .*{said}"):
            read_secret(str(file))


@pytest.fixture
def shared_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files that all users share, as /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def as_another_user(run: Callable[[], str]) -> str:
    """Call a function as user 65534, and return its result, or the message of its Error."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be two users")
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "failed"
        with suppress(BaseException):
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            try:
                text = run()
            except (Error, OSError) as error:
                text = f"{type(error).__name__}: {error}"
        os.write(writes, text.encode())
        os._exit(0)
    os.close(writes)
    with open(reads) as answers:
        text = answers.read()
    os.waitpid(pid, 0)
    return text


def test_another_user_of_this_machine_does_not_know_the_secret_of_a_loopback_endpoint(shared_tmp: Path) -> None:
    """Without a secret of the environment, this user's launchers share one that no other user can read."""
    nodes = parse_nodes("2", 0, "127.0.0.1:1", 60.0)
    assert nodes is not None

    def find() -> str:
        other = parse_nodes("2", 1, "127.0.0.1:1", 60.0)
        assert other is not None
        return other.secret

    assert as_another_user(find) not in (nodes.secret, "failed")
    [file] = shared_tmp.glob(f".samestep-{os.geteuid()}/*")
    assert "Permission denied" in as_another_user(file.read_text)
    assert find() == nodes.secret


def test_a_planted_secret_is_not_used(shared_tmp: Path) -> None:
    planted = shared_tmp / f".samestep-{os.geteuid()}"

    def plant() -> str:
        planted.mkdir(0o777)
        (planted / "secret").write_text(SECRET)
        return "planted"

    assert as_another_user(plant) == "planted"
    with pytest.raises(Error, match=r"cannot be made .*not a directory that only this user can enter.*SAMESTEP_RDZV"):
        share_secret()


def test_launchers_of_one_user_share_a_secret(shared_tmp: Path) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(share_secret())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    (file,) = shared_tmp.glob("*/*")
    assert (file.name, stat.S_IMODE(file.stat().st_mode)) == ("secret", 0o600)


def test_a_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_RDZV_SECRET", f" {SECRET}\n")
    assert read_secret(None) == SECRET
    assert read_secret(None) == "", "it is taken once"
    monkeypatch.setenv("SAMESTEP_RDZV_SECRET", "abc")
    with pytest.raises(Error, match="SAMESTEP_RDZV_SECRET has 3 characters"):
        read_secret(None)
