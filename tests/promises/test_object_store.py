"""Runs whose directory is a URL: another machine resumes from its snapshots, even after a failed upload.

A machine is a directory for working copies. The store is a directory too, read through a protocol of these tests that
fails, or kills the process, at chosen moments.
"""

import json
import os
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from promises.faulty import train
from promises.trial import KILLED, Outcome, Undisturbed, enter_node, fail, read_outcome, read_restarts
from support.runs import check, find_tests, samestep_command
from support.selection import one_in
from support.snapshots import flip

import samestep
from samestep.errors import Error
from samestep.snapshot.mirror import Mirror, Unreachable
from samestep.snapshot.store import Store


class Planted(LocalFileSystem):
    """A store that fails, or kills the writing process, in the middle of a chosen file."""

    protocol = "planted"
    plan: ClassVar[list[tuple[str, str, int]]] = []  # the fault; a part of the path; the number of writes before it

    def put_file(self, path1: str, path2: str, callback: Any = None, **kwargs: Any) -> None:
        self._meet(path2, Path(path1).read_bytes())
        super().put_file(path1, path2, callback, **kwargs)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._meet(path, value)
        super().pipe_file(path, value, mode, **kwargs)

    def _meet(self, path: str, data: bytes) -> None:
        for place, (how, part, count) in enumerate(self.plan):
            if part not in path:
                continue
            if count:
                self.plan[place] = (how, part, count - 1)
                continue
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(data[: len(data) // 2])
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "removed":
                del self.plan[place]
                shutil.rmtree(path.partition("/snapshots/")[0])
                raise OSError(5, "Input/output error")
            if how == "taken":
                del self.plan[place]
                Mirror(f"planted://{path.partition('/snapshots/')[0]}").take()
            else:
                raise OSError(28, "No space left on device")


class Cluster:
    """Machines that reach one store."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.store = place / "store" / "run"
        self.url = f"planted://{self.store}"

    def machine(self, number: int) -> Path:
        return self._place / f"machine-{number}"

    def spawn(
        self, machine: int, num_ranks: int = 1, *plan: tuple[str, str, int], env: Mapping[str, str] = {},
        **arguments: Any,
    ) -> None:  # fmt: skip
        env = {"SAMESTEP_RUN_DIR": self.url, "SAMESTEP_LOCAL_DIR": str(self.machine(machine)), **env}
        arguments = {"snapshot_every": 3} | arguments
        samestep.spawn(train_planted, num_ranks, (self._place / "run", plan, arguments), env=env)

    def snapshots(self) -> list[str]:
        return sorted(path.parent.name for path in self.store.glob("snapshots/*/manifest.json"))

    def outcome(self) -> Outcome:
        """The outcome of the run at the URL, which is a directory with the files of a run."""
        return read_outcome(self.store)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def train_planted(run_dir: Path, plan: Sequence[tuple[str, str, int]], arguments: dict[str, Any]) -> None:
    fsspec.register_implementation("planted", Planted, clobber=True)
    Planted.plan = [*plan]
    train(run_dir, **arguments)


def check_complete(cluster: Cluster, undisturbed: Undisturbed) -> None:
    """Checks that the URL has what an undisturbed run leaves there, and nothing else."""
    assert cluster.outcome() == undisturbed()
    assert json.loads((cluster.store / "status.json").read_text())["status"] == "done"
    numbered = [name for name in cluster.snapshots() if name.startswith("step-")]
    assert numbered == ["step-00000009", "step-00000012", "step-00000015"]
    assert len(cluster.snapshots()) == 4, "with the newest best"
    assert not list(cluster.store.rglob(".*")), "no incomplete file"


MOMENTS = {  # in a write: a part of the path, the writes before it, and the step from which the run resumes
    "tensors": ("step-00000006/tensors-00000.safetensors", 0, 5),
    "manifest": ("step-00000006/.manifest.json", 0, 5),
    "rows": ("/.metrics.jsonl", 2, 3),
    "best": ("snapshots/best.step-00000010/", 1, 9),
    "record": ("/.run.json", 0, 0),
    "first": ("step-00000003/", 0, 0),
}


@pytest.mark.parametrize("moment", one_in(len(MOMENTS), MOMENTS))
def test_killed_during_an_upload(cluster: Cluster, undisturbed: Undisturbed, moment: str) -> None:
    """Another machine resumes."""
    part, count, step = MOMENTS[moment]
    fail(cluster.spawn, 0, 1, ("kill", part, count), settled=True)
    assert any(part in f"{path}/" for path in cluster.store.rglob("*")), "a part of it is there"
    cluster.spawn(1, 2)
    assert [row["from_step"] for row in read_restarts(cluster.store)] == ([step] if step else [])
    check_complete(cluster, undisturbed)


# The rank that was rank 0 at the start dies in an upload.
DYING = """
import os
from promises.test_object_store import train_planted

plan = [("kill", {part!r}, {count})] if os.environ["RANK"] == "0" else []
train_planted({url!r}, plan, {{"snapshot_every": 3, "settled": True}})
"""


@pytest.mark.parametrize("moment", one_in(5, [moment for moment in MOMENTS if moment != "record"] + ["last"]))
def test_another_rank_continues_an_upload(
    cluster: Cluster, undisturbed: Undisturbed, tmp_path: Path, moment: str
) -> None:
    """Rank 0 dies in it. No rank starts again, and nothing is missing at the URL."""
    part, count, _ = (MOMENTS | {"last": ("step-00000015/tensors-00000.safetensors", 0, 15)})[moment]
    (tmp_path / "script.py").write_text(DYING.format(url=cluster.url, part=part, count=count))
    env = {"PYTHONPATH": find_tests(), "SAMESTEP_LOCAL_DIR": str(cluster.machine(0))}
    command = ["launch", "--nproc-per-node", "3", "--heal", "script.py"]
    assert "lost rank 0 in step " in check(samestep_command(*command, cwd=tmp_path, env=env)).stderr
    assert not read_restarts(cluster.store)
    check_complete(cluster, undisturbed)


@pytest.mark.parametrize("file", one_in(4, ["tensors-00000.safetensors", "manifest.json"]))
def test_a_flipped_bit(
    cluster: Cluster, undisturbed: Undisturbed, capfd: pytest.CaptureFixture[str], file: str
) -> None:  # fmt: skip
    """The run resumes from the snapshot before and writes the damaged one again. With no sound one it is an error."""
    fail(cluster.spawn, 0, 1, fault=KILLED, settled=True)
    flip(cluster.store / "snapshots/step-00000006" / file, -9)
    capfd.readouterr()
    cluster.spawn(1)
    said = capfd.readouterr().out
    assert f"cannot be used: {cluster.url}/snapshots/step-00000006: {file} is damaged" in said
    assert cluster.outcome() == undisturbed()
    assert read_restarts(cluster.store)[0]["from_step"] == 5, "the step of the best snapshot"
    for name in cluster.snapshots():
        flip(cluster.store / "snapshots" / name / file, -9)
    with pytest.raises(Error, match=f"no snapshot in {cluster.url} can be used"):
        cluster.spawn(2)


def test_a_store_that_is_full_for_a_while(
    cluster: Cluster, undisturbed: Undisturbed, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """It is a warning, and the next snapshot uploads all files. At the end it is an error until the next start."""
    with pytest.raises(Error) as caught:
        cluster.spawn(0, 1, ("full", "step-00000015/state.json", 0), settled=True)
    [copy] = cluster.machine(0).iterdir()
    why = "(OSError: [Errno 28] No space left on device)"
    said = f"the snapshot of step 15 is in {copy} only: it could not be uploaded to {cluster.url} {why}"
    assert f"{said}; fix this, and start the same command again" in str(caught.value)
    assert "step-00000015" not in cluster.snapshots()
    assert "step-00000012" in cluster.snapshots()
    capfd.readouterr()
    cluster.spawn(0)
    assert "nothing left to do" in capfd.readouterr().out
    assert cluster.outcome() == undisturbed()


@pytest.mark.parametrize(("how", "numbered"), [("full", [3, 9, 12, 15]), ("removed", [9, 12, 15])])
def test_a_store_that_fails_in_between(
    cluster: Cluster, undisturbed: Undisturbed, capfd: pytest.CaptureFixture[str], how: str, numbered: list[int]
) -> None:  # fmt: skip
    """All files that are needed are uploaded again, also if the store is removed."""
    cluster.spawn(0, 1, (how, "step-00000006/", 0), settled=True, keep_last=9)
    said = capfd.readouterr().out
    assert re.findall(r"the snapshot of step (\d+) is in .* only", said) == ["6"]
    assert "and the run continues" in said
    assert [int(name[-2:]) for name in cluster.snapshots() if name.startswith("step-")] == numbered
    assert cluster.outcome() == undisturbed()


def test_a_later_writer_ends_the_earlier_one(cluster: Cluster) -> None:
    """Before the next manifest of the earlier one. (The later one printed that the earlier one might live.)"""
    with pytest.raises(Error, match=f"the run in {cluster.url} was taken over by process"):
        cluster.spawn(0, 1, ("taken", "step-00000006/state.json", 0), settled=True)
    assert "step-00000006" not in cluster.snapshots()


def train_on_nodes(place: Path, url: str) -> None:
    """As one of two ranks, on nodes with separate working copies."""
    enter_node([place / "node-0", place / "node-1"])
    os.environ.update(SAMESTEP_RUN_DIR=url, SAMESTEP_LOCAL_DIR="copies")
    train_planted(place / "run", [], {"snapshot_every": 3, "max_steps": 6})


def test_nodes_that_share_nothing_but_the_url(cluster: Cluster, tmp_path: Path) -> None:
    """Only rank 0 reads the URL, and sends the files to the others."""
    samestep.spawn(train_on_nodes, 2, (tmp_path, cluster.url))
    for node in (0, 1):
        shutil.rmtree(tmp_path / f"node-{node}")
    samestep.spawn(train_on_nodes, 2, (tmp_path, cluster.url))
    for node in (0, 1):
        [copy] = (tmp_path / f"node-{node}" / "copies").iterdir()
        assert Store(copy).snapshots()[-1].path.name == "step-00000006"
        assert (copy / "metrics.jsonl").read_bytes() == (cluster.store / "metrics.jsonl").read_bytes()


# --- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("run_dir", "sentence"), [
    ("nowhere://bucket/run", r"the run directory nowhere://bucket/run cannot be used: Protocol not known: nowhere"),
    (Path("s3://bucket/run"), r"a path made of a URL, s3:/bucket/run, which has lost a slash"),
])  # fmt: skip
def test_invalid_urls(run_dir: Any, sentence: str) -> None:
    with pytest.raises(Error, match=sentence):
        samestep.Run(run_dir, batch_size=4, micro_batch_size=1)


def test_no_bucket_is_made() -> None:
    """Some stores create the bucket when a directory in it is created."""
    with pytest.raises(Unreachable, match="FileNotFoundError"):
        Mirror("file:///samestep-has-no-such-bucket/run").take()
    assert not Path("/samestep-has-no-such-bucket").exists()


def test_going_back(cluster: Cluster, undisturbed: Undisturbed) -> None:
    """Machine 1 goes back to step 3. Later snapshots are moved, and machine 0 does not resume from its own copy."""
    cluster.spawn(0, 1, fault="stop all ranks at step 9 in forward", keep_last=9)
    assert cluster.snapshots()[-1] == "step-00000010"
    fail(cluster.spawn, 1, 1, fault="kill all ranks at step 5 in forward", resume=3, snapshot_every=2, settled=True)
    assert cluster.snapshots()[-1] == "step-00000004"
    assert "step-00000010" in {path.name.rpartition("-")[0] for path in (cluster.store / "abandoned").iterdir()}
    cluster.spawn(0, 1)
    assert [row["from_step"] for row in read_restarts(cluster.store)] == [3, 5]
    assert cluster.outcome() == undisturbed()


def test_other_runs_at_one_url(cluster: Cluster, undisturbed: Undisturbed) -> None:
    """Another run is refused, --fresh uses a URL beside it, and a removed run does not resume from its working copy."""
    cluster.spawn(0, 1, max_steps=4)
    shutil.copytree(cluster.store, cluster.store.with_name("run-2"))
    cluster.spawn(0, env={"SAMESTEP_FRESH": "1"})
    assert read_outcome(cluster.store.with_name("run-3")) == undisturbed()
    with pytest.raises(Error, match=r"holds another run \(seed 5 there, 6 here\)"):
        cluster.spawn(0, 1, seed=6)
    with pytest.raises(Error, match="already has snapshots and resume is never"):
        cluster.spawn(0, 1, resume=False, max_steps=4)
    shutil.rmtree(cluster.store)
    cluster.spawn(0)
    assert cluster.outcome() == undisturbed()
    assert len(list(cluster.machine(0).iterdir())) == 3
