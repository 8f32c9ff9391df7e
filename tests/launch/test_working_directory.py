"""A file in the working directory, such as a run's that others can write, shadows no module of a samestep command."""

import subprocess
import sys
from pathlib import Path

import pytest

from samestep.launch.target import COMMAND, Target

PLANTED = "open('planted-has-run', 'w').close()\n"
RUN_AS_RANK = (
    "from samestep.launch.rank_process import load_main; load_main('module', 'samestep', ['doctor']); import bz2"
)


@pytest.mark.parametrize(
    "command",
    [
        Target("script", "train.py").to_full_command(2),
        Target("module", "train").to_full_command(2),
        Target("recipe", "samestep.recipes.digits").to_full_command(2),
        [*COMMAND, "launch"],
        [sys.executable, "-P", "-c", RUN_AS_RANK],
        ["samestep"],
    ],
    ids=lambda command: " ".join(command)[-60:],
)
def test_a_command_imports_nothing_from_the_working_directory(tmp_path: Path, command: list[str]) -> None:
    for name in ("argparse", "bz2", "json", "samestep", "torch"):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    if command == ["samestep"]:
        command = [str(Path(sys.executable).with_name("samestep")), "--version"]
    elif "samestep" in command:  # as far as the command's name, and a command that imports no torch
        command = [*command[: command.index("samestep") + 1], "runs", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert not (tmp_path / "planted-has-run").exists(), done.stderr
