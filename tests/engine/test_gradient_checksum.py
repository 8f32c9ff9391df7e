"""The checksum of a gradient tells apart what a ledger must tell apart."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

from samestep.engine.gradient_checksum import LEAST_BYTES, NUM_COLUMNS, GradientChecksum

SUMS = GradientChecksum()
LARGE = LEAST_BYTES // 4 + 3  # float32 elements: more than one row, and an incomplete word


def checksum(*grads: Tensor | None) -> int:
    return int(SUMS.compute(grads))


def flip(grad: Tensor, place: int, bit: int) -> Tensor:
    """A copy with another bit."""
    words = grad.clone().flatten().view(torch.int32)
    words[place] ^= 1 << bit if bit < 31 else -(2**31)
    return words.view(torch.float32).view(grad.shape)


@pytest.mark.parametrize("size", [1, 2, 3, 50, 2 * NUM_COLUMNS + 1, LARGE])
def test_each_bit_counts(size: int) -> None:
    grad, other = torch.randn(size), torch.randn(5)
    wanted = checksum(other, grad)
    for place in {0, size // 2, size - 1}:
        assert all(checksum(other, flip(grad, place, bit)) != wanted for bit in (0, 7, 22, 31))


def test_two_signs_and_two_places() -> None:
    """A plain sum of words would not see these."""
    grad = torch.randn(64)
    wanted = checksum(grad)
    for one, other in combinations(range(0, 64, 7), 2):
        assert checksum(flip(flip(grad, one, 31), other, 31)) != wanted
        swapped = grad.clone()
        swapped[one], swapped[other] = grad[other], grad[one]
        assert checksum(swapped) != wanted


def test_order_of_parameters_and_what_has_no_gradient() -> None:
    small, large = torch.randn(8), torch.randn(2, LARGE)
    assert checksum(large[0].clone(), large[1].clone()) != checksum(large[1].clone(), large[0].clone())
    assert checksum(small, torch.ones(4)) != checksum(torch.ones(4), small)
    assert checksum(small, None) == checksum(small)
    assert checksum() == checksum(None) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_memory_does_not_count(dtype: torch.dtype) -> None:
    """Only the elements do: not their strides, nor where they are."""
    grad = torch.randn(96, 500).to(dtype)
    column = grad.t().contiguous().t()
    inside = torch.cat([torch.zeros(1, dtype=dtype), grad.flatten()])[1:].view(grad.shape)
    mixed = (torch.randn(3), grad, torch.randn(7))
    assert checksum(grad) == checksum(column) == checksum(inside)
    assert checksum(*mixed) == checksum(mixed[0], column, mixed[2])
    assert checksum(*mixed) != checksum(mixed[0], grad)
