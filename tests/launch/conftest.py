from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Command


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """In an empty directory. Afterwards no process is left, and no temporary directory of samestep's."""
    made = Command(tmp_path / "here")
    made.directory.mkdir()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    made.variables["TMPDIR"] = str(temporary)
    yield made
    made.close()
