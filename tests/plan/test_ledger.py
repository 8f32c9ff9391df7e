"""The ledger's records: fingerprints depend on the samples and their order, and floats keep their bits."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from samestep.hashing import hash_short
from samestep.plan.ledger import combine


@given(st.lists(st.integers(0, 2**40), max_size=9), st.lists(st.integers(0, 2**40), max_size=9))
def test_fingerprints_identify_samples_and_their_order(some: list[int], other: list[int]) -> None:
    prints = [hash_short(np.array(each, np.int64).data) for each in (some, other)]
    assert (prints[0] == prints[1]) == (some == other)
    assert (combine(prints) == combine(prints[::-1])) == (some == other)
