"""The checksum of parts of a gradient detects the differences that the ledger must show."""

import pytest
import torch
from torch import Tensor

from samestep.engine.gradient_checksum import compute_checksum

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
SHAPES = [(), (5,), (40, 6), (300, 20), (2, 3, 4, 4), (7,), (1, 5000)]


def build_grads(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("num_params", [1, 3, 4, 7])
def test_each_row_is_read_in_some_step(num_params: int) -> None:
    """An element that differs changes the checksum of the steps that read its row."""
    grads = build_grads()[:num_params]
    expected = [compute_checksum(grads, step)() for step in range(1000)]
    for i, grad in enumerate(grads):
        changed = grad.clone().flatten()
        changed.view(torch.int32)[min(grad.numel(), 1024) // 2] ^= 1
        others = [*grads[:i], changed.view(grad.shape), *grads[i + 1 :]]
        assert any(compute_checksum(others, step)() != expected[step] for step in range(1000))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_strides(dtype: torch.dtype) -> None:
    grad = torch.randn(96, 500).to(dtype)
    column_major = grad.t().contiguous().t()
    assert compute_checksum([grad], 3)() == compute_checksum([column_major], 3)()
    assert compute_checksum([grad], 3)() != compute_checksum([grad + 1], 3)()


def test_it_is_that_of_the_values_at_the_call() -> None:
    grads = build_grads()
    read = compute_checksum(grads, 3)
    expected = compute_checksum(grads, 3)()
    for grad in grads:
        grad.zero_()
    assert read() == expected != compute_checksum(grads, 3)()
