"""Invalid numbers are refused in one sentence."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import Error
from samestep.plan.tree import check_numbers, default_micro_batch_size


def test_default_micro_batch_size() -> None:
    sizes = {1: 1, 7: 7, 96: 96, 127: 127, 128: 64, 192: 96, 254: 127, 256: 64, 508: 127, 512: 64, 1000: 125, 4096: 512}
    assert {batch_size: default_micro_batch_size(batch_size) for batch_size in sizes} == sizes


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        (
            (10, 4, 1),
            "batch_size 10 is not a multiple of micro_batch_size 4: "
            "use a batch_size of 8 or 12, or a micro_batch_size that divides 10",
        ),
        (
            (3, 4, 1),
            "batch_size 3 is not a multiple of micro_batch_size 4: "
            "use a batch_size of 4, or a micro_batch_size that divides 3",
        ),
        (
            (32, 8, 8),
            "8 ranks cannot share a step of 4 micro-batches (batch_size 32, micro_batch_size 8): start 1 to 4 ranks, "
            "or give micro_batch_size=4",
        ),
        (
            (8, 8, 2),
            "2 ranks cannot share a step of 1 micro-batch (batch_size 8, micro_batch_size 8): start 1 rank, or give "
            "micro_batch_size=4",
        ),
        (
            (4, 2, 6),
            "6 ranks cannot share a step of 2 micro-batches (batch_size 4, micro_batch_size 2): start 1 to 2 ranks, or "
            "give batch_size=12, micro_batch_size=2",
        ),
        (
            (4 * 10**9, 4, 1),
            "batch_size 4000000000 is 1000000000 micro-batches of 4, more than the 1048576 of the largest step: use a "
            "smaller batch_size, or a larger micro_batch_size",
        ),
        ((0, 1, 1), "batch_size must be a whole number above 0, found 0"),
        ((8, -2, 1), "micro_batch_size must be a whole number above 0, found -2"),
        ((8, 2.0, 1), "micro_batch_size must be a whole number above 0, found 2.0"),
        (("8", 2, 1), "batch_size must be a whole number above 0, found '8'"),
        ((8, True, 1), "micro_batch_size must be a whole number above 0, found True"),
        ((8, 2, 0), "world_size must be a whole number above 0, found 0"),
    ],
)
def test_invalid_numbers(numbers: tuple[int, int, int], sentence: str) -> None:
    with pytest.raises(Error, match=f"^{re.escape(sentence)}$"):
        check_numbers(*numbers)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 40))
def test_the_advice_is_valid(batch_size: int, size: int, world_size: int) -> None:
    """The values that an error message recommends pass the check."""
    try:
        check_numbers(batch_size, size, world_size)
    except Error as error:
        sentence = str(error)
    else:
        return
    if "multiple" in sentence:
        for other in re.findall(r"\d+", re.findall(r"batch_size of ([\d or]+),", sentence)[0]):
            check_numbers(int(other), size, 1)
    else:
        given = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", sentence)}
        check_numbers(given.get("batch_size", batch_size), given["micro_batch_size"], world_size)
