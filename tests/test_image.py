"""The image to train in."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

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


def test_the_image_to_train_in_is_the_default_and_does_not_run_as_root() -> None:
    assert [*read_stages()] == ["", "develop", "train"]
    (user,) = list_arguments("train", "USER")
    assert re.fullmatch(r"([1-9]\d*):\1", user), "a number, which Kubernetes can compare with 0"
    (extras,) = [each.partition("=")[2] for each in list_arguments("train", "ARG") if each.startswith("EXTRAS=")]
    assert {*extras.split(",")} <= {
        *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    }
    assert not any(PACKAGES.partition("/")[0] in each for each in list_arguments("train", "COPY"))


def test_the_bases_of_the_image_have_python_and_a_supported_torch() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert ("ARG", "BASE=python:3.11-slim") in read_stages()[""]
    (version,) = re.findall(r"BASE=pytorch/pytorch:(\d+\.\d+)\.\d+-cuda\d+\.\d+-cudnn\d+-runtime ", text)
    assert version >= "2.11", "the oldest that pyproject.toml permits"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_image_runs() -> None:
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker engine")
    subprocess.run(["docker", "build", "-q", "-t", "samestep-test", ROOT], check=True)
    done = subprocess.run(["docker", "run", "--rm", "samestep-test", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("samestep "), done.stderr
