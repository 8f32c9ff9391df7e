"""What is accepted as a data set, and what is refused with one sentence."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from samestep.data.spec import read_data_arguments
from samestep.errors import Error

NUMBERS = TensorDataset(torch.arange(10))


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return itertools.repeat(torch.zeros(3))


class OwnLoader(DataLoader[Tensor]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([])


def collate(samples: list[object]) -> list[object]:
    return samples


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_data_loader_is_understood(shuffle: bool) -> None:
    loader = DataLoader(
        NUMBERS,
        batch_size=4,
        shuffle=shuffle,
        num_workers=2,
        prefetch_factor=3,
        drop_last=True,
        timeout=9,
        collate_fn=collate,
    )
    spec = read_data_arguments(loader, sizes=(4, 8))
    assert spec.dataset is NUMBERS
    assert spec.collate_fn is collate
    assert (spec.shuffle, spec.drop_last) == (shuffle, True)
    assert (spec.num_workers, spec.prefetch_factor, spec.timeout_s) == (2, 3, 9)
    assert spec.micro_batch_size == 4


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (DataLoader(NUMBERS, sampler=DistributedSampler(NUMBERS, 2, 0)), "own sampler, a DistributedSampler, but"),
        (DataLoader(NUMBERS, sampler=WeightedRandomSampler([1.0] * 10, 10)), "WeightedRandomSampler.*sampler=f"),
        (DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS, replacement=True)), "own sampler, a RandomSampler"),
        (DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS, num_samples=5)), "own sampler, a RandomSampler"),
        (DataLoader(NUMBERS, sampler=[3, 1, 2]), "own sampler, a list"),
        (DataLoader(NUMBERS, batch_size=None), "batch_size=None"),
        (DataLoader(NUMBERS, batch_sampler=[[1, 2], [3]]), "batch_sampler"),
        (DataLoader(Endless()), "Endless is a stream without indexing"),
        (OwnLoader(NUMBERS), "its own iteration"),
    ],
)
def test_data_loaders_that_a_run_cannot_honour(loader: DataLoader[Tensor], said: str) -> None:
    with pytest.raises(Error, match=said):
        read_data_arguments(loader)
