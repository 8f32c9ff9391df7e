"""Launchers of several nodes as one: who they are, and how they meet, start together and hear of each other's end.

One of them, on the machine that `--rdzv-endpoint` names, holds the `Hub`; all, that one too, are connected to it by a
`Link`. A launcher that dies takes its connection with it, and a machine that vanishes is found out by the kernel's
keep-alives: nothing here compares clocks, and nothing is polled for.
"""

import errno
import ipaddress
import json
import os
import platform
import select
import shlex
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from samestep import __version__
from samestep.errors import Error
from samestep.launch.local import Target
from samestep.world.environment import read_host
from samestep.world.software import hash_file

DEFAULT_PORT = 29400  # torchrun's
RETRY_S = 0.2
GREETING_S = 5.0
RECEIVE_BYTES = 1 << 16
# A machine that vanishes is given up after 2 + 3 x 1 s.
KEEP_ALIVE = (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 5000))


@dataclass(frozen=True)
class Nodes:
    """What `launch` was told of the nodes.

    Attributes:
        least, most: how many make a run; the same number where it cannot change.
        node_rank: this one's place; None: as they come.
        host, port: where they meet.
        run_id: tells runs apart that meet at one place.
        timeout_s: how long to wait for the others.
    """

    least: int
    most: int
    node_rank: int | None
    host: str
    port: int
    run_id: str
    timeout_s: float

    @property
    def endpoint(self) -> str:
        """As it was written."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_nodes(
    nnodes: str, node_rank: int | None, endpoint: str | None, run_id: str, timeout_s: float
) -> Nodes | None:
    """The options of `launch` that concern nodes; None where there is only this one.

    Raises:
        Error: they make no sense, or the endpoint's host has no address.
    """
    first, _, last = nnodes.partition(":")
    if not first.isdecimal() or not (last or first).isdecimal() or not 1 <= int(first) <= int(last or first):
        raise Error(f"--nnodes takes a number, or MIN:MAX such as 1:4, not {nnodes!r}")
    least, most = int(first), int(last or first)
    if node_rank is not None and not 0 <= node_rank < most:
        raise Error(f"--node-rank {node_rank} is none of {most} nodes: they are 0 to {most - 1}")
    if most == 1:
        return None
    if endpoint is None:
        raise Error(
            f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT, the same on all nodes: the name or address of one of "
            "them, and a free port there"
        )
    if timeout_s < 1:
        raise Error(f"--rdzv-timeout must be at least 1 second, not {timeout_s}")
    host, port = parse_endpoint(endpoint)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Error(f"--rdzv-endpoint {endpoint}: no address of {host} is known here ({error.strerror})") from None
    return Nodes(least, most, node_rank, host, port, run_id, timeout_s)


def parse_endpoint(text: str) -> tuple[str, int]:
    """ "host:port", "address:port" or "[IPv6 address]:port", as host and port. Raises Error otherwise."""
    host, colon, port = text.rpartition(":")
    if text.startswith("[") and text.endswith("]"):
        host, colon, port = text, "", ""
    elif not colon:
        host = text
    wrong = ""
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        wrong = "; an IPv6 address stands in brackets, [fd00::1]:29400"
    port = port if colon else str(DEFAULT_PORT)
    if wrong or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise Error(f"--rdzv-endpoint takes HOST:PORT, with a port from 1 to 65535, not {text!r}{wrong}")
    return host, int(port)


def find_addresses() -> dict[str, str]:
    """This machine's addresses, each with its interface."""
    import psutil  # takes longer than all else here; most launches do without

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in families
    }


def is_here(host: str) -> bool:
    """Whether a name or address is this machine's; to itself, its name may well be 127.0.1.1, an address of no one."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = [str(address[0]).partition("%")[0] for *_, address in found]
    mine = find_addresses()
    return any(address in mine or ipaddress.ip_address(address).is_loopback for address in addresses)


def plain_address(address: str) -> str:
    """An address without the dress that a socket for both families, or an interface, gives it."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)


def describe_target(target: Target) -> str:
    """A hash of what is to run, where that is a file: nodes with different ones must not start together."""
    file = _find_module(target.name) if target.kind == "module" else target.name if target.kind == "script" else None
    return target.name if file is None else hash_file(file)


def _find_module(name: str) -> str | None:
    """The file of a module that is to run; found without importing the packages that it is in."""
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    found = None
    parts = name.split(".")
    for i in range(len(parts)):
        found = PathFinder.find_spec(".".join(parts[: i + 1]), places)
        if found is None:
            return None
        places = found.submodule_search_locations
    if places is not None:  # a package: as python -m, its __main__
        found = PathFinder.find_spec(f"{name}.__main__", places)
    return found.origin if found is not None and found.has_location else None


@dataclass(frozen=True)
class Hello:
    """What a node says of itself."""

    host: str
    node_rank: int | None
    num_ranks: int
    nnodes: tuple[int, int]
    run_id: str
    max_restarts: int
    script: str
    arguments: list[str]
    program: str
    samestep: str
    torch: str
    python: str

    @property
    def name(self) -> str:
        """For messages."""
        return self.host if self.node_rank is None else f"node {self.node_rank} ({self.host})"


def build_hello(nodes: Nodes, target: Target, num_ranks: int, max_restarts: int) -> Hello:
    """This node's."""
    import torch

    return Hello(
        host=read_host(),
        node_rank=nodes.node_rank,
        num_ranks=num_ranks,
        nnodes=(nodes.least, nodes.most),
        run_id=nodes.run_id,
        max_restarts=max_restarts,
        script=Path(target.name).name if target.kind == "script" else target.name,
        arguments=target.arguments,
        program=describe_target(target),
        samestep=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
    )


def find_difference(hello: Hello, others: Sequence[Hello]) -> str | None:
    """Why a node cannot run together with the `others`; None where it can."""
    for other in others:
        if hello.node_rank is not None and hello.node_rank == other.node_rank:
            return (
                f"{hello.host} and {other.host} were both started with --node-rank {hello.node_rank}: give each node "
                "its own"
            )
    kinds = {
        "run_id": "another --rdzv-id",
        "nnodes": "another --nnodes",
        "max_restarts": "another --max-restarts",
        "program": f"another {hello.script}",
        "samestep": "another samestep",
        "torch": "another torch",
        "python": "another Python",
    }
    for field, what in kinds.items():
        for other in others:
            mine, theirs = _show(getattr(hello, field)), _show(getattr(other, field))
            if mine != theirs:
                return f"{hello.name} has {what} than {other.name} ({mine}, not {theirs}): make them the same"
    return None


def find_other_arguments(hello: Hello, other: Hello) -> str | None:
    """What is to be said where two nodes give their script other arguments: those may be paths, and right."""
    mine, theirs = _group_arguments(hello.arguments), _group_arguments(other.arguments)
    only_mine = shlex.join(word for words in mine if words not in theirs for word in words)
    only_theirs = shlex.join(word for words in theirs if words not in mine for word in words)
    if not only_mine and not only_theirs:
        return None
    return (
        f"{hello.name} gives {hello.script} other arguments than {other.name}, {only_mine or 'nothing'} instead of "
        f"{only_theirs or 'nothing'}: if they are more than paths, the models may differ"
    )


def _group_arguments(arguments: Sequence[str]) -> list[list[str]]:
    """Each option with what follows it."""
    groups: list[list[str]] = [[]]
    for word in arguments:
        if word.startswith("-") and not word[1:2].isdigit():
            groups.append([])
        groups[-1].append(word)
    return groups


def _show(value: Any) -> str:
    return ":".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class Link:
    """Messages, as JSON lines, between a launcher and the hub."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = b""
        self._kept: list[dict[str, Any]] = []
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in KEEP_ALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message. Who cannot be reached is found out by receiving."""
        with suppress(OSError):
            self._socket.sendall((json.dumps({"kind": kind, **fields}) + "\n").encode())

    def receive(self, timeout_s: float = 0.0) -> list[dict[str, Any]]:
        """What has come, waiting for up to `timeout_s` for it. Raises OSError where the other side is gone."""
        kept, self._kept = self._kept, []
        if kept:
            return kept
        ready, _, _ = select.select([self._socket], [], [], timeout_s)
        if not ready:
            return []
        data = self._socket.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionError("closed")
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def receive_one(self, timeout_s: float) -> dict[str, Any] | None:
        """As `receive`; what comes with the first message is kept for later."""
        messages = self.receive(timeout_s)
        self._kept = messages[1:]
        return messages[0] if messages else None

    @property
    def addresses(self) -> tuple[str, str]:
        """This side's, and the other's."""
        return plain_address(self._socket.getsockname()[0]), plain_address(self._socket.getpeername()[0])

    def close(self) -> None:
        """Lets the other side know."""
        self._socket.close()


def open_listener(port: int) -> socket.socket | None:
    """A socket for all addresses of this machine; None where the port is in use. Raises Error where there is none."""
    reason = ""
    for family in (socket.AF_INET6, socket.AF_INET) if socket.has_dualstack_ipv6() else (socket.AF_INET,):
        try:
            both = family == socket.AF_INET6
            return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            reason = error.strerror or str(error)  # IPv6 may be turned off
    raise Error(f"port {port} cannot be opened here ({reason}): choose one above 1023")


def connect(nodes: Nodes, hello: Hello, is_told: Callable[[], bool]) -> Link | None:
    """A link to the hub, when it has greeted; None when `is_told` says that nobody waits for it any more.

    Raises:
        Error: there is nobody for too long, it is no hub, or it does not want this node.
    """
    deadline_s = time.monotonic() + nodes.timeout_s
    while not is_told():
        try:
            connection = socket.create_connection((nodes.host, nodes.port), timeout=GREETING_S)
            connection.settimeout(None)
            link = Link(connection)
            link.send("hello", **asdict(hello))
            answer = _wait_for_answer(link)
        except ValueError:
            answer = None
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise Error(
                    f"nobody answered at {nodes.endpoint} within {nodes.timeout_s:.0f} s ({error.strerror or error}): "
                    "start the launcher on that machine, too, and look whether a firewall closes the port"
                ) from None
            time.sleep(RETRY_S)
            continue
        if answer is None or answer.get("kind") not in ("welcome", "refused"):
            link.close()
            raise Error(
                f"the port of --rdzv-endpoint {nodes.endpoint} is in use by something that is no samestep launcher: "
                "choose another one, on all nodes"
            )
        if answer["kind"] == "refused":
            link.close()
            raise Error(answer["reason"])
        return link
    return None


def _wait_for_answer(link: Link) -> dict[str, Any] | None:
    deadline_s = time.monotonic() + GREETING_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        if (message := link.receive_one(left_s)) is not None:
            return message
    return None
