from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from processes import Command


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """A command in an empty directory. Kills all its processes at the end."""
    command = Command(tmp_path / "here")
    command.directory.mkdir()
    # Not in pytest's directory: data loaders open sockets here, and the path of a socket is limited to 107 bytes.
    with TemporaryDirectory(prefix="t-", dir="/tmp") as temporary:
        command.variables["TMPDIR"] = temporary
        try:
            yield command
        finally:
            command.close()
