"""The wheel, the source distribution and the image are built without warnings, and work."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import samestep

pytestmark = pytest.mark.release
ROOT = Path(__file__).parents[1]
TRAIN = """
import samestep, torch

run = samestep.Run("run", batch_size=8, micro_batch_size=4)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.prepare(model=model, optimizer=optimizer)
for epoch in run.epochs(torch.ones(16, 2), 1):
    for step in epoch:
        for x in step:
            step.backward(model(x).mean())
        optimizer.step()
print(samestep.__file__)
"""


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it, as for an index."""
    pytest.importorskip("hatchling", reason="hatchling builds the packages: make .venv/installed-dev")
    directory = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-W", "error", "-m", "hatchling", "build", "--directory", directory]
    said = run(*build, "--target", "sdist", cwd=ROOT)
    (source,) = directory.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(directory, filter="data")
    (unpacked,) = (path for path in directory.iterdir() if path.is_dir())
    said += run(*build, "--target", "wheel", cwd=unpacked)
    (wheel,) = directory.glob("*.whl")
    assert "warn" not in said.lower()
    return source, wheel


def test_the_source_distribution_has_what_its_tests_need(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    left_out = {name for name in tracked if not name.startswith(".") and name != "Dockerfile"} - names
    assert not left_out


# A launch and doctor, in new interpreters that import torch: 73 s, and 80 s on a busy machine.
def test_the_wheel_works_in_an_empty_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Its dependencies are those of this environment, found by a path file: torch takes minutes to install."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(packages)
        metadata = next(name for name in wheel.namelist() if name.endswith("METADATA"))
        text = wheel.read(metadata).decode()
    assert re.search(rf"^Version: {re.escape(samestep.__version__)}$", text, re.M)
    (packages / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    (tmp_path / "train.py").write_text(TRAIN)
    said = run(python, "-m", "samestep", "launch", "--nproc-per-node", "2", "train.py", cwd=tmp_path)
    assert str(packages / "samestep") in said
    assert "pass" in run(python, "-m", "samestep", "doctor", "--run-dir", tmp_path / "runs", cwd=tmp_path)


def test_all_files_name_one_version() -> None:
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert cited[1] == newest[1] == samestep.__version__
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]


# --- the image to train in --------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_image_runs() -> None:
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker engine")
    subprocess.run(["docker", "build", "-q", "-t", "samestep-test", ROOT], check=True)
    done = subprocess.run(["docker", "run", "--rm", "samestep-test", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("samestep "), done.stderr
    command = ["docker", "run", "--rm", "--entrypoint", "id", "samestep-test", "-u"]
    user = subprocess.run(command, capture_output=True, text=True).stdout
    assert int(user) > 0, "it runs as root"
