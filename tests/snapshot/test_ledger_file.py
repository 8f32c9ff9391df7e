"""The ledger's file is read from any record on, with holes and with a last record that is cut short."""

from pathlib import Path

import pytest

from samestep.plan.ledger import RECORD, Entry, to_bits
from samestep.snapshot.ledger_file import NUM_READ, count_records, read_records


def write(path: Path, num_steps: int) -> list[Entry]:
    entries = [Entry(step, step // 3, 8, 11 * step + 2, to_bits(0.5), 7) for step in range(num_steps)]
    path.write_bytes(b"".join(entry.pack() for entry in entries))
    return entries


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, NUM_READ + 1])
def test_records_are_read_from_any_on(tmp_path: Path, num_steps: int) -> None:
    path = tmp_path / "ledger.bin"
    entries = write(path, num_steps)
    with open(path, "ab") as file:
        file.write(bytes(RECORD.size - 1))
    assert count_records(path) == num_steps
    assert [*read_records(path)] == entries
    assert [*read_records(path, first=num_steps // 2)] == entries[num_steps // 2 :]
    assert [*read_records(path, first=num_steps + 1)] == []


def test_a_run_without_a_ledger(tmp_path: Path) -> None:
    assert count_records(tmp_path / "ledger.bin") == 0
    assert [*read_records(tmp_path / "ledger.bin")] == []


@pytest.mark.parametrize("missing", [range(1, 4), range(5)])
def test_a_file_with_holes(tmp_path: Path, missing: range) -> None:
    """A resumed run fills a truncated file with zeros."""
    path = tmp_path / "ledger.bin"
    write(path, 7)
    content = bytearray(path.read_bytes())
    content[missing.start * RECORD.size : missing.stop * RECORD.size] = bytes(len(missing) * RECORD.size)
    path.write_bytes(content)
    found = [*read_records(path)]
    assert [entry.num_samples for entry in found] == [0 if step in missing else 8 for step in range(7)]
    assert not any(found[step].has_bits for step in missing)
