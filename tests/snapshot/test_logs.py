"""The logs are read as they were written, and completed by a rank that takes the writer's place."""

import json
import math
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import NotHealed, UsageError
from samestep.plan.ledger import RECORD, Entry, to_bits
from samestep.snapshot import logs
from samestep.snapshot.logs import (
    MAX_KEPT,
    NUM_READ,
    AppendLog,
    KeptLogs,
    count_records,
    format_row,
    read_records,
)
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.run_record import ResumePoint, StartOptions

VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
ROW = st.dictionaries(st.text(), VALUES, max_size=4)


@given(row=ROW)
def test_a_row_is_read_back_as_it_was(row: dict[str, Any]) -> None:
    line = format_row(row)
    assert line.splitlines(keepends=True) == [line]
    is_number = {key: not isinstance(value, float) or math.isfinite(value) for key, value in row.items()}
    # repr distinguishes 0.0 from -0.0, and 1 from True and 1.0, and shows the order
    assert repr(json.loads(line)) == repr({key: row[key] if is_number[key] else str(row[key]) for key in row})


def test_a_file_that_is_shorter_than_the_offset_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = AppendLog(path, pytest.fail, flush_s=1.0)
    metrics.append(LINES[0])
    assert not metrics.cut(10_000)
    assert metrics.cut(metrics.flush())
    metrics.close()
    assert path.read_bytes() == LINES[0]


def test_tensors_and_numpy_become_numbers_and_the_rest_text() -> None:
    row: dict[Any, Any] = {
        "tensor": torch.tensor([0.1], requires_grad=True),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "nan": torch.tensor(float("nan")),
        "float32": np.float32(0.1),
        "float64": np.float64(0.1),
        "int64": np.int64(7),
        "bool": np.bool_(True),
        "minus": -math.inf,
        "complex": np.complex64(1j),
        "many": torch.tensor([1, 2]),
        "fraction": Fraction(1, 3),
        3: "key",
    }
    assert json.loads(format_row(row)) == {
        "tensor": float(np.float32(0.1)),
        "half": 0.5,
        "nan": "nan",
        "float32": float(np.float32(0.1)),
        "float64": 0.1,
        "int64": 7,
        "bool": True,
        "minus": "-inf",
        "complex": "1j",
        "many": "tensor([1, 2])",
        "fraction": "1/3",
        "3": "key",
    }


# --- the ledger ----------------------------------------------------------------------------------------------------


def write(path: Path, num_steps: int) -> list[Entry]:
    entries = [Entry(step, step // 3, 8, 11 * step + 2, to_bits(0.5), 7) for step in range(num_steps)]
    path.write_bytes(b"".join(RECORD.pack(*entry) for entry in entries))
    return entries


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, NUM_READ + 1])
def test_records_are_read_from_any_on(tmp_path: Path, num_steps: int) -> None:
    path = tmp_path / "ledger.bin"
    assert count_records(path) == len([*read_records(path)]) == 0
    entries = write(path, num_steps)
    with open(path, "ab") as file:
        file.write(bytes(RECORD.size - 1))
    assert count_records(path) == num_steps
    assert [*read_records(path)] == entries
    assert [*read_records(path, first=num_steps // 2)] == entries[num_steps // 2 :]
    assert [*read_records(path, first=num_steps + 1)] == []


# --- a rank that takes the writer's place ---------------------------------------------------------------------------


def test_steps_are_recorded_together_and_none_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(logs, "monotonic", lambda: now_s)
    directory = RunDirectory(tmp_path / "run", warn=pytest.fail)
    directory.begin(ResumePoint(), StartOptions({}))
    num_recorded = []
    for step, at_s in enumerate([0.0, 0.05, 0.2]):
        now_s = at_s
        directory.enter(partial(Entry, step, 0, 8, step))
        num_recorded.append(count_records(directory.path / "ledger.bin"))
    assert num_recorded == [0, 0, 2]
    directory.close()
    assert [each.step for each in read_records(directory.path / "ledger.bin")] == [0, 1, 2]
    with pytest.raises(UsageError, match="was ended by a later"):
        directory.enter(partial(Entry, 3, 0, 8, 3))


ROWS = [
    {"step": step, name: step / 3}
    for step in (1, 2, 3, 4)
    for name in (["train/loss"] if step % 2 else ["train/loss", "validation/loss", "validation/accuracy"])
]
LINES = [format_row(row) for row in ROWS]
RECORDS = [RECORD.pack(*Entry(step, 0, 8, step, 2 * step, 3 * step)) for step in range(4)]


def keep(num_rows: int = len(ROWS), num_steps: int = 4, first_step: int = 0) -> KeptLogs:
    kept = KeptLogs()
    for row in ROWS[:num_rows]:
        kept.write_row(row)
    for step in range(first_step, num_steps):
        kept.enter(lambda step=step: Entry(step, 0, 8, step, 2 * step, 3 * step))
    return kept


def complete(kept: KeptLogs, directory: Path, metrics: bytes, ledger: bytes, steps_done: int) -> tuple[bytes, bytes]:
    rows_path, ledger_path = directory / "metrics.jsonl", directory / "ledger.bin"
    rows_path.write_bytes(metrics)
    ledger_path.write_bytes(ledger)
    logs = (
        AppendLog(rows_path, pytest.fail, flush_s=1),
        AppendLog(ledger_path, pytest.fail, flush_s=1, record_bytes=RECORD.size),
    )
    kept.complete(*logs, steps_done)
    for log in logs:
        log.append(b"more\n")
        log.close()
    return rows_path.read_bytes().removesuffix(b"more\n"), ledger_path.read_bytes().removesuffix(b"more\n")


@settings(max_examples=200, deadline=None)
@given(
    num_written=st.integers(0, sum(map(len, LINES))),
    num_recorded=st.integers(0, 4 * RECORD.size),
    num_kept=st.integers(4, len(ROWS)),
)
def test_files_are_completed_or_cut(num_written: int, num_recorded: int, num_kept: int, tmp_path_factory: Any) -> None:
    """Whatever part of the rows and records they have. What this rank has not reached, it writes later, once."""
    steps_done = int(ROWS[num_kept - 1]["step"])
    rows, records = b"".join(LINES)[:num_written], b"".join(RECORDS)[:num_recorded]
    found = complete(keep(num_kept, steps_done), tmp_path_factory.getbasetemp(), rows, records, steps_done)
    assert found == (b"".join(LINES[:num_kept]), b"".join(RECORDS[:steps_done]))


def test_only_the_end_of_many_rows_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # All rows of the last step, and a part of one before them.
    monkeypatch.setattr(logs, "MAX_READ_BYTES", len(b"".join(LINES[-6:])) + 9)
    many = b"".join(LINES)
    assert complete(keep(), tmp_path, many + b'{"st', b"".join(RECORDS), 4)[0] == many


def test_a_gap_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotHealed, match="the ledger lacks steps"):
        complete(keep(first_step=2), tmp_path, b"", RECORDS[0], 4)
    kept = KeptLogs()
    for k in range(MAX_KEPT + 10):
        kept.write_row({"step": 0, "k": k})
    with pytest.raises(NotHealed, match="the metrics lack rows"):
        complete(kept, tmp_path, format_row({"step": 0, "k": 0}), b"", 0)
