"""Errors before a run exists end with one sentence and exit code 2, as those of a run do."""

import sys
from pathlib import Path

import pytest
from support.runs import run_command

WITHOUT = "import sys\nsys.modules['transformers'] = None\nimport samestep.adapters.transformers\n"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["train.py"], "pip install 'samestep[transformers]'"),
        (["-m", "samestep.recipes.gpt", "--data", "missing"], "the token file missing cannot be read"),
    ],
    ids=["adapter", "recipe"],
)
def test_a_sentence_and_no_traceback(command: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WITHOUT)
    done = run_command(sys.executable, *command, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("samestep: error: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
