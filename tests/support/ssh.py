"""Hosts that ssh reaches: OpenSSH servers on this machine's loopback address or in namespaces, with throw-away keys."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.hosts import Host
from support.ports import reserve_ports
from support.waiting import wait_until

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

SERVER = """
Port {port}
ListenAddress {address}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
SetEnv {variables}
"""

CLIENT = """
Host {name}
  HostName {address}
  Port {port}
  IdentityFile {directory}/user_key
"""

ALL = """
Host *
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


class SshHosts:
    """Hosts by their names, which only the `ssh` in `path` can resolve.

    Attributes:
        path: a directory to put at the head of PATH.
        servers: name -> its sshd.
    """

    def __init__(
        self, directory: Path, ports: Mapping[str, int], variables: Mapping[str, str], places: Mapping[str, Host] | None
    ) -> None:
        self.directory, self.path, self._places = directory, directory / "bin", places or {}
        self.path.mkdir(parents=True)
        self.servers: dict[str, subprocess.Popen[bytes]] = {}
        for key in ("host_key", "user_key"):
            self.make_key(key)
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)
        config = ""
        for name, port in ports.items():
            host = self._places.get(name)
            address = "127.0.0.1" if host is None else host.address6 if name.endswith("6") else host.address
            fields = {"name": name, "address": address, "port": port, "directory": directory}
            set_env = " ".join(f"{key}={value}" for key, value in {**variables, "ON_HOST": name}.items())
            (directory / f"{name}.server").write_text(SERVER.format(**fields, variables=set_env))
            config += CLIENT.format(**fields)
        (directory / "client").write_text(config + ALL)
        ssh = self.path / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {directory}/client "$@"\n')
        ssh.chmod(0o755)

    def start_all(self, names: Sequence[str]) -> None:
        """Start the servers."""
        for name in names:
            self.start(name)
        for name in names:
            self._wait_for(name)

    def start(self, name: str) -> None:
        server: list[str | Path] = [str(SSHD), "-D", "-e", "-f", self.directory / f"{name}.server"]
        if name in self._places:
            server = self._places[name].wrap(server)
        with open(self.directory / f"{name}.log", "wb") as log:
            self.servers[name] = subprocess.Popen(server, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _wait_for(self, name: str) -> None:
        log = self.directory / f"{name}.log"

        def is_up() -> bool:
            assert self.servers[name].poll() is None, f"the ssh server of {name} has ended: {log.read_text()}"
            return b"listening" in log.read_bytes()

        wait_until(is_up, f"the ssh server of {name} is up")

    def force(self, name: str, command: str) -> None:
        """Run this command for all later connections. The requested one is in $SSH_ORIGINAL_COMMAND."""
        self.shut_down(name)
        with open(self.directory / f"{name}.server", "a") as config:
            config.write(f"ForceCommand {command}\n")
        self.start(name)
        self._wait_for(name)

    def make_key(self, name: str) -> None:
        """Make a new host key, in place of the old one."""
        path = self.directory / name
        path.unlink(missing_ok=True)
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)

    def shut_down(self, name: str) -> None:
        """Stop accepting connections. Open connections remain."""
        self.servers[name].kill()
        self.servers[name].wait()

    def close(self) -> None:
        for server in self.servers.values():
            server.kill()
            server.wait()


def why_not() -> str:
    """Return why such hosts cannot be made here; "" if they can."""
    missing = [tool for tool in ("ssh", "ssh-keygen") if shutil.which(tool) is None] + ([] if SSHD else ["sshd"])
    return f"needs {' and '.join(missing)}" if missing else ""


@contextmanager
def open_ssh_hosts(
    directory: Path, names: Sequence[str], variables: Mapping[str, str], places: Mapping[str, Host] | None = None
) -> Iterator[SshHosts]:
    """Open hosts whose processes have the `variables`, and the host's name in ON_HOST.

    Args:
        places: name -> namespace of the host, if it is not this one; reached by IPv6 if the name ends in 6.
    """
    with reserve_ports(len(names)) as ports:
        hosts = SshHosts(directory, dict(zip(names, ports, strict=True)), variables, places)
        try:
            hosts.start_all(names)
            yield hosts
        finally:
            hosts.close()
