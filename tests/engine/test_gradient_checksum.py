"""The checksum of parts of a gradient detects the differences that the ledger must show."""

import pytest
import torch
from torch import Tensor

from samestep.engine.gradient_checksum import NUM_PIECES, PIECE_BYTES, GradientChecksum, choose_windows


def checksum(*grads: Tensor, step: int = 0) -> int:
    return GradientChecksum(grads).compute(grads, step)()


def flip(grad: Tensor, place: int) -> Tensor:
    """Return a copy with one lowest bit flipped."""
    words = grad.clone().flatten().view(torch.int32)
    words[place] ^= 1
    return words.view(torch.float32).view(grad.shape)


def test_small_gradients_are_read_whole() -> None:
    grads = [torch.randn(3), torch.randn(40, 60), torch.randn(1)]
    wanted = checksum(*grads)
    for i, grad in enumerate(grads):
        for place in range(0, grad.numel(), 7):
            assert checksum(*grads[:i], flip(grad, place), *grads[i + 1 :], step=5) != wanted
    assert checksum(grads[1], grads[0], grads[2]) != wanted
    grads[1][0, 0] = 0.0
    zero = checksum(*grads)
    grads[1][0, 0] = -0.0
    assert checksum(*grads) != zero


@pytest.mark.parametrize("sizes", [(5000,), (1, 20_000, 3), (7,) * 300, (100, 7_001, 3, 40_001, 12)])
def test_a_step_reads_a_few_pieces_and_many_steps_read_all(sizes: tuple[int, ...]) -> None:
    """The windows are spread over the gradient. A changed element is detected in exactly the steps that read it."""
    grads = [torch.randn(size) for size in sizes]
    num_bytes, num_seen = 4 * sum(sizes), 0
    for i in {0, len(sizes) // 2, len(sizes) - 1}:
        place = sizes[i] // 2
        changed = [*grads[:i], flip(grads[i], place), *grads[i + 1 :]]
        at = 4 * (sum(sizes[:i]) + place)
        for step in range(300):
            windows = choose_windows(num_bytes, step)
            assert sum(stop - start for start, stop in windows) <= NUM_PIECES * PIECE_BYTES
            is_read = any(start - 4 < at < stop for start, stop in windows)
            if num_seen < 3 and (is_read or step < 10):
                assert (checksum(*changed, step=step) != checksum(*grads, step=step)) == is_read
            num_seen += is_read
    assert num_seen > 0
    read = torch.zeros(num_bytes, dtype=torch.bool)
    for step in range(300):
        for start, stop in choose_windows(num_bytes, step):
            assert 0 <= start < stop <= num_bytes
            read[start:stop] = True
    assert read.float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_dtypes_and_strides(dtype: torch.dtype) -> None:
    """Memory is read in its own order, so a transposed matrix has the same checksum."""
    grad = torch.randn(96, 500).to(dtype)
    assert checksum(grad, step=3) == checksum(grad.clone(), step=3) == checksum(grad.t(), step=3)
    assert checksum(grad, step=3) != checksum(grad.t().contiguous(), step=3)
    assert checksum(torch.ones((), dtype=dtype)) != checksum(torch.zeros((), dtype=dtype))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_parts_of_ranks_have_the_checksum_of_the_whole(num_ranks: int, dtype: torch.dtype) -> None:
    """An absent gradient counts as zeros, also if a window begins inside of it."""
    grads = [torch.randn(size).to(dtype) for size in (5, 7_001, 1, 20_000, 9_000)]
    grads[2].zero_()
    of_whole = GradientChecksum(grads)
    for step in range(20):
        read = of_whole.compute([*grads[:2], None, *grads[3:]], step)
        parts = [
            of_whole.compute([grad if i % num_ranks == rank else None for i, grad in enumerate(grads)], step)()
            for rank in range(num_ranks)
        ]
        assert of_whole.combine(parts, step) == read() == checksum(*grads, step=step)
