"""A script that type checkers accept (`make test` runs them on it) does what its types say."""

import sys
from pathlib import Path

from support.commands import run

SCRIPT = Path(__file__).with_name("scripts") / "typed.py"


def test_typed_script_runs(tmp_path: Path) -> None:
    done = run([sys.executable, SCRIPT, tmp_path / "run"], capture_output=True, text=True, check=True, cwd=tmp_path)
    for line in ("run starts at step 0", "0 2 2 ['error', 'loss', 'norm', 'size']", str(tmp_path / "run"), "done"):
        assert line in done.stdout.splitlines(), done.stdout
    assert done.stdout.splitlines()[-1].startswith("loss ")
