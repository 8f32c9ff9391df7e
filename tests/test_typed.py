"""The script by which type checkers check the whole public API (`make types`) runs."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("scripts") / "typed.py"


def test_typed_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """In this process, whose fork server its `samestep.spawn` uses."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path / "run")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = capfd.readouterr().out.splitlines()
    for line in ("run starts at step 0", "0 2 2 ['error', 'loss', 'norm', 'size']", str(tmp_path / "run"), "done"):
        assert line in lines, lines
    assert lines[-1].startswith("loss ")
