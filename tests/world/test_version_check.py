"""The comparison of versions and scripts of the ranks."""

import json
import os
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.runs import check, run_command

import samestep
from samestep.errors import Error
from samestep.world.version_check import TORCH_VERSIONS, check_alike, describe_software, explain_hashing, explain_torch

ROOT = Path(__file__).parents[2]
ASK = "import json; from samestep.world.version_check import describe_software; print(json.dumps(describe_software()))"


def build(**changes: Any) -> dict[str, Any]:
    return {**describe_software(), "host": "a", "file": "train.py", "script": "0" * 12, **changes}


def test_equal_files_may_have_different_paths() -> None:
    check_alike(dict(enumerate([build(), build(host="b", file="other.py")])))


@pytest.mark.parametrize("name", ["samestep", "torch", "Python"])
def test_versions_that_differ(name: str) -> None:
    usual = build()
    with pytest.raises(Error) as caught:
        check_alike(dict(enumerate([usual, usual, build(host="b", **{name: "0.1"}), build(host="c", **{name: "0.2"})])))
    assert str(caught.value) == (
        f"rank 2 on b has another {name} than rank 0 on a (0.1, not {usual[name]}): make them the same on all ranks"
    )


def test_scripts_that_differ() -> None:
    """A program without a file is not compared."""
    check_alike(dict(enumerate([build(script=None), build(), build(script=None)])))
    with pytest.raises(Error, match=r"rank 3 on b runs another train\.py than rank 1 on a \(1, not 0{12}\)"):
        check_alike(dict(enumerate([build(script=None), build(), build(), build(host="b", script="1")])))


def test_hashes_that_differ_are_explained_once() -> None:
    usual = build(hashing=1)
    assert explain_hashing([usual, usual]) == ""
    others = [build(host="b", hashing=2), build(host="c", hashing=3)]
    check_alike(dict(enumerate([usual, *others])))
    said = explain_hashing([usual, usual, *others])
    assert said.startswith("ranks hash strings differently, such as rank 2 on b and rank 0 on a, so that the order")


def test_a_rank_that_hashes_strings_differently_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    def start(filter_: str = "default") -> None:
        from samestep.world import group_opening

        warnings.filterwarnings(filter_, "ranks hash strings differently")  # type: ignore[arg-type]

        usual = group_opening.describe_software()
        if os.environ["RANK"] == "1":
            group_opening.describe_software = lambda: {**usual, "hashing": usual["hashing"] + 1}
        samestep.Run(None, batch_size=3, micro_batch_size=1)

    samestep.spawn(start, 3)
    said = capfd.readouterr().err
    assert said.count("rank 1 on ") == said.count("samestep: ranks hash strings differently") == 1
    samestep.spawn(start, 2, ("ignore",))
    assert "hash strings" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("version", "is_supported"),
    [("2.11.0", True), ("2.15.1+cu130", True), ("2.16.0a0+git1", False), ("2.9.1", False), ("3.0", False), ("?", True)],
)
def test_an_unsupported_torch_is_warned_of(version: str, is_supported: bool) -> None:
    assert (explain_torch(version) == "") == is_supported


def test_the_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"][0] == f"torch>={TORCH_VERSIONS[0]}", "an upper bound would refuse a newer torch"
    assert f"torch {' to '.join(TORCH_VERSIONS)}" in (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert all(f'TORCH="torch=={version}.*"' in makefile for version in TORCH_VERSIONS)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_start_warns_once_of_an_unsupported_torch(capfd: pytest.CaptureFixture[str], num_ranks: int) -> None:
    def start() -> None:
        import torch

        torch.__version__ = "2.10.0"
        for _ in range(2):
            samestep.Run(None, batch_size=2, micro_batch_size=1)

    samestep.spawn(start, num_ranks)
    said = capfd.readouterr().err
    assert said.count("torch 2.10.0 is installed, and samestep supports 2.11 to 2.15: ") == 1, said


def test_a_program_in_no_file(tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text(ASK)
    scripts = [
        json.loads(check(run_command(sys.executable, *words, cwd=tmp_path)).stdout)["script"]
        for words in (["-c", ASK], ["ask.py"])
    ]
    assert scripts[0] is None
    assert len(scripts[1]) == 12
