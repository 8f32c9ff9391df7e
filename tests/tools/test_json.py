"""Each command that prints facts prints them with --json, as one object with the entries that the documentation names.

Commands that start a script are tested where they start one, by `read_facts`.
"""

import os
from pathlib import Path
from typing import Any

import click
import pytest
from support.runs import DOCUMENTED, ask, read_facts
from support.tiny import tiny_run

from samestep.cli import COMMANDS, program

STARTING = ("train", "launch", "node")  # they print what the script prints
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {  # command -> its arguments, and some of the facts
    "inspect": (["one"], {"heals": [], "checked": False}),
    "inspect --digest": (["one"], {"step": 8, "name": None}),
    "inspect --samples": (["one"], {"audit": {"passed": True, "problems": []}}),
    "runs": (["."], {}),
    "diff": (["one", "two"], {"same": True, "common_steps": 8, "first_differing_step": None}),
    "watch": (["one"], {"ranks": []}),
    "report": (
        ["one", "two"],
        {"file": "report.html", "runs": ["one", "two"],
         "comparison": ["one and two: identical in all 8 steps that both have"]},
    ),
    "export": (
        ["one", "model.safetensors"],
        {"file": "model.safetensors", "object": "model", "step": 8, "num_tensors": 2, "left_out": []},
    ),
    "submit": (["--dry-run", "mlp"], {"job": None, "file": None, "output": None}),
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two equal runs of 8 steps."""
    home = tmp_path_factory.mktemp("json")
    for name in ("one", "two"):
        tiny_run(home / name)
    return home


@pytest.mark.parametrize("command", CASES)
def test_facts(command: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    words, expected = CASES[command]
    facts = read_facts(command, ask(*command.split(), "--json", *words))
    assert {name: facts[name] for name in expected} == expected
    if "size_bytes" in facts:
        assert facts["size_bytes"] == os.path.getsize(facts["file"])


def test_a_submitted_job(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    (home / "sbatch").write_text("#!/bin/sh\necho '7;cluster'\n")
    (home / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    facts = read_facts("submit", ask("submit", "--json", "mlp"))
    assert (facts["job"], facts["output"]) == ("7", "slurm/7.out")
    assert Path(facts["file"]).read_text() == facts["script"]


def test_every_command_has_it() -> None:
    assert {command.partition(" ")[0] for command in DOCUMENTED} == {*COMMANDS} - {*STARTING}
    context = click.Context(program)
    for name in {*COMMANDS} - {*STARTING}:
        command = program.get_command(context, name)
        assert command is not None
        assert "--json" in [flag for param in command.params for flag in param.opts], name
