"""With `samestep launch --heal` on several nodes, the ranks of all nodes continue without those that die."""

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from promises.test_nodes import HELD, finish, flags_at
from promises.test_restarts import flags_of
from promises.trial import Outcome, Started, Trial
from support.hosts import Host
from support.selection import one_in

Undisturbed = Callable[..., Outcome]


def start(
    trial: Trial,
    hosts: Sequence[Host],
    num_ranks: int,
    *flags: str,
    faults: Sequence[str] = (),
) -> list[Started]:
    """Start a launcher on each host."""
    at = flags_at(f"{hosts[0].address}:29400", str(len(hosts)), "--heal", *flags)
    words = [*flags_of(*faults), "--settled"]
    return [
        trial.start("launch", num_ranks, "", *at, "--node-rank", str(rank), arguments=words, host=host)
        for rank, host in enumerate(hosts)
    ]


def read_heals(trial: Trial) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trial.dir / "heals.jsonl").read_text().splitlines()]


def read_lost(trial: Trial) -> list[int]:
    assert not (trial.dir / "restarts.jsonl").exists(), "no rank has started again"
    return [rank for heal in read_heals(trial) for rank in heal["lost"]]


def test_ranks_die(trial: Trial, undisturbed: Undisturbed, all_hosts: list[Host]) -> None:
    """One on each host, rank 0 among them."""
    faults = ["kill rank 3 at step 3 in backward", "kill rank 0 at step 8 in forward"]
    nodes = start(trial, all_hosts[:2], 2, faults=faults)
    assert finish(*nodes) == [0, 0], "\n".join(node.output for node in nodes)
    assert trial.outcome() == undisturbed()
    assert read_lost(trial) == [3, 0]
    assert "rank 3 was killed by SIGKILL (out of memory?), on node 1 (h2)\n" in nodes[0].output
    assert "rank 0 was killed by SIGKILL (out of memory?), on node 0 (h1)\n" in nodes[0].output
    lines = re.findall(r"step (\d+)/15", nodes[0].output)
    assert lines[-1] == "15"


def test_a_node_without_ranks(trial: Trial, undisturbed: Undisturbed, all_hosts: list[Host]) -> None:
    """Rank 0 moves to another host, whose terminal shows it."""
    fault = "kill rank 0 at step 7 in forward"
    nodes = start(trial, all_hosts[:2], 1, faults=[fault])
    assert finish(*nodes) == [0, 0], "\n".join(node.output for node in nodes)
    assert trial.outcome() == undisturbed()
    assert read_lost(trial) == [0]
    assert "rank 0 is gone in step 7: rank 1 continues alone" in nodes[1].output
    assert "step 15/15" in nodes[1].output


def test_a_rank_dies_while_the_run_stops(trial: Trial, undisturbed: Undisturbed, all_hosts: list[Host]) -> None:
    """The other ranks, also those of its host, save and end."""
    nodes = start(trial, all_hosts[:2], 2, faults=[HELD])
    trial.wait_held()
    trial.tell(nodes[0], signal.SIGINT)
    os.kill(trial.pid(3), signal.SIGKILL)
    trial.go_on()
    assert finish(*nodes) == [130, 130], "\n".join(node.output for node in nodes)
    assert "rank 3 was killed by SIGKILL" in nodes[0].output
    assert "stopped by a signal after step 8, saved" in nodes[0].output
    assert read_lost(trial) == [3]
    trial.run("launch", 2, "")
    assert trial.outcome() == undisturbed()


def test_a_launcher_is_killed(trial: Trial, undisturbed: Undisturbed, all_hosts: list[Host]) -> None:
    stays, goes = start(trial, all_hosts[:2], 2, faults=[HELD])
    trial.wait_held()
    goes.process.kill()
    trial.go_on()
    goes.wait()
    assert finish(stays) == [0], stays.output
    assert trial.outcome() == undisturbed()
    assert sorted(read_lost(trial)) == [2, 3]
    assert "rank 2 was lost with node 1 (h2)" in stays.output


def test_the_plug_is_pulled(trial: Trial, undisturbed: Undisturbed, all_hosts: list[Host]) -> None:
    """No connection closes. The others wait in gloo, and continue within seconds."""
    *stay_on, cut_off = all_hosts
    *stays, goes = start(trial, [*stay_on, cut_off], 1, faults=[HELD])
    trial.wait_held()
    cut_off.pull_the_plug()
    trial.go_on()
    assert finish(*stays, goes) == [*[0 for _ in stays], 1], "\n".join(node.output for node in (*stays, goes))
    assert trial.outcome() == undisturbed()
    assert read_lost(trial) == [len(stays)]


@pytest.mark.parametrize("rank", one_in(2, [1, 0]))
def test_a_stuck_rank_of_another_host(trial: Trial, undisturbed: Undisturbed, all_hosts: list[Host], rank: int) -> None:
    """It sends no heartbeats, and the leader cannot see its process: its launcher ends it."""
    fault = f"freeze rank {rank} at step 7 in forward"
    nodes = start(trial, all_hosts[:2], 1, "--stuck-after-s", "3", faults=[fault])
    assert finish(*nodes) == [0, 0], "\n".join(node.output for node in nodes)
    assert read_lost(trial) == [rank]
    assert f"nothing has moved for too long: stopping rank {rank}" in nodes[1 - rank].output
    assert trial.outcome() == undisturbed()
