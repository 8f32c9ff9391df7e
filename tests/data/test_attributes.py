"""Changes to a data set of which the workers have copies."""

import math
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Pairs, Tiny
from torch.utils.data import Subset

import samestep
from samestep.data.attributes import Attributes
from samestep.data.spec import DataSpec


class Epochs(Pairs):
    """A data set with methods that scripts call between two epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.scale, self.reads = 0, math.nan, [0]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.reads = [epoch]


def train(num_workers: int, run_dir: Path) -> None:
    tiny, data = Tiny(run_dir, log_every=100), Epochs()
    for epoch in tiny.run.epochs(data, 3, num_workers=num_workers):
        data.set_epoch(epoch.number)
        tiny.take(epoch)


def test_a_change_that_workers_do_not_see_is_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = "samestep: the data set's epoch has become 1, but is still 0 in the loader workers, which live as long as"
    for num_workers in (1, 0):
        samestep.spawn(train, 2, (num_workers, tmp_path / str(num_workers)))
        printed = " ".join(capfd.readouterr().out.split())
        assert printed.count("the data set's epoch") == num_workers, printed
        assert printed.count(said) == num_workers, printed


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(Subset(data, [0, 1]), [0])])
def test_only_plain_values_count(wrap: Any) -> None:
    data = Epochs()
    attributes = Attributes(DataSpec(wrap(data), num_workers=1))
    data.reads, data.x = [7], data.x + 1
    data.opened = 3  # type: ignore[attr-defined]  # what was not there before: a cache, as a rule
    assert attributes.find_change() is None
    data.scale = 2.0
    change = attributes.find_change()
    assert change is not None
    assert "scale has become 2.0, but is still nan in" in change
    assert attributes.find_change() is None
