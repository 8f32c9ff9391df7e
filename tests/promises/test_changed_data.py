"""A start with other data than the run's raises an error. One whose data cannot be compared does not."""

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import Tiny
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import samestep
from samestep.data.spec import DataSpec
from samestep.train.start import compare_run, read_samples


def train(run_dir: Path, num_epochs: int, seed: int | None, prepare: dict[str, Any], num_workers: int = 0) -> int:
    """As in many tutorials, the data are built first, from the generators' state then."""
    if seed is None:
        torch.seed()
    else:
        torch.manual_seed(seed)
    data = TensorDataset(torch.rand(16, 2))
    tiny = Tiny(run_dir, micro_batch_size=4, model=lambda: nn.Linear(2, 1), optimizer=None, objects=lambda t: prepare)
    loop = tiny.run.epochs(data, num_epochs, num_workers=num_workers)
    drawn = torch.rand(4).tolist()
    gathered = tiny.run._context.group.gather(drawn)
    assert gathered == [drawn] * tiny.run.world_size, "reading on one rank has not advanced its generators"
    for epoch in loop:
        tiny.take(epoch)
    return int(tiny.run.steps_done)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_random_data_from_before_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str], num_workers: int) -> None:
    arguments = ({}, num_workers)
    samestep.spawn(train, 1, (tmp_path, 1, None, *arguments))
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(samestep.Error, match=r"data set is not the one .* \(sample 0 differs\): build it, of "):
        samestep.spawn(train, 1, (tmp_path, 2, None, *arguments))
    with pytest.raises(samestep.Error, match=r"sample 0 .* differs between rank 0 and rank 1: build the same data set"):
        samestep.spawn(train, 2, (tmp_path, 2, None, *arguments))
    assert (tmp_path / "run.json").read_bytes() == before
    assert samestep.spawn(train, 2, (tmp_path, 2, 7, {"override": True}, num_workers)) == 4
    assert "changed since the run began: the data (" in capfd.readouterr().out
    assert samestep.spawn(train, 1, (tmp_path, 3, 7, *arguments)) == 6, "these are the run's data now"


class Samples(Dataset[Any]):
    """Data sets: some are the same in every start, and others cannot be compared."""

    def __init__(self, kind: str, start: int) -> None:
        self.kind, self.start, self.count, self.reads = kind, start, itertools.count(), list[int]()

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        x = torch.full((2,), float(index))
        values = {
            "other numbers": x + self.start,
            "other numbers in an array": np.ones(3) * self.start,
            "another middle": x + (self.start if index == 2 else 0),
            "augmented": x + torch.randn(2) + float(np.random.rand()),
            "a path": {"x": x, "path": f"/tmp/job-{self.start}/{index}"},
            "a count": x + next(self.count) + 100 * self.start,
            "the time": (x, time.time()),
            "bfloat16": (x + self.start).bfloat16(),
            "another dtype": torch.full((2,), index, dtype=torch.int32 if self.start else torch.int64),
            "an object": object(),
        }
        if self.kind == "unreadable":
            raise KeyError(index)
        return values[self.kind]


CHANGED = {"other numbers": 0, "other numbers in an array": 0, "another middle": 2, "bfloat16": 0, "another dtype": 0}
SAME = ["augmented", "a path", "a count", "the time", "an object", "unreadable"]


@pytest.mark.parametrize("kind", [*CHANGED, *SAME])
def test_what_counts_as_other_data(kind: str) -> None:
    machine = {"torch": "1"}

    def compare(start: int, record: dict[str, Any], machine: Any = machine, *, overrides: bool = False) -> list[str]:
        spec = DataSpec(Samples(kind, start), collate_fn=lambda samples: samples)
        hashes = read_samples(spec, 3)
        assert spec.dataset.reads == [0, 0, 2, 2, 4, 4]
        return compare_run(hashes, spec, record, machine, overrides=overrides)

    hashes = compare(0, {})
    record = {"machine": machine, "samples": hashes}
    assert compare(0, record) == hashes
    if kind in CHANGED:
        with pytest.raises(samestep.Error, match=rf"\(sample {CHANGED[kind]} differs\)"):
            compare(1, record)
        assert compare(1, record, overrides=True) == compare(1, record, {"torch": "2"}) != hashes
    else:
        assert compare(1, record) == hashes
