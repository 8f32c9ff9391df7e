"""A rank without progress is named with the cause, and the run ends so that it can be started again. A slow run
continues.
"""

import json
import re
from pathlib import Path

import pytest
from promises.stalls import train, train_slowly

import samestep

STUCK_AFTER_S = 3  # no rank is named before a third of it

WAITS = r"; rank \d waits for it in the reduction"
# The expected message of each fault, with the rank that is named.
WORDS = {
    "SIGSTOP": r"nothing was heard of rank 1 .*SIGSTOP\)" + WAITS,
    "SIGSTOP of rank 0": r"nothing was heard of rank 0 .*SIGSTOP\)" + WAITS,
    "collective skipped": r"the ranks have waited for each other for \d+ s: .*rank 0 \(host \S+\) in all_reduce "
    r"\(stalls\.py:\d+ in skip_a_collective\) at step 6",
    "exception swallowed": r"rank 1 \(host \S+\) has been outside the loop for \d+ s at step 6, stalls\.py:\d+ in train"
    + WAITS,
    "locked out": r"rank 1 \(host \S+\) has been updating for \d+ s at step 6, stalls\.py:\d+ in lock_twice" + WAITS,
}


@pytest.mark.parametrize("fault", WORDS)
def test_a_stuck_rank_is_named(tmp_path: Path, fault: str, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir, name, guilty = tmp_path / "run", fault.partition(" of rank 0")[0], 0 if "rank 0" in fault else 1
    with pytest.raises(RuntimeError) as raised:
        samestep.spawn(train, 2, (run_dir, name, guilty), env={"SAMESTEP_STUCK_AFTER_S": str(STUCK_AFTER_S)})
    said = capfd.readouterr().err
    assert re.match(WORDS[fault], str(raised.value)), str(raised.value)
    named = [line for line in said.splitlines() if re.search(WORDS[fault], line)]
    assert len(named) == 1, f"one line on the terminal, whichever ranks' output is hidden: {said}"
    if guilty == 1:
        status = json.loads((run_dir / "status.json").read_text())
        assert status["status"] == "failed"
        assert re.match(WORDS[fault], status["reason"])


@pytest.mark.parametrize("what", ["first step", "validation", "snapshot"])
def test_a_slow_run_continues(tmp_path: Path, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Each takes longer than the time after which a rank is named, or even than that after which a run ends."""
    samestep.spawn(train_slowly, 2, (tmp_path / "run", what), env={"SAMESTEP_STUCK_AFTER_S": str(STUCK_AFTER_S)})
    said = capfd.readouterr()
    assert said.err == ""
    assert re.search(r"time +.*%", said.out), "the shares of the time, in the table at the end"
    assert not (tmp_path / "run" / "ranks.json").exists()
