"""Seeds: one for each position and purpose, which never change between versions."""

import itertools

from samestep.plan.seeds import PURPOSES, derive


def test_values_never_change() -> None:
    """A change of these numbers changes every run that anyone has on disk."""
    assert derive(0, "init") == 4510536185247624766
    assert derive(7, "compute", step=3, pass_=1, micro_batch=5) == 8501670927800143187


def test_places_and_purposes_differ() -> None:
    places = itertools.product((0, 1, 2, 10**12), PURPOSES, range(3), range(3), range(9))
    seeds = [derive(seed, purpose, step=s, pass_=p, micro_batch=v) for seed, purpose, s, p, v in places]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_any_whole_number_is_a_seed() -> None:
    assert derive(-1, "order") == derive(2**64 - 1, "order") != derive(1, "order")
