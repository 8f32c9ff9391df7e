"""Benchmarks for GPUs, on the CPU: they run unattended, and a GPU may be available only briefly."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.runs import clean_variables

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a script as a module, until the end of the test."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", SCRIPT.with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)  # which its dataclasses ask for
    spec.loader.exec_module(script)
    return script


@pytest.mark.release
@pytest.mark.timeout(300)
def test_a_certificate_of_the_cpu(tmp_path: Path) -> None:
    """It takes at most 1.5 minutes: runs for which there is no time left say so."""
    words = ["--quick", "--max-ranks", "2", "--minutes", "1.5"]
    command = [sys.executable, SCRIPT.with_name("certificate.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_variables(), cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "certificate.json").read_text())["rows"]
    assert [row["outcome"] for row in rows[:2]] == ["first", "same"]
    for row in rows:
        assert row["outcome"] in ("first", "same", "baseline", "not run"), row
        assert (row["outcome"] == "not run") == bool(row["note"])
    lines = (tmp_path / "certificate.md").read_text().splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == 2 + len(rows)


def test_a_certificate_of_two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without them: which runs it starts, by which commands, and what it says about the others."""
    certificate = load("certificate", monkeypatch)
    commands = []

    def execute(machine: Any, command: list[str], output: Path, follow: Any = None) -> None:
        commands.append(" ".join(command))
        output.write_text("no GPU is here")
        raise certificate.Failed("exit code 1", output)

    monkeypatch.setattr(certificate, "execute", execute)
    monkeypatch.setattr(certificate.shutil, "which", lambda name: name)
    machine = certificate.Machine("cuda", certificate.RECIPES["cuda"], 2, 989e12, tmp_path, math.inf)
    rows = [row for group in certificate.GROUPS for row in certificate.run_group(machine, group, (1, 2, 4, 8))]
    assert {row.note for row in rows if row.ranks == 4} == {"needs 4 GPUs"}
    assert {row.note for row in rows if row.ranks == 8} == {"needs 8 GPUs"}
    started = [row for row in rows if row.ranks <= 2]
    assert {(row.outcome, row.output) for row in started} == {("FAILED", "no GPU is here")}
    assert len(started) == len(commands)
    for row, command in zip(started, commands, strict=True):
        assert f"--nproc-per-node {row.ranks} " in command
        assert " cuda " in command
        assert "--backend" not in command  # NCCL is the default on GPUs
    assert {row.ranks for row in started if "--heal" in row.run or "--max-restarts" in row.run} == {2}


def test_groups_of_a_certificate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    certificate = load("certificate", monkeypatch)
    judged = certificate.judge([certificate.Row("a", 2, "", digest=digest) for digest in (None, "x", "x", "y")])
    assert [row.outcome for row in judged] == ["not run", "first", "same", "DIFFERENT"]
    assert certificate.summarize(judged) == ["a: 3 runs, 2 digests"]
    machine = certificate.Machine("cuda", certificate.RECIPES["cuda"], 2, 989e12, tmp_path, math.inf)
    group = next(group for group in certificate.GROUPS if group.has_baselines)
    assert machine.compute_mfu(group, 2, 0.1) == pytest.approx(0.28, abs=0.01)  # 65,536 tokens of 856 Mflop


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_every_part_runs_on_the_cpu() -> None:
    command = [sys.executable, SCRIPT, "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_variables(), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["summary"]
    assert list(rows) == ["train", "syncs", "step", "loader", "snapshot"]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["gpt.py", "input_path.py"])
def test_others_run_quickly(name: str, tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT.with_name(name), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_variables(), cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) > 4
