"""The random faults of `make chaos`: its plans are legal and repeatable, and it finds a run that differs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import chaos
import pytest
from promises.faulty import KINDS, NUM_MICRO_BATCHES, Fault
from promises.trial import Outcome


def test_plans_are_legal_and_follow_from_the_seed() -> None:
    for seed in range(200):
        assert chaos.choose_kind(seed) in KINDS
        for round_ in chaos.plan_sequence(seed, chaos.HEALING):
            assert len(round_.nodes) == {"heal-3-nodes": 3}.get(round_.how, 1 + round_.how.endswith("nodes"))
            assert min(round_.nodes) > 0
            assert sum(round_.nodes) <= NUM_MICRO_BATCHES
        rounds = chaos.plan_sequence(seed)
        assert rounds == chaos.plan_sequence(seed)
        assert not rounds[-1].faults
        for round_ in rounds:
            assert 1 <= sum(round_.nodes) <= NUM_MICRO_BATCHES
            assert all(str(Fault.parse(fault)) == fault for fault in round_.faults)
    assert len({str(chaos.plan_sequence(seed)) for seed in range(200)}) == 200


def test_a_sequence_is_compared_with_the_reference(tmp_path: Path, undisturbed: Callable[..., Outcome]) -> None:
    rounds = [
        chaos.Round((2,), "spawn", ("kill rank 1 at step 7 in backward",), snapshot_every=2),
        chaos.Round((3,), "spawn", damage="flip a byte"),
    ]
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
    chaos.run_sequence(rounds, undisturbed(), tmp_path / "right", on_small_disk=False)
    assert "cannot be used" in (tmp_path / "right" / "output").read_text()
    with pytest.raises(AssertionError, match="metrics differs from the run without faults"):
        chaos.run_sequence(rounds, replace(undisturbed(), metrics=b""), tmp_path / "wrong", on_small_disk=False)
