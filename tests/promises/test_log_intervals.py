"""`log_every` in steps, epochs and seconds."""

from pathlib import Path

import pytest
from support.runs import read_rows
from support.tiny import Pairs, tiny_run

import samestep


@pytest.mark.parametrize(
    ("log_every", "steps"),
    [(5, [5, 10]), ("2epochs", [6, 12]), ("1epoch", [3, 6, 9, 12]), ("1h", [1])],
)
def test_rows_are_written_at_intervals(tmp_path: Path, log_every: int | str, steps: list[int]) -> None:
    """3 steps per epoch. By the clock, the first step has a row, and the next row comes after the interval."""
    arguments = {"num_epochs": 4, "data": Pairs(10), "batch_size": 4, "log_every": log_every}
    samestep.spawn(tiny_run, 2, (tmp_path / "run",), arguments)
    assert [row["step"] for row in read_rows(tmp_path / "run")] == steps
