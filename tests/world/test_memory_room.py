"""The memory that a process can allocate, by the limits of its control group."""

from pathlib import Path

import pytest

from samestep.world.memory_room import read_memory_room


@pytest.mark.parametrize(
    ("files", "room_bytes"),
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": "5"}, None),
        ({"pod/memory.max": "4096", "pod/memory.current": "1024"}, 3072),
        ({"memory/memory.limit_in_bytes": "4096", "memory/memory.usage_in_bytes": "4097"}, 0),
    ],
)
def test_control_groups(tmp_path: Path, files: dict[str, str], room_bytes: int | None) -> None:
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text + "\n")
    own = tmp_path / "own"
    own.write_text("0::/pod/task\n")
    room = read_memory_room(tmp_path / "groups", own)
    assert room == room_bytes if room_bytes is not None else room > 1 << 20
