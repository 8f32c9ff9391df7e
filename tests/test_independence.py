"""Features are independent: without the modules of one, runs have the same bits, and the other commands are there.

A run must not even try to import the modules of a feature that it does not use. So a run without all of them at once
implies the others.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.blocked import block_in_programs
from support.runs import check, digest, run_command, samestep_command

from samestep.cli import COMMANDS

pytestmark = pytest.mark.release
SOURCE = Path(__file__).parents[1] / "src" / "samestep"
# Each module and package in these is a feature of its own if it is in none of the tables below.
FOLDERS = ("adapters", "recipes", "sources", "tools")
# Feature -> its modules and packages, if they are several or not in FOLDERS.
PARTS = {
    "second opinions": ["second_opinion"],
    "copies on other nodes": ["snapshot.copies"],
    "runs at URLs": ["snapshot.mirror"],
    "TF_CONFIG": ["launch.tf_config"],
    "trackers": ["watch.tracker_services"],
    "doctor": ["tools.doctor", "tools.doctor_checks", "tools.examination"],
    "Lightning": ["adapters.lightning", "adapters.lightning_metrics"],
}
# The modules in FOLDERS that several features use.
SHARED = {
    "tools.inspect": "reads run directories for several commands, and shows the digest",
    "tools.launch_command": "starts the ranks",
    "tools.traced_script": "starts the script for several tools",
    "tools.tracer": "the interceptor of several tools",
}
# Feature -> those without which its commands cannot start.
NEEDS = {
    "recipes.gpt": ["sources.token_windows"],
    "tools.report": ["tools.audit"],
}


def find_features() -> dict[str, list[str]]:
    """Return the modules and packages of each feature."""
    placed = {name for names in PARTS.values() for name in names} | {*SHARED}
    there = {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for folder in FOLDERS
        for path in (SOURCE / folder).iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    there -= {folder.replace("/", ".") for folder in FOLDERS}
    return PARTS | {name: [name] for name in sorted(there - placed) if not name.endswith(".__init__")}


FEATURES = find_features()
TRAIN = "import sys\nfrom support.tiny import tiny_run\ntiny_run(sys.argv[1], num_epochs=1)\n"
ASK = """
import json, sys
from samestep.cli import COMMANDS, main
print(json.dumps({name: main([name, "--help"]) for name in COMMANDS}), file=sys.stderr)
"""


def find_commands(features: Iterable[str]) -> set[str]:
    """Return the commands of these features."""
    names = [f"{name}." for feature in features for name in FEATURES[feature]]
    return {command for command, (_, _, module) in COMMANDS.items() if f"{module}.".startswith((*names,))}


def test_the_tables_name_modules() -> None:
    named = [name for names in PARTS.values() for name in names] + [*SHARED]
    paths = [SOURCE / name.replace(".", "/") for name in named]
    assert [path for path in paths if not path.is_dir() and not path.with_suffix(".py").is_file()] == []
    assert len({*named}) == len(named)
    assert {*NEEDS, *(name for names in NEEDS.values() for name in names)} <= {*FEATURES}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the run with all features."""
    directory = tmp_path_factory.mktemp("whole")
    (directory / "train.py").write_text(TRAIN)
    check(run_command(sys.executable, "train.py", "run", cwd=directory, env={"PYTHONPATH": str(Path(__file__).parent)}))
    return digest(directory / "run")


# New interpreters import torch: a script, a launch, and the commands after them: 36 s, and 40 s on a busy machine.
def test_without_all_features(tmp_path: Path, expected: str) -> None:
    without = [*FEATURES]
    names = [f"samestep.{name}" for each in without for name in FEATURES[each]]
    variables = block_in_programs(names, tmp_path / "hook")
    (tmp_path / "train.py").write_text(TRAIN)
    check(run_command(sys.executable, "train.py", "one", cwd=tmp_path, env=variables))
    check(samestep_command("launch", "--nproc-per-node", "2", "train.py", "two", cwd=tmp_path, env=variables))
    for run in ("one", "two"):
        shown = check(samestep_command("inspect", run, "--digest", cwd=tmp_path, env=variables)).stdout
        assert shown == f"{expected}\n"
    listed = check(samestep_command("--help", cwd=tmp_path, env=variables)).stdout
    assert all(f"samestep {command} " in listed for command in COMMANDS)
    tried = tmp_path / "hook" / "tried"
    assert not tried.exists(), f"these were imported without need:\n{tried.read_text()}"

    asked = check(run_command(sys.executable, "-c", ASK, cwd=tmp_path, env=variables))
    *sentences, codes = asked.stderr.splitlines()
    assert {*json.loads(codes).values()} <= {0, 2}
    failed = {command for command, code in json.loads(codes).items() if code}
    assert len(sentences) == len(failed)
    assert all("is not installed: install samestep again" in sentence for sentence in sentences)
    dependent = [feature for feature, needed in NEEDS.items() if {*needed} & {*without}]
    assert find_commands(without) <= failed <= find_commands([*without, *dependent])
