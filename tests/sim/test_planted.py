"""The text of each planted fault is in the source, exactly once."""

from sim.planted import PLANTED, SOURCE


def test_each_planted_fault_is_in_the_source() -> None:
    counts = {each.what: (SOURCE / each.file).read_text().count(each.old) for each in PLANTED}
    wrong = {what: count for what, count in counts.items() if count != 1}
    assert not wrong, "adapt the texts in planted.py to the source"
    assert len(counts) == len(PLANTED) >= 40
