"""metrics.jsonl: rows are read as they were written, and truncation leaves the earlier rows unchanged."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.snapshot.append_log import AppendLog, format_row

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
ROWS = st.dictionaries(st.text(), SCALARS, max_size=4)


@contextmanager
def opened(path: Path) -> Iterator[AppendLog]:
    metrics = AppendLog(path, flush_s=1.0)
    try:
        yield metrics
    finally:
        metrics.close()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def expected(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(ROWS, max_size=8))
def test_rows_are_read_back_as_they_were(rows: list[dict[str, Any]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        with opened(path) as metrics:
            for row in rows:
                metrics.append(format_row(row))
        back = read(path)
        assert [list(row) for row in back] == [list(row) for row in rows]
        # repr distinguishes 0.0 from -0.0, and 1 from True and 1.0
        assert repr(back) == repr([{key: expected(value) for key, value in row.items()} for row in rows])


@settings(max_examples=30, deadline=None)
@given(before=st.lists(ROWS, max_size=5), lost=st.lists(ROWS, max_size=5), after=st.lists(ROWS, max_size=5))
def test_a_cut_run_writes_the_same_bytes_as_one_that_was_never_cut(before: Any, lost: Any, after: Any) -> None:
    with TemporaryDirectory() as folder:
        cut, whole = Path(folder) / "cut.jsonl", Path(folder) / "whole.jsonl"
        with opened(cut) as metrics:
            for row in before:
                metrics.append(format_row(row))
            offset = metrics.flush()
            assert offset == cut.stat().st_size
            for row in lost:
                metrics.append(format_row(row))
        with opened(cut) as metrics:
            assert metrics.cut(offset)
            for row in after:
                metrics.append(format_row(row))
        with opened(whole) as metrics:
            for row in [*before, *after]:
                metrics.append(format_row(row))
        assert cut.read_bytes() == whole.read_bytes()


def test_a_file_that_is_shorter_than_the_offset_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with opened(path) as metrics:
        metrics.append(format_row({"step": 1}))
        assert not metrics.cut(10_000)
        assert metrics.cut(metrics.flush())
    assert read(path) == [{"step": 1}]


def test_tensors_and_numpy_become_numbers_and_the_rest_text(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    row = {
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
    with opened(path) as metrics:
        metrics.append(format_row(row))  # type: ignore[arg-type]
    assert read(path) == [
        {
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
    ]
