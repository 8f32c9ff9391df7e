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
    default_collate,
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


def test_a_plain_data_set_is_shuffled_and_collated_as_a_data_loader_would() -> None:
    spec = read_data_arguments(NUMBERS)
    assert spec.dataset is NUMBERS
    assert len(spec) == 10
    assert spec.collate_fn is default_collate
    assert (spec.shuffle, spec.drop_last, spec.num_workers, spec.micro_batch_size) == (
        True,
        False,
        0,
        None,
    )
    assert len(read_data_arguments([1, 2, 3])) == 3


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


def test_arguments_win_over_the_data_loaders_own() -> None:
    loader = DataLoader(NUMBERS, batch_size=4, shuffle=True, num_workers=2, drop_last=True)
    spec = read_data_arguments(loader, shuffle=False, num_workers=0, drop_last=False, collate_fn=collate)
    assert (spec.shuffle, spec.num_workers, spec.drop_last) == (False, 0, False)
    assert spec.collate_fn is collate


def test_another_batch_size_is_refused() -> None:
    with pytest.raises(Error, match="batch_size is 4, and the run's is 16, in micro-batches of 8"):
        read_data_arguments(DataLoader(NUMBERS, batch_size=4), sizes=(8, 16))
    assert read_data_arguments(DataLoader(NUMBERS, batch_size=4), sizes=(2, 4)).micro_batch_size == 4
    assert read_data_arguments(DataLoader(NUMBERS, batch_size=4)).micro_batch_size == 4


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
