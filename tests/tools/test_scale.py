"""`samestep scale`: what it measures and fits, its options, and CPU quotas."""

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs import check, run_command, samestep_command

from samestep.cli import main
from samestep.errors import Error
from samestep.tools.doctor.data_loading import INTERCEPTOR as DATA_LOADING
from samestep.tools.scale import cpu_quota
from samestep.tools.scale.laws import find_break_even, fit_amdahl, fit_gustafson
from samestep.tools.scale.measurement import Size, add_steps
from samestep.tools.scale.run_scale import add_finish, find_remote, recommend, summarize
from samestep.tools.scale.step_model import StepModel
from samestep.tools.traced_script import build_trace, read_lines

SCRIPT = """
import samestep
import torch
from torch import nn

run = samestep.Run("run", batch_size=32, micro_batch_size=8)
data = torch.utils.data.TensorDataset(torch.rand(256, 16), torch.rand(256, 1))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.prepare(model=model, optimizer=optimizer)
for epoch in run.epochs(data, 9):
    for step in epoch:
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
"""
SBATCH = """#!/bin/sh
cat > /dev/null
echo "sbatch: Job 7 to start at {start} using 2 processors on nodes n1 in partition main" >&2
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a script and the output of `samestep scale --json` for it."""
    home = tmp_path_factory.mktemp("scale")
    (home / "train.py").write_text(SCRIPT)
    (home / "scratch").mkdir()
    (home / "bin").mkdir()
    sbatch = home / "bin" / "sbatch"
    sbatch.write_text(SBATCH.format(start=(datetime.now() + timedelta(hours=1)).isoformat(timespec="seconds")))
    sbatch.chmod(0o755)
    words = ["scale", "--json", "--world-sizes", "2,1", "--strong", "--weak", "--steps", "50", "--warm-up", "2"]
    words += ["--repeats", "1", "--for-steps", "1000", "--slurm", "--partition", "main"]
    words += ["--predict", "3,4096", "train.py"]
    env = {"TMPDIR": str(home / "scratch"), "PATH": f"{sbatch.parent}:{os.environ['PATH']}"}
    done = check(samestep_command(*words, cwd=home, env=env, timeout=300))
    (home / "scale.json").write_text(done.stdout)
    assert "samestep: 34 steps were measured, not 50: after the warm-up, the script trains for no more" in done.stderr
    assert [*(home / "scratch").iterdir()] == []
    assert not (home / "run").exists()
    return home


def test_a_script_is_measured(home: Path) -> None:
    found = json.loads((home / "scale.json").read_text())
    for kind, batch_sizes in (("strong", [32, 32]), ("weak", [32, 64])):
        rows = found[kind]["sizes"]
        assert [row["world_size"] for row in rows] == [1, 2]
        assert [row["batch_size"] for row in rows] == batch_sizes
        for row in rows:
            assert row["samples_per_s"] == pytest.approx(row["batch_size"] / row["step_s"])
            assert row["efficiency"] == pytest.approx(
                row["samples_per_s"] / rows[0]["samples_per_s"] / row["world_size"]
            )
            parts = [row["phases_s"][name] for name in ("data", "compute", "exchange", "waiting", "update", "other")]
            assert min(parts) > -1e-4
            assert sum(parts) > 0
    predicted = {kind: {each["world_size"]: each for each in found[kind]["predictions"]} for kind in ("strong", "weak")}
    assert {*predicted["strong"]} == {1, 2, 3}  # a step has 4 micro-batches
    assert {*predicted["weak"]} == {1, 2, 3, 4096}
    assert abs(predicted["strong"][2]["error"]) < 1e-6
    assert predicted["weak"][4096]["step_s"] > found["strong"]["sizes"][0]["step_s"]
    alone, both = found["strong"]["sizes"]
    assert both["facts"]["elements"] == [16 * 64, 64, 64, 1]
    assert both["facts"]["links"]["message_s"] > 0
    for row in (alone, both):
        assert 3500 < row["queue_s"] <= 3600
        assert row["finish_s"] == pytest.approx(row["queue_s"] + 1000 * row["step_s"])
    assert found["strong"]["most"] == 4
    assert found["recommendation"].startswith("use ")


def test_each_step_is_counted_once(tmp_path: Path) -> None:
    """Including the last step of a run that ends within an epoch."""
    (tmp_path / "train.py").write_text(SCRIPT)
    variables = build_trace(DATA_LOADING, tmp_path, {"SAMESTEP_MAX_STEPS": "3"})
    check(run_command(sys.executable, "train.py", cwd=tmp_path, env=variables))
    assert [line["step"] for line in read_lines(tmp_path / "rank-0.jsonl")] == [0, 1, 2]


# Six plans, each of which predicts the steps of many batch sizes and ranks: 12 s, and 20 s on a busy machine.
def test_a_plan_keeps_the_budget(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is the smallest batch that fits, on the ranks that minimize what the budget does not limit."""
    file = str(home / "scale.json")
    model = StepModel.from_json(json.loads(Path(file).read_text())["model"])
    hours = {w: 1000 * model.predict(4, w) / 3600 for w in (1, 2, 4)}  # 32,000 samples, 32 at a time
    assert main(["plan", file, "--samples", "32000", "--time", str(1.01 * hours[1])]) == 0
    fitting = [w for w in hours if hours[w] <= 1.01 * hours[1]]
    cheapest = min(fitting, key=lambda w: w * hours[w])
    said = capsys.readouterr().out.splitlines()
    ranks = f"{cheapest} rank{'s' if cheapest > 1 else ''}"
    assert said[-1].startswith(f"use batch_size 32 and micro_batch_size 8 on {ranks}, which takes ")
    assert [row.split()[0] for row in said[2:8]] == ["32", "64", "128", "256", "512", "1024"]
    assert main(["plan", file, "--samples", "32000", "--rank-hours", "100"]) == 0
    fastest = min(hours, key=lambda w: hours[w])
    assert f"micro_batch_size 8 on {fastest} rank" in capsys.readouterr().out.splitlines()[-1]
    assert main(["plan", file, "--samples", "1e12", "--time", "0.001"]) == 1
    assert "nothing fits into 0.001 hours: the nearest is batch_size" in capsys.readouterr().out
    assert main(["plan", file, "--samples", "32000", "--time", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["choices"][found["chosen"]] == found["choices"][0]
    assert found["choices"][0]["fits"]
    assert [row["batch_size"] for row in found["choices"]] == [32 << k for k in range(6)]
    assert main(["plan", file, "--samples", "32000", "--time", "1"]) == 0
    assert capsys.readouterr().out.endswith(" rank-hours, within 1 hour\n")


def test_a_plan_shows_the_memory_of_a_rank(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without blocks, and SGD without state."""
    file = str(home / "scale.json")
    params = 4 * (16 * 64 + 64 + 64 + 1)
    sizes = json.loads(Path(file).read_text())["strong"]["sizes"][0]["facts"]["memory"]
    assert [row[0] for row in sizes] == [4 * 16 * 64, 4 * 64, 4 * 64, 4]
    assert main(["plan", file, "--samples", "32000", "--time", "1", "--json"]) == 0
    memory = {(row["world_size"], row["shard"]): row for row in json.loads(capsys.readouterr().out)["memory"]}
    assert {world_size for world_size, _ in memory} == {1, 2, 4, 8, 16, 32, 64}
    for shard in ("none", "optimizer"):
        assert memory[2, shard]["total"] == 2 * params
    part = 4 * (16 * 32 + 32 + 64 + 1)  # one row cannot be divided
    assert memory[2, "fsdp2"] == {
        "world_size": 2, "shard": "fsdp2", "parameters": part, "gradients": part, "optimizer_state": 0,
        "gathered_block": 2 * params, "total": 2 * part + 2 * params,
    }  # fmt: skip
    assert main(["plan", file, "--samples", "32000", "--time", "1"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\n  2 +fsdp2 +2.4 KB +2.4 KB +0 B +9.0 KB +14 KB\n", shown), shown
    assert "their division is computed; without activations" in shown


def test_a_plan_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text, sentence in [
        ("none", None, "cannot be read (No such file or directory)"),
        ("words", "hello", "cannot be read (it is not JSON)"),
        (
            "damaged",
            '{"format": 1, "strong": {}, "model": {}}',
            "is damaged: write it again with samestep scale --json",
        ),
        ("other", "{}", "is not the output of samestep scale --json: name such a file"),
    ]:
        if text is not None:
            (tmp_path / name).write_text(text)
        assert main(["plan", str(tmp_path / name), "--samples", "9", "--time", "1"]) == 2
        assert sentence in capsys.readouterr().err


def test_a_report_shows_it(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is given, or is in the run's directory."""
    run, found = tmp_path / "run", json.loads((home / "scale.json").read_text())
    numbers = {"seed": 0, "batch_size": 8, "micro_batch_size": 2, "data_length": 16, "mode": "epochs", "shuffle": True}
    record = {"format": 1, "samestep": "0.1.0", "numbers": {**numbers, "drop_last": False, "sampler": "default"}}
    write(run, {"run.json": json.dumps(record), "status.json": '{"status": "done", "reason": ""}'})
    page = tmp_path / "page.html"
    assert main(["report", str(run), "-o", str(page)]) == 0
    assert "<h2>Scaling" not in page.read_text()
    assert main(["report", str(run), "--scale", str(home / "scale.json"), "-o", str(page)]) == 0
    given_file = page.read_text()
    (run / "scale.json").write_text(json.dumps(found | {"recommendation": "<script>"}))
    assert main(["report", str(run), "-o", str(page)]) == 0
    for text in (given_file, page.read_text()):
        shown = text.partition("<h2>Scaling</h2>")[2].partition("</section>")[0]
        assert "<h3>strong scaling</h3>" in shown
        assert shown.count("<table>") == 4
        assert f"{found['weak']['sizes'][1]['efficiency']:.0%}" in shown
    assert "<p>train.py: &lt;script&gt;</p>" in page.read_text()
    (run / "scale.json").write_text("[]")
    capsys.readouterr()
    assert main(["report", str(run), "-o", str(page)]) == 2
    assert "is not the output of samestep scale --json" in capsys.readouterr().err


def line(at_s: float, num_samples: int = 8, **spent_s: float) -> dict[str, Any]:
    return {"at_s": at_s, "spent_s": spent_s, "num_samples": num_samples}


def test_where_the_time_of_a_step_goes() -> None:
    """Rank 1 computes for longer, so part of rank 0's time in the exchange is waiting."""
    fast = [line(i, forward=0.2 * i, backward=0.3 * i, reducing=0.4 * i, validating=0.1 * i) for i in range(7)]
    slow = [line(i, forward=0.2 * i, backward=0.5 * i, reducing=0.1 * i, validating=0.1 * i) for i in range(7)]
    size = Size(2, 16)
    add_steps(size, [fast, slow], "here")
    assert size.blocks_s == pytest.approx([0.9] * 5)  # without the validation
    assert size.error == pytest.approx(0)
    assert size.samples_per_s == pytest.approx(16 / 0.9)
    phases = size.phases_s
    assert phases["compute"] == pytest.approx(0.6)
    assert phases["exchange"] == pytest.approx(0.1)
    assert phases["waiting"] == pytest.approx(0.15)
    with pytest.raises(Error, match="here trains for 1 steps after the warm-up"):
        add_steps(size, [fast[:2], slow], "here")


@given(st.floats(0, 1), st.sets(st.integers(2, 64), min_size=1))
def test_laws_are_fitted(serial: float, sizes: set[int]) -> None:
    assert fit_amdahl({w: 3 * (serial + (1 - serial) / w) for w in (1, *sizes)}) == pytest.approx(serial, abs=1e-9)
    assert fit_gustafson({w: 5 * (w - serial * (w - 1)) for w in (1, *sizes)}) == pytest.approx(serial, abs=1e-9)


@given(st.floats(-0.1, 1), st.floats(0.001, 0.5), st.integers(1, 100))
def test_the_break_even_is_where_one_more_rank_saves_too_little(serial: float, gain: float, most: int) -> None:
    even, part = find_break_even(serial, gain, most), max(serial, 0.0)

    def saved(size: int) -> float:
        times = [part + (1 - part) / each for each in (size, size + 1)]
        return 1 - times[1] / times[0]

    assert all(saved(size) >= gain for size in range(1, even))
    assert even == most or saved(even) < gain


@pytest.mark.parametrize(
    ("steps_s", "sentence"),
    [
        ((100, 90, 120), "use 2 ranks: 1.11 times as fast as 1, at 56% efficiency; beyond 2 ranks, one more saves"),
        ((100, 50, 25), "use 4 ranks: 4.00 times as fast as 1, at 100% efficiency; a step has 8 micro-batches, so"),
        ((100, 97, 95), "use 1 rank: 2 were only 1.03 times as fast; beyond 1 rank, one more saves less than 5 % of"),
        ((100, 130, 90), "use 1 rank: 4 were only 1.11 times as fast; beyond 1 rank, one more saves"),
        ((100, 170, 180), "use 1 rank: more were not faster by more than the error; beyond 1 rank, one more saves"),
    ],
)
def test_the_recommendation(steps_s: tuple[float, ...], sentence: str) -> None:
    facts, phases = {"batch_size": 8, "micro_batch_size": 1}, {"compute": 1.0}
    measured = {
        size: Size(size, 8, facts, [step_s] * 5, [phases], [1.0], 8.0)
        for size, step_s in zip((1, 2, 4), steps_s, strict=True)
    }
    strong = summarize("strong", measured, 0.05)
    assert recommend({"strong": strong}, 5.0).startswith(sentence)
    add_finish(strong["sizes"], 1000, {1: 0.0, 2: 3600e3, 4: 3600e3})
    assert recommend({"strong": strong}, 5.0).startswith("use 1 rank: it finishes first, after ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--world-sizes", "2,4"], "--world-sizes needs 1, to which all is compared"),
        (["--world-sizes", "a"], "--world-sizes takes numbers of ranks"),
        (["--steps", "1"], "--steps must be a whole number of at least 2, not 1"),
        (["--cpu-quota", "0.01"], "--cpu-quota takes at least 0.1 cores, not 0.01"),
        (["--slurm"], "--slurm compares times to finish: give the length of the run, --for-steps N"),
        (["--partition", "main"], "--partition needs --slurm: add it"),
        (["--weak", "--for-steps", "9"], "--for-steps compares steps of the same size: add --strong"),
        (["--predict", "8", "--ranks-per-node", "4"], "--predict for several nodes needs --ranks-per-node N, and"),
        (["--predict", "8", "--ranks-per-node", "4", "--doctor", "none.json"], "--doctor none.json cannot be read (No"),
        (["--predict", "8", "--ranks-per-node", "4", "--link-mbit", "nan"], "--link-mbit is a number above 0, and"),
        (["--least-gain", "0"], "--least-gain is a percentage between 0 and 100, not 0"),
    ],
)
def test_bad_options(words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(0)")
    assert main(["scale", *words, str(tmp_path / "train.py")]) == 2
    assert sentence in capsys.readouterr().err


def test_links_are_those_of_doctor(tmp_path: Path) -> None:
    links = [{"latency_s": 1e-4, "bytes_per_s": 1e9}, {"latency_s": 2e-4, "bytes_per_s": 1e8}]
    findings = [{"check": "links", "measured": None}, {"check": "links", "measured": links}, {"check": "disk"}]
    (tmp_path / "doctor.json").write_text(json.dumps({"findings": findings}))
    assert find_remote({"doctor": str(tmp_path / "doctor.json")}) == pytest.approx((2e-4, 1e-8))
    assert find_remote({"link_mbit": 80.0}) == pytest.approx((50e-6, 1e-7))
    for text in ('{"findings": []}', "[]", "{"):
        (tmp_path / "doctor.json").write_text(text)
        with pytest.raises(Error, match=r"doctor.json has no links: write it by samestep doctor --json on two nodes"):
            find_remote({"doctor": str(tmp_path / "doctor.json")})


def test_a_script_that_does_not_train(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')")
    done = check(samestep_command("scale", "--world-sizes", "1,2", "train.py", cwd=tmp_path), 2)
    assert "error: train.py on 1 rank cannot be measured, it ends with exit code 0: hello" in done.stderr


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_groups_are_found(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/user/session/shell\n")
    files = {"user/session/cgroup.subtree_control": "cpu memory\n", "cgroup.subtree_control": "cpu\n"}
    write(tmp_path / "2", {**files, "user/session/shell/cgroup.subtree_control": ""})
    assert cpu_quota.find_parent(tmp_path / "2", own) == tmp_path / "2" / "user" / "session"
    own.write_text("4:cpu,cpuacct:/job\n0::/\n")
    write(tmp_path / "1", {"cpu/cpu.cfs_quota_us": "-1"})
    assert cpu_quota.find_parent(tmp_path / "1", own) == tmp_path / "1" / "cpu" / "job"
    with pytest.raises(Error, match="--cpu-quota needs control groups with CPU quotas"):
        cpu_quota.find_parent(tmp_path / "none", own)


def test_a_quota_limits_a_process() -> None:
    try:
        with cpu_quota.open_quota(0.2, 1) as options:
            if (pid := os.fork()) == 0:
                cpu_quota.begin(options)
                began_s, used_s = time.monotonic(), time.process_time()
                while time.monotonic() - began_s < 0.5:
                    pass
                os._exit(0 if time.process_time() - used_s < 0.2 else 1)
            assert os.waitpid(pid, 0)[1] == 0
    except (Error, OSError) as error:
        pytest.skip(str(error))
    assert not Path(options["group"]).exists()
