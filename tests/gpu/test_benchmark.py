"""Benchmarks for GPUs, on the CPU: they run unattended, and a GPU may be available only briefly."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import clean_variables

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.release
@pytest.mark.timeout(300)
def test_a_certificate_of_the_cpu(tmp_path: Path) -> None:
    """It takes at most 1.5 minutes: runs for which there is no time left say so."""
    command = [sys.executable, SCRIPT.with_name("certificate.py"), "--quick", "--max-ranks", "2", "--minutes", "1.5"]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_variables(), cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "certificate.json").read_text())["rows"]
    assert [row["outcome"] for row in rows[:2]] == ["first", "same"]
    for row in rows:
        assert row["outcome"] in ("first", "same", "baseline", "not run"), row
        assert (row["outcome"] == "not run") == bool(row["note"])
    lines = (tmp_path / "certificate.md").read_text().splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == 2 + len(rows)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_every_part_runs_on_the_cpu() -> None:
    command = [sys.executable, SCRIPT, "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_variables(), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(json.loads(done.stdout)["summary"]) == ["train", "syncs", "step", "loader", "snapshot"]
