"""Seeds: one for each position and purpose, which never change between versions."""

import itertools

from samestep.plan.order import PURPOSES, derive


def test_places_and_purposes_differ() -> None:
    places = itertools.product((0, 1, 2, 10**12), PURPOSES, range(3), range(3), range(9))
    seeds = [derive(seed, purpose, step=s, pass_=p, micro_batch=v) for seed, purpose, s, p, v in places]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
