"""Several hosts on this machine: network namespaces, each with a name of its own, on one bridge.

h1 (10.77.0.1, fd77::1) --+
h2 (10.77.0.2, fd77::2) --+-- bridge, in a namespace of its own
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """A host. It shares this machine's files and processes, and has its own network and name."""

    name: str
    namespace: str
    number: int

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number}"

    @property
    def address6(self) -> str:
        return f"fd77::{self.number}"

    def wrap(self, command: Sequence[str | Path]) -> list[str | Path]:
        """Return a command that runs a command there, as the same process."""
        named = f'hostname {self.name} && export SAMESTEP_RDZV_SECRET=known-to-all-hosts && exec "$@"'
        return ["nsenter", f"--net=/var/run/netns/{self.namespace}", "unshare", "-u", "sh", "-c", named, "sh", *command]

    def pull_the_plug(self) -> None:
        """Drop all later packets of this host, without an error on either side."""
        run("ip", "-n", self.namespace, "link", "set", "eth0", "down")


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def why_not() -> str:
    """Return why hosts cannot be made here; "" if they can."""
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        return f"hosts need {' and '.join(missing) or 'root'}"
    name = f"samestep-{os.getpid()}-try"
    try:
        run("ip", "netns", "add", name)
        run("ip", "netns", "del", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', error)}"
    return ""


@contextmanager
def open_hosts(num_hosts: int) -> Iterator[list[Host]]:
    """Open hosts that reach each other. They are removed at the end."""
    prefix = f"samestep-{os.getpid()}"
    switch = f"{prefix}-switch"
    hosts = [Host(f"h{number}", f"{prefix}-h{number}", number) for number in range(1, num_hosts + 1)]
    names = [switch, *(host.namespace for host in hosts)]
    try:
        for name in names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for host in hosts:
            there, port = host.namespace, f"p{host.number}"
            run("ip", "link", "add", "eth0", "netns", there, "type", "veth", "peer", "name", port, "netns", switch)
            run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            run("ip", "-n", there, "addr", "add", f"{host.address}/24", "dev", "eth0")
            run("ip", "-n", there, "addr", "add", f"{host.address6}/64", "dev", "eth0", "nodad")
            run("ip", "-n", there, "link", "set", "eth0", "up")
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
