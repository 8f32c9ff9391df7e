"""The page of `samestep report`: its content, that content of runs cannot execute, and that a browser shows it."""

import functools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.pages import Page
from support.runs import ask, refuse
from support.tiny import Pairs, tiny_run

from samestep.tools.report import COLOURS, decimate, read_run_data
from samestep.world.environment import read_host

HOSTILE = "</script><script>document.title='hacked'</script><img src=x onerror=alert(1)>"
NUMBERS = {
    "seed": 0, "batch_size": 8, "micro_batch_size": 2, "data_length": 16, "mode": "epochs", "shuffle": True,
    "drop_last": False, "sampler": "default",
}  # fmt: skip


def write_run(run: Path, *, record: Any = (), status: Any = (), **files: list[dict[str, Any]]) -> Path:
    """Write a run's directory with rows in some of its files."""
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"format": 1, "samestep": "0.1.0", "numbers": NUMBERS, **dict(record)}))
    (run / "status.json").write_text(json.dumps({"status": "done", "reason": "", **dict(status)}))
    for name, rows in files.items():
        (run / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return run


def report(*runs: Path) -> str:
    """Return the page, which is beside the first run."""
    page = runs[0].with_name("out.html")
    ask("report", *runs, "-o", page)
    return page.read_text()


def read_data(page: str) -> Any:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])


# --- a real run ---------------------------------------------------------------------------------------------------


def test_runs_are_shown(tmp_path: Path) -> None:
    for name, rate in (("one", 0.1), ("other", 0.1), ("third", 0.2)):
        optimizer = functools.partial(torch.optim.SGD, lr=rate)
        tiny_run(tmp_path / name, data=Pairs(16), optimizer=optimizer, config={"name": name}, log_every=1)
    page = report(tmp_path / "one", tmp_path)
    shown = Page(page)
    assert "audit passed: in 2 complete epochs each of 16 samples was used once" in shown.text
    assert "config.name" in shown.text
    assert "2 of " in shown.text  # and the learning rate
    assert "values differ" in shown.text
    charts = {chart["title"]: chart for chart in read_data(page)["charts"]}
    assert [series["label"] for series in charts["loss"]["series"]] == [
        f"{name}: train/loss" for name in ("one", "other", "third")
    ]
    assert charts["loss"]["series"][0]["x"] == [1, 2, 3, 4]
    curves = [series for chart in charts.values() for series in chart["series"]]
    styles = {(curve["label"].partition(":")[0], curve["colour"]) for curve in curves}
    assert styles == {(name, COLOURS[number]) for number, name in enumerate(("one", "other", "third"))}
    assert "compute" in shown.text


def test_the_last_value_is_shown_if_it_is_not_finite(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": "-inf"}, {"step": 3, "loss": "nan"}]
    page = report(write_run(tmp_path / "run", metrics=rows))
    assert "nan (lowest 2, highest 2)" in Page(page).text
    [chart] = read_data(page)["charts"]
    assert chart["series"][0]["y"] == [2.0, None, None]


# --- parts --------------------------------------------------------------------------------------------------------


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(st.lists(st.floats(allow_infinity=False, width=32), min_size=1, max_size=100), st.integers(1, 20))
def test_no_peak_is_lost(values: list[float], num_buckets: int) -> None:
    y = np.array(values)
    x = np.arange(len(y), dtype=np.float64)
    kept_x, kept_y = decimate(x, y, num_buckets)
    assert len(kept_x) <= max(2 * num_buckets, 0) or len(y) <= 2 * num_buckets
    assert (np.diff(kept_x) > 0).all()
    np.testing.assert_array_equal(kept_y, y[kept_x.astype(int)])
    if not np.isnan(y).all():
        assert (np.nanmin(kept_y), np.nanmax(kept_y)) == (np.nanmin(y), np.nanmax(y))


def test_restarts_and_heals_are_marks(tmp_path: Path) -> None:
    restarts = [{"reason": "", "from_step": step, "world_size": size} for step, size in ((20, 3), (40, 1))]
    heals = [{"step": 30, "lost": [0, 2], "world_size": 1, "seconds": 0.1}]
    page = report(write_run(tmp_path / "run", restarts=restarts, heals=heals))
    labels = ["restart at 20 on 3 ranks", "restart at 40 on 1 rank", "ranks 0 and 2 lost at 30"]
    assert [mark["label"] for mark in read_data(page)["marks"]] == labels
    assert re.search(r"heals\s*1", Page(page).text)


# --- bad and hostile input ----------------------------------------------------------------------------------------


def test_nothing_in_a_run_can_act_in_the_page(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        record={"config": {HOSTILE: HOSTILE}, "changes": [{"after_step": 1, "changed": HOSTILE}]},
        status={"status": "failed", "reason": HOSTILE},
        metrics=[
            {"step": 1, HOSTILE: 1.0, "train/loss": None},
            {"step": "x", "loss": 1.0},
            {"step": 2, HOSTILE: "text"},
        ],
        restarts=[{"reason": HOSTILE, "from_step": 0, "rank": 0, "world_size": 2, "time": HOSTILE}],
        heals=[{"step": 1, "lost": [1], "time": HOSTILE}, {"step": 1, "lost": [HOSTILE]}, {"step": HOSTILE}],
    )
    page = report(run)
    assert HOSTILE not in page
    shown = Page(page)
    assert shown.text.count(HOSTILE) >= 7
    assert sum(tag == "script" for tag, _ in shown.elements) == 3
    assert not any(name.startswith("on") for _, attributes in shown.elements for name in attributes)
    policy = next(each["content"] for tag, each in shown.elements if tag == "meta" and "http-equiv" in each)
    assert policy.startswith("default-src 'none'")
    assert "Permission is hereby granted" in page, "the licence of uPlot"
    assert "://" not in page.replace("http://www.w3.org", "").replace("https://github.com/leeoniya/uPlot", "")


def test_a_run_that_is_being_written(tmp_path: Path) -> None:
    status = {"status": "running", "process": os.getpid(), "host": read_host()}
    run = write_run(tmp_path / "run", status=status, metrics=[{"step": 1, "loss": 2.0}])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')  # the writer is in the middle of a line
    assert "live: the run is being written" in Page(report(run)).text
    data = read_run_data(run, "run", json.loads((run / "run.json").read_text()))
    assert data.metrics["loss"][1].tolist() == [2.0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing"], "there is no directory nothing"),
        (["run", "-o", "missing/out.html"], "missing/out.html could not be written"),
        (["run", "-o", "."], ". is not a file"),
        (["run", "-o", "/dev/full"], "/dev/full is not a file"),
        (["run", "-o", "run/run.json"], "run/run.json is in a run's directory"),
    ],
)
def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    (tmp_path / "report.html").write_text("kept")
    assert sentence in refuse("report", *arguments)
    assert (tmp_path / "report.html").read_text() == "kept"


# --- in a browser -------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.soak
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_in_a_browser(tmp_path: Path) -> None:
    metrics = [{"step": n, "train/loss": 1 / n, "validation/loss": 2 / n, "train/lr": 0.1} for n in range(1, 51)]
    run = write_run(tmp_path / "run", metrics=metrics)
    page = report(run)
    assert "validation/loss" in page
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    command = [CHROMIUM, *words, f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"file://{tmp_path}/out.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count('class="uplot') == 2  # loss, lr
