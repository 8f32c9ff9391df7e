"""The ledger's records: fingerprints depend on the samples and their order, and floats keep their bits."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from samestep.plan.ledger import UNKNOWN, combine, fingerprint, to_bits, to_float


@given(st.lists(st.integers(0, 2**40), max_size=9), st.lists(st.integers(0, 2**40), max_size=9))
def test_fingerprints_identify_samples_and_their_order(some: list[int], other: list[int]) -> None:
    prints = [fingerprint(np.array(each, np.int64)) for each in (some, other)]
    assert (prints[0] == prints[1]) == (some == other)
    assert (combine(prints) == combine(prints[::-1])) == (some == other)


def test_bits_of_a_loss() -> None:
    assert to_bits(-0.0) != to_bits(0.0)
    assert to_float(to_bits(0.1)) == 0.1
    assert to_bits(math.nan) != UNKNOWN
    assert math.isnan(to_float(UNKNOWN))
