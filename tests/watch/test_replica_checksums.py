"""Checksums of tensors, and messages about ranks that differ."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.watch.replica_checksums import Drift, checksum, combine, find_drift

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_one_flipped_bit_is_seen(dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    flipped = tensor.clone()
    memory = flipped.view(torch.uint8).flatten()
    bits = 1 if dtype == torch.bool else 8
    position, bit = data.draw(st.integers(0, len(memory) - 1)), data.draw(st.integers(0, bits - 1))
    memory[position] ^= 1 << bit
    assert checksum(flipped) != checksum(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_layout_in_memory_does_not_matter(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 4).to(dtype)
    padded = torch.zeros(6, 9, dtype=dtype)
    padded[:, 1:5] = tensor
    assert checksum(padded[:, 1:5]) == checksum(tensor) == checksum(tensor.t().contiguous().t())
    assert checksum(padded.view(-1)[1:5]) == checksum(tensor[0])


def test_names_count_and_their_order_does_not() -> None:
    assert combine({"a": 1, "b": 2}) == combine({"b": 2, "a": 1}) < 2**63
    assert len({combine(each) for each in ({"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 1}, {"a": 1, "c": 2})}) == 4


ALIKE = {"w": 1, "b": 2, "m": 3}


@pytest.mark.parametrize(
    ("replicas", "drift"),
    [
        ([ALIKE, ALIKE, ALIKE], None),
        ([ALIKE, ALIKE, ALIKE | {"b": 9}], Drift("b", 1, (2,), True)),
        ([ALIKE | {"w": 9, "m": 9}, ALIKE, ALIKE], Drift("w", 2, (0,), True)),
        ([ALIKE | {"w": 7}, ALIKE | {"m": 8}, ALIKE, ALIKE, ALIKE], Drift("w", 2, (0, 1), True)),
        ([ALIKE, ALIKE | {"m": 9}], Drift("m", 1, (0, 1), False)),
        ([ALIKE, ALIKE, ALIKE | {"m": 9}, ALIKE | {"m": 9}], Drift("m", 1, (0, 1, 2, 3), False)),
        ([ALIKE, {"w": 1, "b": 2}, ALIKE], Drift("m", 1, (1,), True)),  # a state that only some ranks have
        ([ALIKE], None),
    ],
)
def test_the_differing_rank(replicas: list[dict[str, int]], drift: Drift | None) -> None:
    assert find_drift(replicas) == drift
