"""`log_every` in steps, epochs and seconds."""

from pathlib import Path

import pytest
import torch
from support.runs import read_rows
from torch.utils.data import TensorDataset

import samestep


def train(run_dir: Path, log_every: int | str) -> None:
    run = samestep.Run(run_dir, batch_size=4, micro_batch_size=2, log_every=log_every)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model=model, optimizer=optimizer)
    for epoch in run.epochs(TensorDataset(torch.ones(10, 2)), 4):
        for step in epoch:
            for (x,) in step:
                step.backward(model(x).mean())
            optimizer.step()


@pytest.mark.parametrize(
    ("log_every", "steps"),
    [(5, [5, 10]), ("2epochs", [6, 12]), ("1epoch", [3, 6, 9, 12]), ("1h", [1])],
)
def test_rows_are_written_at_intervals(tmp_path: Path, log_every: int | str, steps: list[int]) -> None:
    """3 steps per epoch. By the clock, the first step has a row, and further ones after the interval."""
    samestep.spawn(train, 2, (tmp_path / "run", log_every))
    assert [row["step"] for row in read_rows(tmp_path / "run")] == steps
