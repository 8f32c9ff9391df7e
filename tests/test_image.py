"""The image and the development container install what CI installs."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ".ci/packages"


def read_instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile: (name, argument)."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    return [
        (name, argument) for line in lines if line and line[0] != "#" for name, _, argument in [line.partition(" ")]
    ]


def test_the_image_installs_what_ci_installs() -> None:
    commands = [argument for name, argument in read_instructions() if name == "RUN"]
    assert commands[0] == f"/opt/samestep/{PACKAGES}"
    assert re.search(rf"^ *{re.escape(PACKAGES)}", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert (ROOT / PACKAGES).stat().st_mode & 0o111
    extras = re.fullmatch(r'pip install --no-cache-dir "/opt/samestep\[(\w+)\]"', commands[1])
    assert extras
    assert extras[1] in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert len(commands) == 2


def test_the_bases_of_the_image_have_python_and_a_supported_torch() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert ("ARG", "BASE=python:3.11-slim") in read_instructions()
    (version,) = re.findall(r"BASE=pytorch/pytorch:(\d+\.\d+)\.\d+-cuda\d+\.\d+-cudnn\d+-runtime ", text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (least, limit) = re.findall(r"torch>=(\d+\.\d+),<(\d+\.\d+)", project["dependencies"][0])[0]
    assert [*map(int, least.split("."))] <= [*map(int, version.split("."))] < [*map(int, limit.split("."))]


def test_the_packages_are_installed_or_their_absence_is_an_error() -> None:
    script = (ROOT / PACKAGES).read_text()
    subprocess.run(["bash", "-n", ROOT / PACKAGES], check=True)
    assert "set -euo pipefail" in script
    (names,) = re.findall(r"^packages=\((.*)\)$", script, re.MULTILINE)
    assert {"make", "slurmd", "openssh-server", "zsh"} <= set(names.split())


def test_the_development_container_is_built_from_the_image() -> None:
    directory = ROOT / ".devcontainer"
    settings = json.loads((directory / "devcontainer.json").read_text())
    assert (directory / settings["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (directory / settings["build"]["context"]).resolve() == ROOT
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
