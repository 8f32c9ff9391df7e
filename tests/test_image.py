"""The image to train in."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.release
ROOT = Path(__file__).parents[1]


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
