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

WITHOUT = ("train", "launch", "node", "slurm")  # they print what the script prints, or a script
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {  # command -> its arguments, and some of the facts
    "inspect": (["one"], {"heals": [], "checked": False}),
    "inspect --digest": (["one"], {"step": 8, "name": None}),
    "inspect --samples": (["one"], {"audit": {"passed": True, "problems": []}}),
    "runs": (["."], {}),
    "diff": (["one", "two"], {"same": True, "common_steps": 8, "first_differing_step": None}),
    "watch": (["one"], {"ranks": []}),
    "report": (["one", "two"], {"file": "report.html", "runs": ["one", "two"]}),
    "export": (
        ["one", "model.safetensors"],
        {"file": "model.safetensors", "object": "model", "step": 8, "num_tensors": 2, "left_out": []},
    ),
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


def test_every_command_has_it() -> None:
    assert {command.partition(" ")[0] for command in DOCUMENTED} == {*COMMANDS} - {*WITHOUT}
    context = click.Context(program)
    for name in {*COMMANDS} - {*WITHOUT}:
        params = program.get_command(context, name).params
        assert "--json" in [flag for param in params for flag in param.opts], name
