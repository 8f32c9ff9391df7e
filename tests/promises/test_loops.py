"""What may change in a run of several loops. (The simulated runs kill and stop them: phases.py.)"""

import os
import signal
from pathlib import Path

import pytest
from support.runs import ask, read_rows
from support.tiny import Pairs, Tiny, update

import samestep


def train(run_dir: Path, num_epochs: int = 2, length: int = 22, dies_at: int = -1) -> int:
    """Train in two loops on other data. Return the number of steps done."""

    def then(t: Tiny) -> None:
        update(t)
        if t.step.number == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    tiny = Tiny(run_dir, snapshot_every=2, keep_last=99, log_every="2epochs")
    tiny.train(num_epochs, data=Pairs(30), then=then)
    return int(tiny.train(3, data=Pairs(length), then=then).run.steps_done)


def test_a_loop_that_has_changed(tmp_path: Path) -> None:
    """The length of a completed loop cannot change, and neither can the data of the current loop."""
    run_dir = tmp_path / "run"
    with pytest.raises(RuntimeError, match="SIGKILL"):
        samestep.spawn(train, 1, (run_dir, 2, 22, 13))
    with pytest.raises(samestep.Error, match=r"loop 2 of the run .* was a different one \(data_length 22 there, 24"):
        samestep.spawn(train, 1, (run_dir, 2, 24))
    assert samestep.spawn(train, 1, (run_dir, 3, 22)) == 17
    assert samestep.spawn(train, 1, (run_dir, 3, 24), env={"SAMESTEP_RESUME": "8"}) == 21
    assert "audit passed" in ask("inspect", run_dir, "--samples")
    assert [row["step"] for row in read_rows(run_dir)] == [8, 15, 21], "after every second epoch"
