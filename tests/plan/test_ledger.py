"""The ledger's file."""

import math
from pathlib import Path

import pytest

from samestep.plan.ledger import RECORD, UNKNOWN, Entry, count_records, read_records, to_bits, to_float


def build_entries(num_steps: int) -> list[Entry]:
    return [Entry(step, step // 3, 8, 11 * step + 2, to_bits(0.5), 7) for step in range(num_steps)]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 6, 100])
def test_records_are_read(tmp_path: Path, num_steps: int) -> None:
    entries, path = build_entries(num_steps), tmp_path / "ledger.bin"
    path.write_bytes(b"".join(entry.pack() for entry in entries) + b"half")
    assert count_records(path) == num_steps
    assert [*read_records(path)] == entries
    assert [*read_records(path, first=num_steps // 2)] == entries[num_steps // 2 :]
    assert all(entry.has_bits for entry in entries)


@pytest.mark.parametrize("missing", [range(1, 4), range(5)])
def test_a_file_with_holes(tmp_path: Path, missing: range) -> None:
    """A resumed run fills a truncated file with zeros."""
    content = bytearray(b"".join(entry.pack() for entry in build_entries(7)))
    content[missing.start * RECORD.size : missing.stop * RECORD.size] = bytes(len(missing) * RECORD.size)
    (tmp_path / "ledger.bin").write_bytes(content)
    found = [*read_records(tmp_path / "ledger.bin")]
    assert [entry.num_samples for entry in found] == [0 if step in missing else 8 for step in range(7)]
    assert not any(found[step].has_bits for step in missing)


def test_bits_of_a_loss() -> None:
    assert to_bits(-0.0) != to_bits(0.0)
    assert to_float(to_bits(0.1)) == 0.1
    assert to_bits(math.nan) != UNKNOWN
    assert math.isnan(to_float(UNKNOWN))
