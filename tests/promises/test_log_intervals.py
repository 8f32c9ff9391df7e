"""`log_every` in steps and epochs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import read_rows
from support.tiny import Pairs, tiny_run
from torch.optim import SGD

import samestep
from samestep.train.metrics import learning_rates
from samestep.train.objects import Objects


@pytest.mark.parametrize(
    ("log_every", "steps"),
    [(5, [5, 10]), ("2epochs", [6, 12]), ("1epoch", [3, 6, 9, 12])],
)
def test_rows_are_written_at_intervals(tmp_path: Path, log_every: int | str, steps: list[int]) -> None:
    """3 steps per epoch."""
    arguments = {"num_epochs": 4, "data": Pairs(10), "batch_size": 4, "log_every": log_every}
    samestep.spawn(tiny_run, 2, (tmp_path / "run",), arguments)
    assert [row["step"] for row in read_rows(tmp_path / "run")] == steps


def test_learning_rates_have_the_names_of_their_optimizers() -> None:
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    objects: dict[str, Any] = {"one": SGD([first], 0.5)}
    assert learning_rates(Objects(objects)) == {"train/learning_rate": 0.5}
    objects["other"] = SGD([second], 0.25)
    assert learning_rates(Objects(objects)) == {"train/learning_rate/one": 0.5, "train/learning_rate/other": 0.25}
