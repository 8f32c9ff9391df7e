"""A start with other data than the run's raises an error. One whose data cannot be compared does not."""

import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import samestep
from samestep.data.spec import DataSpec
from samestep.train.opening import compare_run, read_samples


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
