"""Launchers of several nodes as one: who they are, and how they meet, start together and hear of each other's end.

One of them, on the machine that `--rdzv-endpoint` names, holds the `Hub`; all, that one too, are connected to it by a
`Link`. A launcher that dies takes its connection with it, and a machine that vanishes is found out by the kernel's
keep-alives: nothing here compares clocks, and nothing is polled for.
"""

import ipaddress
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from samestep.config import Overrides, to_variables
from samestep.errors import Error
from samestep.launch.handshake import is_proven, make_nonce, prove
from samestep.launch.links import MAX_LINE, Link, check_fields
from samestep.launch.local_ranks import MOST_LOCAL_RANKS, Target
from samestep.version import __version__
from samestep.world.environment import SECRET, read_host, read_overrides
from samestep.world.version_check import hash_file

DEFAULT_PORT = 29400  # torchrun's
RETRY_S = 0.2
GREETING_S = 10.0


@dataclass(frozen=True)
class Nodes:
    """What `launch` was told of the nodes.

    Attributes:
        least, most: how many make a run; the same number where it cannot change.
        node_rank: this one's place; None: as they come.
        host, port: where they meet.
        run_id: tells runs apart that meet at one place.
        timeout_s: how long to wait for the others.
        secret: what the launchers of all nodes know; "" only at a loopback address.
    """

    least: int
    most: int
    node_rank: int | None
    host: str
    port: int
    run_id: str
    timeout_s: float
    secret: str = field(default="", repr=False)

    @property
    def endpoint(self) -> str:
        """As it was written."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_nodes(
    nnodes: str, node_rank: int | None, endpoint: str | None, run_id: str, timeout_s: float, secret: str = ""
) -> Nodes | None:
    """The options of `launch` that concern nodes; None where there is only this one.

    Raises:
        Error: they make no sense, the endpoint's host has no address, or other machines can reach it and there is no
            secret.
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
    if not secret and not _is_loopback(host):
        raise Error(
            f"other machines can reach --rdzv-endpoint {endpoint}, and there is no secret to tell them from this run's "
            f"nodes: set {SECRET} to the same text on all nodes (`openssl rand -hex 32` prints one), or name a file "
            "that holds it with --rdzv-secret"
        )
    return Nodes(least, most, node_rank, host, port, run_id, timeout_s, secret)


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host that is written so: an address of the loopback, or localhost. (Other
    names may have a loopback address here, and one that others reach there.)"""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


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


def find_own_address(host: str) -> str | None:
    """The address of this machine to listen at, so that others reach it as `host`: no interface but that one.

    Returns:
        An address, IPv4 before IPv6; "" for all: a machine's own name may have a loopback address here (Debian:
        127.0.1.1), and another one elsewhere. None where `host` is another machine.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = sorted((str(address[0]) for *_, address in found), key=lambda address: ":" in address)
    loopback = [each for each in addresses if ipaddress.ip_address(each.partition("%")[0]).is_loopback]
    mine = find_addresses()
    own = [each for each in addresses if each.partition("%")[0] in mine and each not in loopback]
    if own:
        return own[0]
    if loopback:
        return loopback[0] if _is_loopback(host) else ""
    return None


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
    overrides: dict[str, str]

    @property
    def name(self) -> str:
        """For messages."""
        return self.host if self.node_rank is None else f"node {self.node_rank} ({self.host})"


# Options that may differ between nodes.
PER_NODE = ("local_dir", "grace_s")
_KINDS: dict[str, Any] = {
    "host": str, "node_rank": int | None, "num_ranks": int, "nnodes": list, "run_id": str, "max_restarts": int,
    "script": str, "arguments": list, "program": str, "samestep": str, "torch": str, "python": str, "overrides": dict,
}  # fmt: skip


def parse_hello(fields: Mapping[str, Any]) -> Hello:
    """What has come from a node, checked. Raises ValueError where no launcher of ours has sent it."""
    check_fields(fields, _KINDS)
    words = [*fields["arguments"], *fields["overrides"].values(), *fields["overrides"], *fields["nnodes"]]
    if not all(isinstance(word, str | int) for word in words) or len(fields["nnodes"]) != 2:
        raise ValueError("not a hello")
    names = (fields[name] for name, kind in _KINDS.items() if kind is str)
    if not 1 <= fields["num_ranks"] <= MOST_LOCAL_RANKS or not all(name.isprintable() for name in names):
        raise ValueError("not a hello")
    return Hello(**fields)


def build_hello(
    nodes: Nodes, target: Target, num_ranks: int, max_restarts: int, overrides: Overrides | None = None
) -> Hello:
    """This node's. `overrides` come before the SAMESTEP_* variables."""
    import torch

    options = {**read_overrides(), **(overrides or {})}
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
        overrides=to_variables({name: value for name, value in options.items() if name not in PER_NODE}),
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
    for other in others:
        compared = [(what, getattr(hello, name), getattr(other, name)) for name, what in kinds.items()]
        for variable in sorted({*hello.overrides, *other.overrides}):
            option = "--" + variable.removeprefix("SAMESTEP_").lower().replace("_", "-")
            mine, theirs = (each.overrides.get(variable, "none") for each in (hello, other))
            compared.append((f"another {option} (or {variable})", mine, theirs))
        for what, mine, theirs in compared:
            if _show(mine) != _show(theirs):
                found = f"{_show(mine)}, not {_show(theirs)}"
                return f"{hello.name} has {what} than {other.name} ({found}): make them the same"
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


def connect(nodes: Nodes, hello: Hello, is_told: Callable[[], bool]) -> Link | None:
    """A link to the hub, when it has admitted this node; None when `is_told` says that it is not wanted any more.

    Raises:
        Error: there is nobody for too long, it is no hub or one with another secret, or it does not admit this node.
    """
    deadline_s = time.monotonic() + nodes.timeout_s
    while not is_told():
        try:
            connection = socket.create_connection((nodes.host, nodes.port), timeout=GREETING_S)
            connection.settimeout(None)
            link = Link(connection)
            _greet(link, nodes)
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


def _greet(link: Link, nodes: Nodes) -> None:
    """The node's side of the handshake.

    Raises:
        Error: the secrets are not the same.
        ValueError: there is no hub.
        OSError: it is gone.
    """
    challenge, nonce = _wait_for_answer(link), make_nonce()
    if challenge is None or challenge["kind"] != "challenge" or not isinstance(challenge.get("nonce"), str):
        raise ValueError("no hub")
    link.send("proof", nonce=nonce, proof=prove(nodes.secret, "node", challenge["nonce"], nonce))
    answer = _wait_for_answer(link)
    if answer is None or answer["kind"] not in ("proof", "denied"):
        raise ValueError("no hub")
    if answer["kind"] == "denied" or not is_proven(answer, nodes.secret, "hub", challenge["nonce"], nonce):
        link.close()
        raise Error(
            f"the launcher at {nodes.endpoint} does not have this node's secret: give all nodes the same {SECRET}, or "
            "the same file with --rdzv-secret"
        )
    link.max_line = MAX_LINE


def _wait_for_answer(link: Link) -> dict[str, Any] | None:
    deadline_s = time.monotonic() + GREETING_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        if (message := link.receive_one(left_s)) is not None:
            return message
    return None
