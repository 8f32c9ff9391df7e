"""The ledger's records: fingerprints depend on the samples and their order, and floats keep their bits."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from samestep.plan.ledger import RECORD, UNKNOWN, Entry, combine, fingerprint, to_bits, to_float

words = st.integers(0, 2**64 - 1)
shorts = st.integers(0, 2**32 - 1)


@given(st.tuples(words, shorts, shorts, words, words, words))
def test_a_record_holds_an_entry(fields: tuple[int, ...]) -> None:
    entry = Entry(*fields)
    packed = entry.pack()
    assert len(packed) == RECORD.size == 40
    assert Entry(*RECORD.unpack(packed)) == entry


@given(st.lists(st.integers(0, 2**40), max_size=9), st.lists(st.integers(0, 2**40), max_size=9))
def test_fingerprints_identify_samples_and_their_order(some: list[int], other: list[int]) -> None:
    prints = [fingerprint(np.array(each, np.int64)) for each in (some, other)]
    assert (prints[0] == prints[1]) == (some == other)
    assert (combine(prints) == combine(prints[::-1])) == (some == other)


def test_fingerprints_are_those_of_earlier_runs() -> None:
    first = fingerprint(np.array([3, 1, 2]))
    assert first == 6812078412924547582
    assert combine([first, 7]) == 12373128861686168414


def test_bits_of_a_loss() -> None:
    assert to_bits(-0.0) != to_bits(0.0)
    assert to_float(to_bits(0.1)) == 0.1
    assert to_bits(math.nan) != UNKNOWN
    assert math.isnan(to_float(UNKNOWN))


def test_entries_without_bits() -> None:
    assert Entry(0, 0, 8, 1, to_bits(0.5), 7).has_bits
    assert not Entry(0, 0, 8, 1).has_bits
    assert not Entry(0, 0, 0, 0, 0, 0).has_bits, "a missing record"
