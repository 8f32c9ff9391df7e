"""`samestep doctor` over several hosts (network namespaces): faults of a host are named."""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.commands import Popen
from support.hosts import Host, run
from support.runs import clean_variables, kill_tree
from support.waiting import DEADLINE_S

DOCTORED = Path(__file__).with_name("doctored.py")
PORT = 29430


def run_on(hosts: Sequence[Host], cwd: Path, *words: str, own: Path | None = None) -> tuple[dict[str, Any], list[int]]:
    """Run the doctor with one rank on each host, started by samestep launch. Args: own: a path that is a
    different directory on each host. Returns: Its report, and the exit codes.
    """
    number = 0
    with ExitStack() as stack:
        processes = []
        for rank, host in enumerate(hosts):
            flags = [f"--nnodes={len(hosts)}", f"--node-rank={rank}", f"--rdzv-endpoint={hosts[0].address}:{PORT}"]
            command = [sys.executable, "-m", "samestep", "launch", "--nproc-per-node=1", *flags, str(DOCTORED)]
            variables = {"OMP_NUM_THREADS": "1"}
            command += words
            if own is not None:
                mount = f'mount -t tmpfs none {own} && exec "$@"'
                command = ["unshare", "-m", "sh", "-c", mount, "sh", *command]
            process = Popen(
                command,
                host=host,
                cwd=cwd,
                env=clean_variables(variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(open(cwd / f"err-{number}", "w+")),
                text=True,
            )
            number += 1
            stack.callback(lambda process=process: (kill_tree(process.pid), process.communicate()))
            processes.append(process)
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
        errors = "\n".join((cwd / f"err-{i}").read_text() for i in range(number))
    assert outputs[0], errors
    assert "Traceback" not in errors
    return json.loads(outputs[0]), [process.returncode for process in processes]


def wrong(report: dict[str, Any]) -> dict[str, list[str]]:
    """Return the problems by check."""
    found: dict[str, list[str]] = {}
    for finding in report["findings"]:
        if finding["status"] != "pass":
            assert finding["advice"], finding
            found.setdefault(finding["check"], []).append(finding["found"])
    return found


def test_faults_of_a_host_are_named(all_hosts: list[Host], tmp_path: Path) -> None:
    """Another version, separate directories and a slow link are reported together."""
    own = tmp_path / "own"
    own.mkdir()
    words = ["tc", "-n", all_hosts[1].namespace, "qdisc"]
    rate = ["tbf", "rate", "100mbit", "burst", "128kb", "latency", "100ms"]
    shaped = subprocess.run([*words, "replace", "dev", "eth0", "root", *rate], check=False, capture_output=True)
    plants = ["--plant", "version", "h2"]
    try:
        report, codes = run_on(all_hosts, tmp_path, *plants, str(own / "runs"), own=own)
    finally:
        subprocess.run([*words, "del", "dev", "eth0", "root"], check=False, capture_output=True)
    assert codes == [1, 1, 1]
    assert report["hosts"] == ["h1", "h2", "h3"]
    found = wrong(report)
    assert set(found) == {"versions", "run_dir"} | ({"links"} if not shaped.returncode else set()), found
    assert found["versions"][0].startswith("torch is 2.0.1 on rank 1 on h2, and ")
    assert f"{own / 'runs'} on h2, h3 differs from that on h1: a run keeps a copy on each such host" in found["run_dir"]
    assert not list(own.iterdir())
    if shaped.returncode:
        pytest.skip(f"this kernel shapes no links: {shaped.stderr!r}")
    links = next(finding for finding in report["findings"] if finding["check"] == "links")
    assert links["status"] == "warn"
    assert links["found"].startswith("the slowest link is h2 -> h")
    slow = [link for link in links["measured"] if link["bytes_per_s"] < 15e6]
    assert {(link["from"], link["to"]) for link in slow} == {("h2", "h1"), ("h2", "h3")}, "100 Mbit/s are 12.5 MB/s"


def test_a_host_that_cannot_be_reached(all_hosts: list[Host], tmp_path: Path) -> None:
    """h2 and h3 reach h1, and not each other: the pair is named."""
    for host, other in (all_hosts[1:], all_hosts[:0:-1]):
        run("ip", "-n", host.namespace, "route", "add", "prohibit", f"{other.address}/32")
        run("ip", "-n", host.namespace, "-6", "route", "add", "prohibit", f"{other.address6}/128")
    try:
        report, _ = run_on(all_hosts, tmp_path)
    finally:
        for host, other in (all_hosts[1:], all_hosts[:0:-1]):
            run("ip", "-n", host.namespace, "route", "del", f"{other.address}/32")
            run("ip", "-n", host.namespace, "-6", "route", "del", f"{other.address6}/128")
    found = wrong(report)
    assert any(text.startswith("h2 cannot reach h3 at 10.77.0.3: ") for text in found["connections"])
    assert any(text.startswith("h3 cannot reach h2 at 10.77.0.2: ") for text in found["connections"])
    assert not any("h1" in text for text in found["connections"])
    assert all(text.startswith("could not be checked") for text in found["collectives"])
