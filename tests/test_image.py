"""The images install what training and the tests need, and the development container is built from the latter."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from samestep.world.version_check import explain_torch

pytestmark = pytest.mark.release
ROOT = Path(__file__).parents[1]
PACKAGES = ".ci/packages"


def read_stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of the Dockerfile by stage: (name, argument). Those before the first stage have the name ""."""
    stages: dict[str, list[tuple[str, str]]] = {"": []}
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line and line[0] != "#":
            name, _, argument = line.partition(" ")
            if name == "FROM":
                stages[argument.rpartition(" AS ")[2]] = []
            else:
                [*stages.values()][-1].append((name, argument))
    return stages


def list_arguments(stage: str, name: str) -> list[str]:
    return [argument for each, argument in read_stages()[stage] if each == name]


def test_the_image_to_develop_in_installs_what_ci_installs() -> None:
    """Before any other file is copied, so that a change of these does not install them again."""
    (copied,) = list_arguments("develop", "COPY")
    assert copied.split() == [PACKAGES, *list_arguments("develop", "RUN")]
    assert re.search(rf"^ *{re.escape(PACKAGES)}$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert (ROOT / PACKAGES).stat().st_mode & 0o111


def test_the_image_to_train_in_is_the_default_and_does_not_run_as_root() -> None:
    assert [*read_stages()] == ["", "develop", "train"]
    (user,) = list_arguments("train", "USER")
    assert re.fullmatch(r"([1-9]\d*):\1", user), "a number, which Kubernetes can compare with 0"
    (extras,) = [each.partition("=")[2] for each in list_arguments("train", "ARG") if each.startswith("EXTRAS=")]
    assert {*extras.split(",")} <= {
        *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    }
    assert not any(PACKAGES.partition("/")[0] in each for each in list_arguments("train", "COPY"))


def test_the_image_copies_what_a_build_of_the_package_reads() -> None:
    """First only that, so that a change of a module installs no other package again, then the modules."""
    first, second, modules = [each.split()[:-1] for each in list_arguments("train", "COPY")]
    text = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hatch = text["tool"]["hatch"]
    fragments = [each["path"] for each in hatch["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]]
    needed = [hatch["version"]["path"], "src/samestep/__init__.py", *fragments, *text["project"]["license-files"]]
    assert {*first, *second} == {"pyproject.toml", *needed}
    assert modules == ["src"]
    assert all((ROOT / each).exists() for each in (*first, *second, *modules))


def test_the_bases_of_the_image_have_python_and_a_supported_torch() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert ("ARG", "BASE=python:3.11-slim") in read_stages()[""]
    (version,) = re.findall(r"BASE=pytorch/pytorch:(\d+\.\d+)\.\d+-cuda\d+\.\d+-cudnn\d+-runtime ", text)
    assert explain_torch(version) == ""


def test_the_packages_are_installed_or_their_absence_is_an_error() -> None:
    script = (ROOT / PACKAGES).read_text()
    subprocess.run(["bash", "-n", ROOT / PACKAGES], check=True)
    assert "set -euo pipefail" in script
    (names,) = re.findall(r"^packages=\((.*)\)$", script, re.MULTILINE)
    assert {"make", "slurmd", "zsh"} <= set(names.split())


def test_the_development_container_is_built_from_the_image() -> None:
    directory = ROOT / ".devcontainer"
    settings = json.loads((directory / "devcontainer.json").read_text())
    assert (directory / settings["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (directory / settings["build"]["context"]).resolve() == ROOT
    assert settings["build"]["target"] == "develop"
    target = settings["postCreateCommand"].removeprefix("make ").replace(".venv", "$(VENV)")
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_image_runs() -> None:
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker engine")
    subprocess.run(["docker", "build", "-q", "-t", "samestep-test", ROOT], check=True)
    done = subprocess.run(["docker", "run", "--rm", "samestep-test", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("samestep "), done.stderr
