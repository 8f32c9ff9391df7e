"""`samestep launch` accepts the command of the manifest in docs/kubernetes.md."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from samestep.cli import main
from samestep.world.environment import SECRET, START_AGAIN

PAGE = Path(__file__).parents[2] / "docs/kubernetes.md"


def test_launch_accepts_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but its script, which is in the image: launch says that there is none here."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    manifest = yaml.safe_load(block)
    (group,) = manifest["spec"]["replicatedJobs"]
    pods = group["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    words = shlex.split(container["command"][2].partition("exec samestep ")[2].replace("\\\n", ""))
    values = dict(pairwise(words))
    assert int(values["--nnodes"]) == pods["completions"] == pods["parallelism"]
    assert int(values["--nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert values["--node-rank"] == "$JOB_COMPLETION_INDEX", "which Kubernetes sets in each pod"
    assert pods["podFailurePolicy"]["rules"][0]["onExitCodes"] == {"operator": "In", "values": [START_AGAIN]}
    (variable,) = container["env"]
    monkeypatch.setenv(variable["name"], "the pods' secret")
    assert variable["name"] == SECRET
    monkeypatch.chdir(tmp_path)
    replaced = {values["--rdzv-endpoint"]: "127.0.0.1:29400", values["--node-rank"]: "0"}  # what only the cluster knows
    assert main([replaced.get(word, word) for word in words]) == 2
    assert "there is no script train.py" in capsys.readouterr().err
