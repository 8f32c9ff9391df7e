"""A Keras model on the torch backend, trained by the loop of docs/coming-from.md."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.runs import digest, read_rows, samestep_command

pytestmark = pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed")

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


def write(directory: Path, name: str) -> str:
    """Write a script of the page. Returns it."""
    (script,) = re.findall(rf"^```python\n(# {name}\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (directory / name).write_text(script)
    return str(script)


def test_the_same_bits_at_any_number_of_ranks(tmp_path: Path) -> None:
    write(tmp_path, "task.py")
    write(tmp_path, "with_keras.py")
    runs = {1: ["--nproc-per-node", "1"], 2: ["--nproc-per-node", "2"], 3: ["--nproc-per-node", "3"]}
    for name, options in runs.items():
        done = samestep_command("launch", *options, "--run-dir", f"{name}", "with_keras.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for options in (["--max-steps", "20"], []):
        samestep_command("launch", *runs[2], "--run-dir", "parts", *options, "with_keras.py", cwd=tmp_path)
    assert len({digest(tmp_path / name) for name in ("1", "2", "3", "parts")}) == 1
    losses = [row["train/loss"] for row in read_rows(tmp_path / "2") if "train/loss" in row]
    assert losses[-1] < 0.6 * losses[0]


def test_batch_normalization_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "task.py")
    script = write(tmp_path, "with_keras.py").replace("LayerNormalization", "BatchNormalization")
    (tmp_path / "with_keras.py").write_text(script)
    done = samestep_command("launch", "--nproc-per-node", "2", "with_keras.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "moving_mean was changed inside the micro-batch loop" in done.stderr
