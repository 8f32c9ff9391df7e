"""Trackers: the output of the real packages is read back; trackers that fail or are slow do not stop a run."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import tiny_run

import samestep
from samestep.errors import Error
from samestep.train.opening import read_commit
from samestep.watch import trackers as trackers_module
from samestep.watch.tracker_services import MLflow, TensorBoard, WandB
from samestep.watch.trackers import Tracker, TrackerInfo, Trackers


def about(dir: Path | None, *, resumed_step: int = 0) -> TrackerInfo:
    return TrackerInfo(
        name="digits", dir=dir, config={"lr": 1e-3, "path": Path("x")}, resumed_step=resumed_step,
        environment={"world_size": 2}, git_commit="3f2a",
    )  # fmt: skip


class Listed:
    """A tracker that keeps what it receives. It raises in the methods and at the steps in `fails`."""

    def __init__(self, *fails: str | int) -> None:
        self.fails = fails
        self.heard: list[tuple[Any, ...]] = []
        self.num_failures = 0

    def hear(self, *what: Any) -> None:
        if what[0] in self.fails or what[-1] in self.fails:
            self.num_failures += 1
            raise RuntimeError("no\nconnection")
        self.heard.append(what)

    def start(self, info: TrackerInfo) -> None:
        self.hear("start", info)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self.hear("log", dict(values), step)

    def finish(self, status: str) -> None:
        self.hear("finish", status)

    @property
    def steps(self) -> list[int]:
        return [what[-1] for what in self.heard if what[0] == "log"]


FAILURE = "RuntimeError: no connection"


def begin(*receivers: Listed, resumed_step: int = 0) -> tuple[Trackers, list[str]]:
    """Start trackers. Returns them, and the list of the warnings."""
    warnings: list[str] = []
    trackers = Trackers(receivers, warnings.append)
    trackers.start(about(None, resumed_step=resumed_step))
    return trackers, warnings


def test_a_failing_tracker_loses_its_rows_only() -> None:
    good, bad = Listed(), Listed(2, 4)
    trackers, warnings = begin(bad, good)
    for step in range(1, 6):
        trackers.log({"loss": 1.0}, step)
        while bad.num_failures < step // 2:
            threading.Event().wait(0.001)
    trackers.finish("done")
    trackers.finish("failed")
    assert warnings == [f"tracker Listed has failed, and may lack rows: {FAILURE}"]
    assert (bad.steps, good.steps) == ([1, 3, 5], [1, 2, 3, 4, 5])
    assert good.heard[-1] == bad.heard[-1] == ("finish", "done")


class Slow(Listed):
    """A tracker whose service answers when `answer` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = threading.Event()

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self.answer.wait()
        super().log(values, step)


def test_a_slow_tracker_does_not_delay_the_training() -> None:
    slow = Slow()
    trackers, warnings = begin(slow)
    weights = torch.zeros(2)
    for step in range(100):  # returns before the first row is taken
        weights += 1
        trackers.log({"weights": weights}, step)
    slow.answer.set()
    trackers.finish("done")
    assert (slow.steps, warnings) == ([*range(100)], [])
    assert [what[1]["weights"].tolist() for what in slow.heard[1:101]] == [[step + 1.0] * 2 for step in range(100)]


def test_rows_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers_module, "MAX_BYTES", 10 << 10)
    slow = Slow()
    trackers, warnings = begin(slow)
    for step in range(20):
        trackers.log({"loss": step}, step)
    slow.answer.set()
    trackers.finish("done")
    assert slow.steps == list(range(10))
    assert warnings == ["tracker Slow has failed, and may lack rows: it is slow, and rows of 0 MB wait for it"]


def test_a_tracker_that_hangs_at_the_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers_module, "PATIENCE_S", 0.05)
    slow, good = Slow(), Listed()
    trackers, warnings = begin(slow, good)
    trackers.log({"loss": 1.0}, 1)
    trackers.finish("done")
    assert warnings == ["tracker Slow has failed, and may lack rows: it did not return within 0 s at the end"]
    assert good.heard[-1] == ("finish", "done")
    slow.answer.set()


def test_a_tracker_that_cannot_start_stops_a_new_run_and_the_others() -> None:
    good, bad = Listed(), Listed("start")
    with pytest.raises(Error, match=rf"^tracker Listed cannot start \({FAILURE}\): correct its arguments"):
        begin(good, bad)
    assert good.heard[-1] == ("finish", "failed")
    assert bad.heard == []


def test_a_resumed_run_continues_without_a_tracker_that_cannot_start() -> None:
    good, bad = Listed(), Listed("start")
    trackers, warnings = begin(bad, good, resumed_step=7)
    trackers.log({"loss": 1.0}, 8)
    trackers.finish("done")
    assert (bad.heard, good.steps) == ([], [8])
    assert warnings == [f"tracker Listed cannot start, and gets no rows: {FAILURE}"]


CONFIG = {"lr": 0.1, "api_key": "x7", "pad_token": "<pad>", "db": [{"password": "x7", "port": 1}]}


def train_with_trackers(run_dir: str) -> list[Any]:
    """Trains three steps, and returns the calls of a tracker; another one fails."""
    listed = Listed()
    tiny_run(run_dir, num_steps=3, batch_size=4, log_every=1, trackers=[Listed("log"), listed], config=CONFIG)
    return listed.heard


def test_what_a_tracker_gets(tmp_path: Path) -> None:
    heard = samestep.spawn(train_with_trackers, args=(str(tmp_path / "x"),))
    info = heard[0][1]
    shown = CONFIG | {"api_key": "(hidden)", "db": [{"password": "(hidden)", "port": 1}]}
    assert (info.name, info.dir, info.config, info.resumed_step) == ("x", tmp_path / "x", shown, 0)
    assert info.options["batch_size"] == 4
    assert info.environment["torch"] == torch.__version__
    assert info.environment["world_size"] == 1
    record = json.loads((tmp_path / "x" / "run.json").read_text())
    assert list(info.data) == record["samples"]
    assert record["config"] == shown
    assert not [path for path in (tmp_path / "x").rglob("*") if path.is_file() and b"x7" in path.read_bytes()]
    assert [what[-1] for what in heard[1:]] == [1, 2, 3, "done"]
    assert set(heard[1][1]) == {"train/loss", "train/learning_rate"}


def test_the_commit_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    script = tmp_path / "sub" / "script.py"
    script.parent.mkdir()
    script.write_text("")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    assert read_commit() == {}
    git("init")
    assert read_commit() == {}  # no commit yet
    git("add", ".")
    git("commit", "-m", "one")
    assert read_commit() == {"commit": git("rev-parse", "HEAD"), "is_dirty": False}
    (tmp_path / "untracked").touch()
    assert not read_commit()["is_dirty"]
    script.write_text("1")
    assert read_commit()["is_dirty"]


def read_events(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Return name -> steps and values, as the server of TensorBoard reads them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")
    tensor_util = pytest.importorskip("tensorboard.util.tensor_util")
    events = accumulator.EventAccumulator(str(folder), tensor_size_guidance={})
    events.Reload()
    return {
        name: [(event.step, tensor_util.make_ndarray(event.tensor_proto)) for event in events.Tensors(name)]
        for name in events.Tags()["tensors"]
    }


def test_tensorboard_forgets_what_the_run_lost(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first = TensorBoard()
    first.start(about(tmp_path))
    for step in range(1, 6):
        first.log({"train/loss": step / 2, "note": "hello", "weights": torch.arange(9)}, step)
    first._writer.flush()  # here it is killed; its last snapshot is of step 3
    second = TensorBoard()
    second.start(about(tmp_path, resumed_step=3))
    for step in range(4, 7):
        second.log({"train/loss": torch.tensor(step * 10.0), "nan": float("nan")}, step)
    second.finish("done")
    first.finish("failed")

    events = read_events(tmp_path / "tensorboard")
    assert events["train/loss"] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 40.0), (5, 50.0), (6, 60.0)]
    assert [step for step, value in events["nan"] if np.isnan(value)] == [4, 5, 6]
    assert [step for step, _ in events["weights"]] == [1, 2, 3]
    assert [step for step, _ in events["note/text_summary"]] == [1, 2, 3]
    assert [step for step, value in events["config/text_summary"] if b'"lr": 0.001' in value.item()] == [0, 3]


def test_tensorboard_without_a_directory_says_what_to_do() -> None:
    with pytest.raises(Error, match=r"TensorBoard\(dir=\.\.\.\)"):
        TensorBoard().start(about(None))


@pytest.mark.parametrize(
    ("module", "tracker"),
    [
        ("torch.utils.tensorboard", TensorBoard()),
        ("wandb", WandB()),
        ("mlflow.tracking", MLflow()),
    ],
    ids=["tensorboard", "wandb", "mlflow"],
)
def test_a_missing_package_is_one_sentence(
    module: str, tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    with pytest.raises(Error, match=r"is missing .*: pip install 'samestep\[\w+\]'$"):
        tracker.start(about(tmp_path))
    assert list(tmp_path.iterdir()) == []


class Recorded:
    """The part of what `wandb.init` returns that the tracker uses."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.axes, self.rows = arguments, dict[str, Any](), list[dict[str, Any]]()
        self.id = arguments["id"].removesuffix("-ours") + "-ours"  # W&B may choose another one

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        assert step is None, "W&B drops points whose step is lower than one before"
        self.rows.append(data)


def test_wandb_does_not_get_rows_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later process does not send the rows, or the values of the last step, that W&B received before the kill."""
    rows: list[dict[str, Any]] = []

    def log(resumed_step: int, *logged: tuple[dict[str, Any], int], rewinds: Sequence[int] = ()) -> WandB:
        (tmp_path / "run.json").write_text(json.dumps({"rewinds": rewinds}))
        tracker = WandB()
        tracker.start(about(tmp_path, resumed_step=resumed_step))
        tracker._run.rows = rows
        for values, step in logged:
            tracker.log(values, step)
        return tracker

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **arguments: Recorded(arguments)))
    losses = [({"loss": step}, step) for step in range(1, 7)]
    first = log(0, *losses[:4], ({"note": "x"}, 4))
    # The first one was killed before it logged the score of step 4.
    second = log(2, *losses[2:4], ({"note": "x", "score": 1}, 4))
    third = log(2, ({"score": 1}, 4), *losses[4:])
    assert rows == [
        *({"step": step, "loss": step} for step in range(1, 5)), {"step": 4, "note": "x"}, {"step": 4, "score": 1},
        {"step": 5, "loss": 5}, {"step": 6, "loss": 6},
    ]  # fmt: skip
    assert first._run.id == second._run.arguments["id"] == third._run.arguments["id"]
    assert first._run.axes == {"step": None, "*": "step"}
    rows.clear()
    gone_back = log(2, losses[2], rewinds=[2])
    assert rows == [{"step": 3, "loss": 3}]
    assert gone_back._run.id != first._run.id
    assert gone_back._run.arguments["name"] == "digits from step 2"


REAL_RUNS = """
import json
import sys
from pathlib import Path
import torch
import samestep
from samestep.watch.trackers import Trackers
def warn(sentence):
    sys.exit(sentence)
run_dir = Path(sys.argv[2])
for resumed_step, rewinds in ((0, []), (2, []), (1, [1])):
    (run_dir / "run.json").write_text(json.dumps({"rewinds": rewinds}))
    trackers = Trackers([getattr(samestep, sys.argv[1])("samestep-tests")], warn)
    info = samestep.TrackerInfo("digits", run_dir, {"lr": 0.001}, resumed_step, environment={"world_size": 2})
    trackers.start(info)
    for step in range(resumed_step + 1, resumed_step + 4):
        trackers.log({"loss": torch.tensor(step / 2), "top@1": 1, "note": "x", "weights": torch.arange(9)}, step)
    trackers.finish("stopped")
"""


def run_for_real(tracker: str, run_dir: Path) -> str:
    """Train three times: from the beginning, resumed at step 2 after a crash, and gone back to step 1."""
    env = os.environ | {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": f"sqlite:///{run_dir}/mlflow.db"}
    # In a process of its own: the packages leave threads and variables behind.
    command = [sys.executable, "-c", REAL_RUNS, tracker, str(run_dir)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return str(json.loads((run_dir / "trackers.json").read_text())[tracker.lower()]["id"])


# Steps of the run before it goes back, each once though two were repeated after the crash, and of the run after it.
EXPECTED = [(step, step / 2) for step in range(1, 6)], [(step, step / 2) for step in range(2, 5)]


def test_wandb_continues_under_its_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    new_id = run_for_real("WandB", tmp_path)
    written = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    names = [path.name for path in written]
    assert names[0] == names[1] != names[2] == f"run-{new_id}.wandb"
    assert all(b"weights" in path.read_bytes() for path in written)
    assert all(b"world_size" in path.read_bytes() for path in written)


def test_mlflow_continues_under_its_id(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    new_id = run_for_real("MLflow", tmp_path)
    client = pytest.importorskip("mlflow.tracking").MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("samestep-tests")
    runs = sorted(client.search_runs([experiment.experiment_id]), key=lambda run: run.info.run_id == new_id)
    assert [run.info.run_name for run in runs] == ["digits", "digits from step 1"]
    for each, points in zip(runs, EXPECTED, strict=True):
        found = client.get_metric_history(each.info.run_id, "loss")
        assert sorted((point.step, point.value) for point in found) == points
        assert each.data.params == {"lr": "0.001"}
        assert each.data.tags["samestep.world_size"] == "2"
        assert (each.data.tags["note"], each.data.metrics["top_1"]) == ("x", 1)
        assert each.info.status == "KILLED"
