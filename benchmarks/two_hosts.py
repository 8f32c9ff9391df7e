"""Two hosts on this machine, those of the tests, for the benchmarks that need a network between ranks. Needs root."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil  # type: ignore[import-untyped,unused-ignore]

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.hosts import Host, open_hosts, run, why_not
from support.runs import clean_variables

INTERFACE = "eth0"


@contextmanager
def open_two_hosts() -> Iterator[list[Host]]:
    """Ends this program with a sentence where there can be none."""
    if reason := why_not():
        sys.exit(f"{Path(sys.argv[0]).name} puts ranks on hosts of their own (network namespaces): {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or the namespaces would stay
    with open_hosts(2) as hosts:
        yield hosts


def shape_link(hosts: list[Host], mbit: int | None) -> None:
    """Lets each host send so many Mbit/s from now on; None: as much as it can."""
    for host in hosts:
        words = ["tc", "-n", host.namespace, "qdisc"]
        subprocess.run([*words, "del", "dev", INTERFACE, "root"], check=False, capture_output=True)
        if mbit is not None:
            rate = ["tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "100ms"]
            run(*words, "add", "dev", INTERFACE, "root", *rate)


@contextmanager
def start_on(
    hosts: list[Host], commands: list[list[str]], output: int | IO[str], env: Mapping[str, str]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Runs a command on each host, stdout and stderr into `output`; afterwards nothing of them is left.

    Args:
        env: variables to add.
    """
    variables = clean_variables({"OMP_NUM_THREADS": "1", **env})
    started = []
    try:
        for host, command in zip(hosts, commands, strict=True):
            words = [str(word) for word in host.wrap(command)]
            process = subprocess.Popen(
                words, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True
            )
            started.append(process)
        yield started
    finally:
        for process in started:
            if process.poll() is None:  # else its number may be another one's by now
                kill_tree(process.pid)
            process.wait()


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def measure_on(hosts: list[Host], commands: list[list[str]], found: Path) -> Any:
    """Runs a command on each host until all have ended, or one has failed. Returns what one has written as JSON.

    Ends this program with their output if there is no such file.
    """
    with tempfile.TemporaryFile("w+") as said:
        with start_on(hosts, commands, said, {"GLOO_SOCKET_IFNAME": INTERFACE}) as ranks:
            while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
                time.sleep(0.1)
        said.seek(0)
        if not found.exists():
            sys.exit(f"the ranks failed:\n{said.read()}")
    return json.loads(found.read_text())
