"""The script of docs/ray.md on a cluster that loses a node: Ray starts it again on fewer workers, with equal bits."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.runs import digest

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray[train]")

PAGE = Path(__file__).parents[2] / "docs" / "ray.md"
# Inserted after each update: the worker on the node that is lost kills the node's raylet, its parent, and itself.
LOSE_NODE = """
            if step.number == 12 and ray.is_initialized() and ray.get_runtime_context().get_node_id() == {node!r}:
                os.kill(os.getppid(), 9)
                os.kill(os.getpid(), 9)
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of one node with 2 CPUs. Its directory has a short name, as the paths of Unix sockets must have."""
    from ray.cluster_utils import Cluster

    handler = signal.getsignal(signal.SIGTERM)
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as directory:
        settings = {"RAY_TMPDIR": directory, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()
        signal.signal(signal.SIGTERM, handler)  # the head node has replaced it


@pytest.mark.timeout(900)  # a cluster with the processes of 2 nodes, and 3 starts of workers: 5 minutes on 2 busy cores
def test_ray_train_starts_again_on_fewer_workers(cluster: Any, tmp_path: Path) -> None:
    node = cluster.add_node(num_cpus=1)
    text = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    update = "            optimizer.step()\n"
    assert text.count(update) == 1
    (tmp_path / "on_ray.py").write_text(text.replace(update, update + LOSE_NODE.format(node=node.node_id)))
    done = subprocess.run([sys.executable, "on_ray.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 micro-batches on 3 ranks" in done.stdout + done.stderr
    restart = json.loads((tmp_path / "runs" / "ray" / "restarts.jsonl").read_text())
    assert restart["world_size"] == 2
    assert restart["from_step"] in (5, 10)

    alone = f"import on_ray; on_ray.main({{'run_dir': '{tmp_path}/runs/alone'}})"
    variables = os.environ | {"PYTHONHASHSEED": "0"}
    subprocess.run([sys.executable, "-c", alone], cwd=tmp_path, env=variables, check=True, capture_output=True)
    assert digest(tmp_path / "runs" / "ray") == digest(tmp_path / "runs" / "alone")
