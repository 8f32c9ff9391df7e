"""Type checkers accept the source and a script that uses the whole public API, and the script runs."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "scripts" / "typed.py"
CHECKERS = {"mypy": [], "basedpyright": ["--level", "error", "--pythonpath", sys.executable]}


@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_accept_it(checker: str) -> None:
    command = [Path(sys.executable).with_name(checker), *CHECKERS[checker]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_typed_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """In this process, whose fork server its `samestep.spawn` uses."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path / "run")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = capfd.readouterr().out.splitlines()
    for line in ("run starts at step 0", "0 2 2 ['error', 'loss', 'norm', 'size']", str(tmp_path / "run"), "done"):
        assert line in lines, lines
    assert lines[-1].startswith("loss ")
