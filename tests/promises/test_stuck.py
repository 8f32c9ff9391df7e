"""A rank without progress is named with the cause, and the run ends so that it can be started again. A slow run
continues.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from promises.stalls import train, train_slowly
from promises.trial import Started
from support.hosts import open_hosts, why_not
from support.waiting import wait_until

import samestep

STUCK_AFTER_S = 3  # no rank is named before a third of it

WAITS = r"; rank \d waits for it in the reduction"
# The expected message of each fault, with the rank that is named.
WORDS = {
    "data set asleep": r"rank 1 \(host \S+\) has been loading data for \d+ s at step 6, stalls\.py:\d+ in on_read"
    + WAITS,
    "SIGSTOP": r"nothing was heard of rank 1 .*SIGSTOP\)" + WAITS,
    "SIGSTOP of rank 0": r"nothing was heard of rank 0 .*SIGSTOP\)" + WAITS,
    "collective skipped": r"the ranks have waited for each other for \d+ s: .*rank 0 \(host \S+\) in all_reduce "
    r"\(stalls\.py:\d+ in skip_a_collective\) at step 6",
    "locked out": r"rank 1 \(host \S+\) has been updating for \d+ s at step 6, stalls\.py:\d+ in lock_twice" + WAITS,
    "exception swallowed": r"rank 1 \(host \S+\) has been outside the loop for \d+ s at step 6, stalls\.py:\d+ in train"
    + WAITS,
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


@pytest.mark.packages
def test_a_dropped_link(tmp_path: Path) -> None:
    """Without a launcher, and with the store in rank 0, which receives nothing from the other host."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with open_hosts(2) as hosts:
        env = {
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": "29500",
            "WORLD_SIZE": "2",
            "GLOO_SOCKET_IFNAME": "eth0",
            "SAMESTEP_STUCK_AFTER_S": str(STUCK_AFTER_S),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        command = [sys.executable, str(Path(__file__).with_name("stalls.py")), str(tmp_path / "run"), "link dropped"]
        ranks = [
            Started(command, tmp_path / host.name, {**env, "RANK": str(rank), "LOCAL_RANK": "0"}, host=host)
            for rank, host in enumerate(hosts)
        ]
        try:
            wait_until(lambda: len(list(tmp_path.glob("run/pid-*"))) == 2, "both train")
            wait_until((tmp_path / "run" / "ranks.json").exists, "each has heard from the other")
            hosts[1].pull_the_plug()
            codes = [rank.wait() for rank in ranks]
        finally:
            for rank in ranks:
                rank.close()
    said = [rank.err.read_text() for rank in ranks]
    heard = r"nothing was heard of rank 1 \(host h2\) for \d+ s, .* the network is down; rank 0 waits"
    assert re.search(heard, said[0]), said[0]
    assert "rank 1 (host h2) is cut off" in said[1]
    assert codes == [1, 1]


@pytest.mark.parametrize("what", ["first step", "validation", "snapshot"])
def test_a_slow_run_continues(tmp_path: Path, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Each takes longer than the time after which a rank is named, or even than that after which a run ends."""
    samestep.spawn(train_slowly, 2, (tmp_path / "run", what), env={"SAMESTEP_STUCK_AFTER_S": str(STUCK_AFTER_S)})
    said = capfd.readouterr()
    assert said.err == ""
    assert re.search(r"time +.*%", said.out), "the shares of the time, in the table at the end"
    assert not (tmp_path / "run" / "ranks.json").exists()
