"""Nodes that do not share the run directory: each keeps a copy, and the run resumes from the copy of any node.

A node is a directory in which its ranks work. The run directory is `run` in it, by a relative path.
"""

import errno
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from promises.faulty import train
from promises.trial import KILLED, Outcome, Undisturbed, enter_node, fail, read_outcome, read_restarts, read_tree
from support.disks import fill
from support.selection import one_in
from support.snapshots import list_steps, read_snapshot
from support.tiny import Tiny, tiny_run, update

import samestep
from samestep.errors import Error
from samestep.snapshot import copies
from samestep.snapshot.store import Store

# Files and fields with times and processes.
PER_NODE = ("lock", "time", "restarts.jsonl", "status.json", "manifest.json", "ranks.json")


def train_on(disks: Sequence[Path], num_ranks: int, fault: Sequence[str], arguments: dict[str, Any]) -> None:
    """As one of the ranks: `num_ranks` on each node."""
    node = enter_node(disks, num_ranks)
    copies.CHUNK_BYTES = 1000  # otherwise one chunk is a whole snapshot
    if arguments.pop("full_node", None) == node:

        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        copies._append_chunk = fail
    train("run", fault, **arguments)


class Cluster:
    """Nodes with a disk each. They share the files of faults."""

    def __init__(self, place: Path) -> None:
        self._place = place
        (place / "faults").mkdir()

    def disk(self, node: int) -> Path:
        """A node's directory, which is made by the first call."""
        path = self._place / f"node-{node}"
        if not path.exists():
            path.mkdir()
            (path / "run-faults").symlink_to(self._place / "faults")
        return path

    def run_dir(self, node: int) -> Path:
        return self.disk(node) / "run"

    def spawn(
        self, nodes: Sequence[int], num_ranks: int = 1, *fault: str, env: Mapping[str, str] = {}, **arguments: Any
    ) -> None:
        """Trains on these nodes; the first has rank 0."""
        disks = [self.disk(node) for node in nodes]
        samestep.spawn(train_on, len(nodes) * num_ranks, (disks, num_ranks, fault, arguments), env=env)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_ranks_cannot_continue_without_the_one_that_writes_a_copy(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.spawn([0, 1], env={"SAMESTEP_HEAL": "1"})
    refusal = "--heal does not support a run directory that the nodes do not share: if a rank dies, all start again"
    assert refusal in capfd.readouterr().out


def assert_ended_as(cluster: Cluster, nodes: Sequence[int], wanted: Outcome) -> None:
    """All copies are complete and are those of a run without faults."""
    for node in nodes:
        assert read_outcome(cluster.run_dir(node)) == wanted, f"node {node}"
    first, *others = [read_content(cluster.run_dir(node)) for node in nodes]
    for other in others:
        assert other == first


def read_content(run_dir: Path) -> dict[str, str]:
    """The files of a copy, without times and processes, the output of the node's own ranks, and abandoned
    or older snapshots.
    """
    newest = Store(run_dir).snapshots()[-1].path.name
    return {
        path: content
        for path, content in (read_tree(run_dir) or {}).items()
        if Path(path).name not in PER_NODE
        and not path.startswith(("abandoned/", "logs/"))
        and (not path.startswith("snapshots/step-") or path.startswith(f"snapshots/{newest}/"))
    }


# --- the copies -------------------------------------------------------------------------------------------------------


def test_nodes_that_share_a_disk_keep_one(cluster: Cluster, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Two nodes with one disk, and one with its own: two copies, also by another path than that of the first node."""
    (tmp_path / "node-1").symlink_to(cluster.disk(0))
    cluster.spawn([0, 1, 2], 1)
    assert_ended_as(cluster, [0, 2], undisturbed())
    shutil.rmtree(tmp_path / "node-2")
    cluster.spawn([2, 0, 1], 1, epochs=4)  # with the nodes that share a disk last
    assert_ended_as(cluster, [2, 0], undisturbed(epochs=4))


# --- errors, and the cost of replication ------------------------------------------------------------------------------


def test_another_run_on_one_node(cluster: Cluster) -> None:
    """It is found before any node writes a file."""
    cluster.spawn([1], 1, seed=6, max_steps=4)
    before = read_tree(cluster.run_dir(1))
    with pytest.raises(Error, match=r"run holds another run \(seed 6 there, 5 here\)"):
        cluster.spawn([0, 1])
    assert not read_tree(cluster.run_dir(0))
    assert read_tree(cluster.run_dir(1)) == before


def test_fresh_is_beside_all_of_them(cluster: Cluster, undisturbed: Undisturbed) -> None:
    """Node 0 has no run, and node 1 has a run and another one beside it."""
    cluster.spawn([1], 1)
    shutil.copytree(cluster.run_dir(1), cluster.disk(1) / "run-2")
    cluster.spawn([0, 1], 1, env={"SAMESTEP_FRESH": "1"})
    for node in (0, 1):
        assert read_outcome(cluster.disk(node) / "run-3") == undisturbed()
    assert not read_tree(cluster.run_dir(0))


def test_a_disk_that_is_full_from_the_start(cluster: Cluster, undisturbed: Undisturbed) -> None:
    """That of node 1. No rank waits for it, and node 0 is unchanged."""
    fail(cluster.spawn, [0], 1, KILLED, snapshot_every=3, settled=True)
    before = read_tree(cluster.run_dir(0))
    with pytest.raises(Error, match=r"run on .* cannot be written \(No space left on device\): fix that, or name"):
        cluster.spawn([0, 1], 1, full_node=1)
    assert read_tree(cluster.run_dir(0)) == before
    assert not list(cluster.run_dir(1).rglob(".*")), "no incomplete file"
    cluster.spawn([0, 1])
    assert_ended_as(cluster, [0, 1], undisturbed())


# --- under way --------------------------------------------------------------------------------------------------------


def train_unlike(disks: Sequence[Path]) -> None:
    """As one of two ranks. Their states differ where they may."""
    rank = enter_node(disks)

    def build() -> torch.nn.Module:
        model = torch.nn.Linear(4, 1)
        model.register_buffer("mine", torch.zeros(3))
        return model

    def then(t: Tiny) -> None:
        update(t)
        t.model.mine += rank
        t.run.log({"rank": rank})
        if rank == 0:
            t.run.state["only"] = {"here": torch.arange(t.step.number)}

    tiny_run("run", num_steps=3, model=build, optimizer=torch.optim.AdamW, snapshot_every=1, then=then)


def test_all_nodes_save_the_state_of_rank_0(cluster: Cluster) -> None:
    """Its buffers, `run.state` and rows."""
    disks = [cluster.disk(0), cluster.disk(1)]
    samestep.spawn(train_unlike, 2, (disks,))
    digests = [[each.manifest["digest"] for each in Store(disk / "run").snapshots()] for disk in disks]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 3
    state = read_snapshot(Store(disks[1] / "run"), Store(disks[1] / "run").snapshots()[-1])
    assert state["state"]["only"]["here"].tolist() == [0, 1]
    assert state["objects"]["model"]["mine"].tolist() == [0, 0, 0]
    rows = [(disk / "run/metrics.jsonl").read_text() for disk in disks]
    assert rows[0] == rows[1]
    assert rows[0].count('"rank": 0') == 3


def train_while_it_is_full(disks: Sequence[Path], node: int) -> None:
    """As one of two ranks. The disk of one node is full from its third step to its fifth."""
    rank = enter_node(disks)

    def before(t: Tiny) -> None:
        t.run._services.snapshotter.wait_until_written()
        if rank == node and t.step.number == 2:
            fill(Path("filling"))
        if rank == node and t.step.number == 5:
            os.remove("filling")

    tiny_run(
        "run", num_steps=8, optimizer=torch.optim.AdamW, snapshot_every=1, keep_last=9, log_every=1, before=before,
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1)),
        then=lambda t: [update(t), t.run.log({"long": "x" * 5000})],  # more than the rest of a page
    )  # fmt: skip


@pytest.mark.parametrize("node", one_in(2, [1, 0]))
def test_a_disk_is_full_for_a_while(
    disk: Path, cluster: Cluster, node: int, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """The run continues, rows are written later, and the snapshots of the other node are complete."""
    disks = [cluster.disk(0), disk] if node else [disk, cluster.disk(0)]
    samestep.spawn(train_while_it_is_full, 2, (disks, node))
    out = "".join(capfd.readouterr())
    said = re.findall(r"samestep: .*the snapshot of step (\d) could not be written \(.*No space left", out)
    assert said == ["3", "4", "5"]
    names = [[each.path.name for each in Store(disk / "run").snapshots()] for disk in disks]
    all_of_them = [f"step-{step:08d}" for step in range(1, 9)]
    assert names[node] == [name for name in all_of_them if name[-1] not in "345"]
    assert names[1 - node] == (names[0] if node == 0 else all_of_them), "what rank 0 cannot write, no node writes"
    rows = [(disk / "run/metrics.jsonl").read_text() for disk in disks]
    assert rows[0] == rows[1]
    assert rows[0].count("\n") == 16
    assert [(disk / "run/ledger.bin").stat().st_size for disk in disks] == [8 * 40] * 2


# --- sharded state ----------------------------------------------------------------------------------------------------


# Two starts, each on two nodes: 13 s, and 17 s on a busy machine.
@pytest.mark.parametrize(("shard", "then"), one_in(3, [
    ("fsdp2", "optimizer"), ("optimizer", "fsdp2"), ("fsdp2", "none"),
]))  # fmt: skip
def test_the_state_is_sharded(cluster: Cluster, undisturbed: Undisturbed, shard: str, then: str) -> None:
    """Each node keeps the whole state, and another node continues from it, in another mode."""
    fail(cluster.spawn, [0, 1], 2, KILLED, snapshot_every=3, settled=True, env={"SAMESTEP_SHARD": shard})
    shutil.rmtree(cluster.run_dir(0))
    cluster.spawn([2, 1], 1, snapshot_every=3, env={"SAMESTEP_SHARD": then})
    assert_ended_as(cluster, [1, 2], undisturbed())
    first, second = ([row | {"time": ""} for row in read_restarts(cluster.run_dir(node))] for node in (1, 2))
    assert first == second


def test_a_node_dies_while_it_saves(cluster: Cluster, undisturbed: Undisturbed) -> None:
    """The other copy may have the snapshot already, or not."""
    fail(cluster.spawn, [0, 1], 1, "kill rank 0 at step 8 in committing", snapshot_every=2)
    cluster.spawn([1, 0], 1, snapshot_every=2)
    assert_ended_as(cluster, [0, 1], undisturbed())


def test_a_node_with_abandoned_snapshots(cluster: Cluster, undisturbed: Undisturbed) -> None:
    """The run went back to step 3 without the node: its snapshots of later steps are older than the newer ones."""
    cluster.spawn([0, 1], 1, "stop all ranks at step 9 in forward", snapshot_every=3, keep_last=9)
    fail(cluster.spawn, [0], 2, "kill all ranks at step 4 in forward", resume=3, snapshot_every=2, settled=True)
    assert [list_steps(cluster.run_dir(node))[-1] for node in (0, 1)] == [4, 10]
    cluster.spawn([1, 0], 1, snapshot_every=3)
    assert_ended_as(cluster, [0, 1], undisturbed())
    for node in (0, 1):
        assert [row["from_step"] for row in read_restarts(cluster.run_dir(node))] == [3, 4]
    assert "step-00000010" in {path.name.rpartition("-")[0] for path in (cluster.run_dir(1) / "abandoned").iterdir()}
