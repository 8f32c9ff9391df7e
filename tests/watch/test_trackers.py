"""Trackers: the real TensorBoard and W&B packages write, and what they wrote is read back."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from samestep.errors import Error
from samestep.watch.trackers import TensorBoard, Tracker, TrackerInfo, Trackers, WandB


def about(dir: Path | None, *, resumed_step: int = 0) -> TrackerInfo:
    return TrackerInfo(name="digits", dir=dir, config={"lr": 1e-3, "path": Path("x")}, resumed_step=resumed_step)


class Listed:
    """A tracker that keeps what it is told, and raises where it should."""

    def __init__(self, fail_at: str = "") -> None:
        self.fail_at = fail_at
        self.heard: list[tuple[Any, ...]] = []

    def hear(self, *what: Any) -> None:
        self.heard.append(what)
        if what[0] == self.fail_at:
            raise RuntimeError("no\nconnection")

    def start(self, info: TrackerInfo) -> None:
        self.hear("start", info)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self.hear("log", dict(values), step)

    def finish(self, status: str) -> None:
        self.hear("finish", status)


def test_a_tracker_that_fails_is_dropped_with_one_line() -> None:
    warnings: list[str] = []
    good, bad = Listed(), Listed(fail_at="log")
    trackers = Trackers([bad, good], warnings.append)
    trackers.start(about(None))
    trackers.log({"loss": 1.0}, 1)
    trackers.log({"loss": 2.0}, 2)
    trackers.finish("done")
    trackers.finish("failed")
    expected = "tracker Listed failed and is left out from here on: RuntimeError: no connection"
    assert warnings == [expected]
    assert [what[0] for what in bad.heard] == ["start", "log"]
    assert good.heard[1:] == [("log", {"loss": 1.0}, 1), ("log", {"loss": 2.0}, 2), ("finish", "done")]


def test_a_failing_finish_does_not_keep_others_from_theirs() -> None:
    warnings: list[str] = []
    bad, good = Listed(fail_at="finish"), Listed()
    trackers = Trackers([bad, good], warnings.append)
    trackers.start(about(None))
    trackers.finish("stopped")
    assert len(warnings) == 1
    assert good.heard[-1] == ("finish", "stopped")


def test_a_tracker_that_cannot_start_stops_the_run_and_the_others() -> None:
    good, bad = Listed(), Listed(fail_at="start")
    trackers = Trackers([good, bad], pytest.fail)
    with pytest.raises(RuntimeError):
        trackers.start(about(None))
    assert good.heard[-1] == ("finish", "failed")
    assert [what[0] for what in bad.heard] == ["start"]


def read_events(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Name -> steps and values, as the server of TensorBoard reads them."""
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
    first._writer.flush()  # and now it is killed; its last snapshot was of step 3
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


def test_tensorboard_of_a_run_that_begins_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for factor in (1.0, 10.0):  # killed before its first snapshot
        tracker = TensorBoard(tmp_path / "logs")
        tracker.start(about(None))
        for step in range(3):
            tracker.log({"loss": step * factor}, step)
        tracker.finish("failed")
    assert read_events(tmp_path / "logs")["loss"] == [(0, 0.0), (1, 10.0), (2, 20.0)]


def test_tensorboard_without_a_directory_says_what_to_do() -> None:
    with pytest.raises(Error, match=r"TensorBoard\(dir=\.\.\.\)"):
        TensorBoard().start(about(None))


@pytest.mark.parametrize(
    ("module", "tracker"),
    [("torch.utils.tensorboard", TensorBoard()), ("wandb", WandB())],
    ids=["tensorboard", "wandb"],
)
def test_a_missing_package_is_one_sentence(
    module: str, tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    with pytest.raises(Error, match=r"is missing .*: pip install 'samestep\[\w+\]'$"):
        tracker.start(about(tmp_path))
    assert list(tmp_path.iterdir()) == []


class Recorded:
    """What `wandb.init` returns, as far as the tracker uses it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.axes, self.rows = arguments, dict[str, Any](), list[dict[str, Any]]()

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        assert step is None, "W&B drops points whose step is lower than one before"
        self.rows.append(data)

    def finish(self, exit_code: int | None = None) -> None:
        pass


def test_wandb_after_a_crash_and_after_going_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash the id stays. A run that has gone back has a new one, whose curve is whole."""
    runs: list[Recorded] = []

    def init(**arguments: Any) -> Recorded:
        runs.append(Recorded(arguments))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    rows = [{"step": step, "loss": 1 / step} for step in (1, 2, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for resumed_step, rewinds in ((0, []), (4, []), (2, [2]), (6, [2])):
        (tmp_path / "run.json").write_text(json.dumps({"rewinds": rewinds}))
        tracker = WandB("project")
        tracker.start(about(tmp_path, resumed_step=resumed_step))
        tracker.log({"loss": torch.tensor(0.125)}, resumed_step + 1)
        tracker.finish("stopped")
    ids = [run.arguments["id"] for run in runs]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    assert [run.arguments["name"] for run in runs] == ["digits", "digits", "digits from step 2", "digits"]
    assert all(run.axes == {"step": None, "*": "step"} for run in runs)
    assert [[row["step"] for row in run.rows] for run in runs] == [[1], [5], [1, 2, 3], [7]]


WANDB_RUNS = """
import json
import sys
from pathlib import Path
import torch
from samestep.watch.trackers import TrackerInfo, WandB
Path(sys.argv[1], "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\\n')
for resumed_step, rewinds in ((0, []), (2, []), (1, [1])):
    Path(sys.argv[1], "run.json").write_text(json.dumps({"rewinds": rewinds}))
    tracker = WandB("samestep-tests", mode="offline")
    tracker.start(TrackerInfo("digits", Path(sys.argv[1]), {"lr": 0.001}, resumed_step))
    for step in range(resumed_step + 1, resumed_step + 4):
        tracker.log({"loss": torch.tensor(step / 2), "note": "x", "weights": torch.arange(9)}, step)
    tracker.finish("stopped")
"""


def test_wandb_goes_on_under_its_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    # In a process of its own: the package leaves threads and variables behind.
    command = [sys.executable, "-c", WANDB_RUNS, str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    new_id = (tmp_path / "wandb.id").read_text().split()[0]
    written = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    names = [path.name for path in written]
    assert names[0] == names[1] != names[2] == f"run-{new_id}.wandb"
    assert all(b"weights" in path.read_bytes() for path in written)
