from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Command, open_command


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    with open_command(tmp_path) as opened:
        yield opened
