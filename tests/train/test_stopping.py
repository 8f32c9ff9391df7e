"""What signals do, and what all ranks do after a step, by their votes."""

import dataclasses
import os
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

import samestep
from samestep.engine.control import Saving, Vote
from samestep.errors import UsageError
from samestep.train.stopping import STOP_SIGNALS, StopSignals, decide
from samestep.world.environment import read_environment

SIGNALS = (0, signal.SIGTERM, signal.SIGUSR1)
VOTES = [Vote(stop, snapshot, saving) for stop, snapshot, saving in product(SIGNALS, (False, True), Saving)]


def test_all_votes_of_three_ranks() -> None:
    """What one rank asks for, all do. What one must not do alone, none does. Two signals are decided alike by all."""
    for votes in product(VOTES, repeat=3):
        num_copying = sum(vote.saving == Saving.COPYING for vote in votes)
        if num_copying in (1, 2):
            with pytest.raises(UsageError) as caught:
                decide(votes)
            named = [rank for rank in range(3) if f"rank {rank} " in str(caught.value)]
            assert {votes[rank].saving == Saving.COPYING for rank in named} == {True, False}
            continue
        decision = decide(votes)
        assert decision.signal == max(vote.stop for vote in votes)
        assert decision.saves == any(vote.snapshot for vote in votes)
        assert decision.is_copying == (num_copying == 3)
        assert decision.is_written == all(vote.saving == Saving.WRITTEN for vote in votes)


@pytest.fixture
def default_handlers() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_handlers")
def test_a_signal_that_interrupts_a_print() -> None:
    """Python then raises an error in the next one."""

    def say(sentence: str) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter>")

    signals = StopSignals(dataclasses.replace(read_environment(), launcher="samestep"), say, is_on=True)
    signal.raise_signal(signal.SIGTERM)
    assert signals.heard == signal.SIGTERM


@pytest.mark.parametrize("snapshot_every", [1, None])
@pytest.mark.usefixtures("default_handlers")
def test_a_signal_ends_a_run_without_snapshots_at_once(tmp_path: Path, snapshot_every: int | None) -> None:
    run = samestep.Run(tmp_path, batch_size=1, snapshot_every=snapshot_every)
    assert (signal.getsignal(signal.SIGTERM) is signal.SIG_DFL) == (snapshot_every is None)
    del run


@pytest.mark.parametrize(("launcher", "ends"), [("python", True), ("samestep", False)])
@pytest.mark.usefixtures("default_handlers")
def test_a_second_signal(monkeypatch: pytest.MonkeyPatch, launcher: str, ends: bool) -> None:
    """It ends plain python at once. A launcher kills its ranks, and may send them a signal twice, also later."""
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(number))
    environment = dataclasses.replace(read_environment(), launcher=launcher)
    signals = StopSignals(environment, lambda sentence: None, is_on=True)
    for count in range(2):
        signal.raise_signal(signal.SIGTERM)
        assert signals.heard == signal.SIGTERM
        assert killed == [signal.SIGTERM] * (ends and count)
    signals.ignore_further()
    ignored = [signal.getsignal(number) is signal.SIG_IGN for number in STOP_SIGNALS]
    assert ignored == [not ends] * len(STOP_SIGNALS)
