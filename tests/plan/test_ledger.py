"""The ledger's file, in the format of this version and of the previous one."""

import math
import struct
from pathlib import Path

import pytest

from samestep.plan.ledger import RECORD, UNKNOWN, Entry, count_records, read_records, to_bits, to_float, upgrade

OLD = struct.Struct("<QIIQ")


def write(path: Path, entries: list[Entry], *, is_old: bool) -> Path:
    path.write_bytes(b"".join(OLD.pack(*entry[:4]) if is_old else entry.pack() for entry in entries))
    return path


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 6, 100])
@pytest.mark.parametrize("is_old", [True, False])
def test_both_formats_are_read_and_the_old_one_is_converted(tmp_path: Path, num_steps: int, is_old: bool) -> None:
    bits = (UNKNOWN, UNKNOWN) if is_old else (to_bits(0.5), 7)
    entries = [Entry(step, step // 3, 8, 11 * step + 2, *bits) for step in range(num_steps)]
    path = write(tmp_path / "ledger.bin", entries, is_old=is_old)
    assert count_records(path) == num_steps
    assert [*read_records(path)] == entries
    assert [*read_records(path, first=num_steps // 2)] == entries[num_steps // 2 :]
    for _ in range(2):  # a second conversion changes nothing
        upgrade(path)
        assert path.stat().st_size == num_steps * RECORD.size
        assert [*read_records(path)] == entries
    assert [entry.has_bits for entry in entries] == [not is_old] * num_steps
    assert [each.name for each in tmp_path.iterdir()] == ["ledger.bin"]


@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize("missing", [range(1, 4), range(5)])
def test_a_file_with_holes(tmp_path: Path, is_old: bool, missing: range) -> None:
    """A resumed run fills a truncated file with zeros."""
    entries = [Entry(step, 0, 8, step + 9, *((UNKNOWN, UNKNOWN) if is_old else (to_bits(0.5), 7))) for step in range(7)]
    path = write(tmp_path / "ledger.bin", entries, is_old=is_old)
    size = OLD.size if is_old else RECORD.size
    content = bytearray(path.read_bytes())
    content[missing.start * size : missing.stop * size] = bytes(len(missing) * size)
    path.write_bytes(content)
    found = [*read_records(path)]
    assert [entry.num_samples for entry in found] == [0 if step in missing else 8 for step in range(7)]
    assert not any(found[step].has_bits for step in missing)


def test_bits_of_a_loss() -> None:
    assert to_bits(-0.0) != to_bits(0.0)
    assert to_float(to_bits(0.1)) == 0.1
    assert to_bits(math.nan) != UNKNOWN
    assert math.isnan(to_float(UNKNOWN))
