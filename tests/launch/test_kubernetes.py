"""`samestep launch` accepts the command of the manifest in docs/kubernetes.md."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from samestep.cli import main
from samestep.world.environment import SECRET, START_AGAIN

ROOT = Path(__file__).parents[2]


@pytest.fixture
def manifest() -> Any:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/kubernetes.md").read_text(), re.MULTILINE | re.DOTALL)
    return yaml.safe_load(block)


def find_pods(manifest: Any) -> Any:
    (group,) = manifest["spec"]["replicatedJobs"]
    return group["template"]["spec"]


def read_launch(container: Any) -> list[str]:
    """The words that start the launcher."""
    shell, flag, text = container["command"]
    assert (shell, flag) == ("sh", "-c")
    return shlex.split(text.partition("exec samestep ")[2].replace("\\\n", ""))


def test_launch_accepts_the_command(
    manifest: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but its script, which is in the image: launch says that there is none here."""
    name, pods = manifest["metadata"]["name"], find_pods(manifest)
    (container,) = pods["template"]["spec"]["containers"]
    words = read_launch(container)
    endpoint = words.index("--rdzv-endpoint") + 1
    assert words[endpoint] == f"{name}-node-0-0.{name}:29400", "the first pod"
    assert manifest["spec"]["network"]["subdomain"] == name
    assert f"getent hosts {name}-node-0-0.{name};" in container["command"][2]
    assert int(words[words.index("--nnodes") + 1]) == pods["completions"] == pods["parallelism"]
    assert int(words[words.index("--nproc-per-node") + 1]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert words[-3:] == ["train.py", "--lr", "0.1"]
    (variable,) = container["env"]
    assert variable["name"] == SECRET
    assert variable["valueFrom"]["secretKeyRef"]["name"] == f"{name}-rdzv"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SECRET, "the pods' secret")
    words[endpoint] = "127.0.0.1:29400"  # as a name that only the cluster knows
    rank = words.index("--node-rank") + 1
    assert words[rank] == "$JOB_COMPLETION_INDEX", "which Kubernetes sets in each pod"
    words[rank] = "0"
    assert main(words) == 2
    assert "there is no script train.py" in capsys.readouterr().err


def test_the_run_outlives_its_pod(manifest: Any) -> None:
    """Its directory is on the claim, which the image's user can write on; a run that has saved starts again."""
    pods = find_pods(manifest)
    pod = pods["template"]["spec"]
    (container,) = pod["containers"]
    words = read_launch(container)
    (claim,) = [volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    (mounted,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == claim]
    assert Path(mounted) in Path(words[words.index("--run-dir") + 1]).parents
    assert re.search(rf"^USER {pod['securityContext']['fsGroup']}:", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert pods["podFailurePolicy"]["rules"][0]["onExitCodes"] == {"operator": "In", "values": [START_AGAIN]}
    assert pod["terminationGracePeriodSeconds"] > 30  # more than a pod gets otherwise
