"""The options of a launch on several nodes, and a node's connection to the rendezvous server.

The launcher on the machine that `--rdzv-endpoint` names runs the server. Every launcher, that one too, connects to it
by a `LauncherLink`. The connection closes when a launcher dies, and the kernel's keep-alives detect a machine that
vanishes: nothing here compares clocks or polls.
"""

import os
import platform
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from samestep.config import PREFIX, Overrides, name_flag, to_variables
from samestep.console import saying_when_slow
from samestep.decoding import convert
from samestep.errors import Error
from samestep.launch.handshake import is_proven, make_nonce, prove, share_secret
from samestep.launch.local_ranks import MAX_LOCAL_RANKS
from samestep.launch.messages import LauncherLink
from samestep.launch.target import Target
from samestep.version import __version__
from samestep.world.environment import SECRET, read_host, read_overrides
from samestep.world.host import is_loopback, list_addresses
from samestep.world.version_check import hash_file

DEFAULT_PORT = 29400  # torchrun's
LAST_CALL_S = 2.0
RETRY_S = 0.2
GREETING_S = 10.0
SAY_S = 5.0  # a launcher that waits longer for the one at the endpoint says so


@dataclass(frozen=True)
class Nodes:
    """The nodes of a launch.

    Attributes:
        least, most: minimum and maximum number of nodes.
        node_rank: index of this node; None: in the order of joining.
        run_id: distinguishes runs with the same endpoint.
        timeout_s: limit for the other nodes to join.
        secret: shared by all launchers.
        last_call_s: how long `least` nodes wait for further ones before the first round.
    """

    least: int
    most: int
    node_rank: int | None
    host: str
    port: int
    run_id: str
    timeout_s: float
    secret: str = field(repr=False)
    last_call_s: float = LAST_CALL_S

    @property
    def endpoint(self) -> str:
        """Host and port, as on the command line."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class End(Struct, frozen=True, forbid_unknown_fields=True):
    """How a launch has ended.

    Attributes:
        message: the reason, if that is not the failure of a rank.
        failure: a sentence on the rank that has failed.
        code: exit code of the launchers whose ranks have not failed.
        is_complete: the run has reached its end.
    """

    message: str = ""
    failure: str = ""
    code: int = 0
    is_complete: bool = False


def parse_nodes(
    nnodes: str | None,
    node_rank: int | None,
    endpoint: str | None,
    run_id: str,
    timeout_s: float,
    secret: str = "",
    *,
    last_call_s: float = LAST_CALL_S,
) -> Nodes | None:
    """Parse the options of `launch` for several nodes. Returns None for one node. Raises Error if one is invalid."""
    if nnodes is None and endpoint is not None:
        raise Error(
            f"--rdzv-endpoint {endpoint} is where several machines meet, and --nnodes is not given: add --nnodes N, "
            "the number of machines, or leave --rdzv-endpoint out",
            code="SS104",
        )
    nnodes = nnodes or "1"
    first, _, last = nnodes.partition(":")
    if not first.isdecimal() or not (last or first).isdecimal() or not 1 <= int(first) <= int(last or first):
        raise Error(f"--nnodes takes a number, or MIN:MAX such as 1:4, not {nnodes!r}", code="SS101")
    least = int(first)
    most = int(last or first)
    if node_rank is not None and not 0 <= node_rank < most:
        raise Error(f"--node-rank is {node_rank}, but the {most} nodes are 0 to {most - 1}", code="SS101")
    if most == 1:
        return None
    if endpoint is None:
        raise Error(
            f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT, the same on all nodes: the name or address of one of "
            "them, and a free port there",
            code="SS104",
        )
    host, port = parse_endpoint(endpoint)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Error(
            f"--rdzv-endpoint {endpoint}: no address of {host} is known here ({error.strerror})", code="SS507"
        ) from None
    if not secret and _names_loopback(host):
        secret = share_secret()
    if not secret:
        raise Error(
            f"other machines can reach --rdzv-endpoint {endpoint}, and there is no secret to tell them from this run's "
            f"nodes: set {SECRET} to the same text on all nodes (`openssl rand -hex 32` prints one), or name a file "
            "that holds it with --rdzv-secret",
            code="SS508",
        )
    return Nodes(least, most, node_rank, host, port, run_id, timeout_s, secret, last_call_s)


def _names_loopback(host: str) -> bool:
    """Return whether `host` is localhost or a loopback address. Other names can resolve differently elsewhere."""
    try:
        return is_loopback(host)
    except ValueError:
        return host == "localhost"


def parse_endpoint(text: str) -> tuple[str, int]:
    """Parse "host:port", "address:port" or "[IPv6 address]:port"; the port is optional. Raises Error otherwise."""
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::([0-9]{1,5}))?", text)
    port = int(match[3] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise Error(
            f"--rdzv-endpoint takes HOST:PORT or [IPv6 ADDRESS]:PORT, with a port from 1 to 65535, not {text!r}",
            code="SS101",
        )
    return match[1] or match[2], port


def find_own_address(host: str) -> str | None:
    """Return the address of this machine to listen at, so that other machines reach it as `host`.

    Returns:
        An address, IPv4 before IPv6. "" for all addresses: on Debian a machine's own name resolves to 127.0.1.1 on the
        machine itself. None if `host` is another machine.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = sorted((str(address[0]) for *_, address in found), key=lambda address: ":" in address)
    loopback = [each for each in addresses if is_loopback(each)]
    local = list_addresses()
    own = [each for each in addresses if each.partition("%")[0] in local and each not in loopback]
    if own:
        return own[0]
    if loopback:
        return loopback[0] if _names_loopback(host) else ""
    return None


def describe_target(target: Target) -> str:
    """Return a hash of the file to run, else its name. Nodes with different values must not start together."""
    file = target.name if target.kind == "script" else None
    if target.kind == "module":
        file = _find_module(target.name)
    return target.name if file is None else hash_file(file)


def _find_module(name: str) -> str | None:
    """Find the file of a module without importing the packages that contain it."""
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    found = None
    parts = name.split(".")
    for i in range(len(parts)):
        found = PathFinder.find_spec(".".join(parts[: i + 1]), places)
        if found is None:
            return None
        places = found.submodule_search_locations
    if places is not None:  # a package: python -m runs its __main__
        found = PathFinder.find_spec(f"{name}.__main__", places)
    return found.origin if found is not None and found.has_location else None


class Hello(Struct, frozen=True, forbid_unknown_fields=True):
    """A node's description of itself, which it sends to the server.

    Attributes:
        program: the file or module that it runs.
        settings: what must be equal on all nodes, by name.
    """

    host: str
    node_rank: int | None
    num_ranks: int
    program: str
    arguments: list[str]
    settings: dict[str, str]

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.host if self.node_rank is None else f"node {self.node_rank} ({self.host})"


PER_NODE = ("local_dir",)  # options that can differ between nodes
PROGRAM = "program"  # in the settings


def parse_hello(fields: Mapping[str, Any]) -> Hello:
    """Check and convert the fields that a node has sent. Raises ValueError if no launcher of samestep sends them."""
    hello = convert(fields, Hello)
    if not 1 <= hello.num_ranks <= MAX_LOCAL_RANKS or not hello.host.isprintable():
        raise ValueError("not a hello")
    return hello


def build_hello(
    nodes: Nodes,
    target: Target,
    num_ranks: int,
    max_restarts: int,
    overrides: Overrides | None = None,
    *,
    heals: bool = False,
) -> Hello:
    """Build this node's description. `overrides` take precedence over the SAMESTEP_* variables."""
    import torch

    options = {**read_overrides(), **(overrides or {})}
    variables = to_variables({name: value for name, value in options.items() if name not in PER_NODE})
    flags = {name: name_flag(name.removeprefix(PREFIX).lower()) for name in variables}
    settings = {
        "--rdzv-id": nodes.run_id,
        "--nnodes": f"{nodes.least}:{nodes.most}",
        "--max-restarts": str(max_restarts),
        "--heal": "yes" if heals else "no",
        PROGRAM: describe_target(target),
        "samestep": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        **{f"{flags[name]} (or {name})": text for name, text in variables.items()},
    }
    program = Path(target.name).name if target.kind == "script" else target.name
    return Hello(read_host(), nodes.node_rank, num_ranks, program, target.arguments, settings)


def find_difference(hello: Hello, others: Sequence[Hello]) -> str | None:
    """Return why a node cannot run together with the `others`; None if it can."""
    for other in others:
        if hello.node_rank is not None and hello.node_rank == other.node_rank:
            return (
                f"{hello.host} and {other.host} were both started with --node-rank {hello.node_rank}: give each node "
                "its own"
            )
    for other in others:
        for name in {**hello.settings, **other.settings}:
            mine, theirs = (each.settings.get(name, "none") for each in (hello, other))
            if mine != theirs:
                what = hello.program if name == PROGRAM else name
                return f"{hello.name} has another {what} than {other.name} ({mine}, not {theirs}): make them the same"
    return None


def find_other_arguments(hello: Hello, other: Hello) -> str | None:
    """Return a warning if two nodes pass different arguments to the script. Paths can rightly differ."""
    mine = _group_arguments(hello.arguments)
    theirs = _group_arguments(other.arguments)
    only_mine = shlex.join(word for words in mine if words not in theirs for word in words)
    only_theirs = shlex.join(word for words in theirs if words not in mine for word in words)
    if not only_mine and not only_theirs:
        return None
    return (
        f"{hello.name} gives {hello.program} other arguments than {other.name}, {only_mine or 'nothing'} instead of "
        f"{only_theirs or 'nothing'}: if they are not only paths, the models can differ"
    )


def _group_arguments(arguments: Sequence[str]) -> list[list[str]]:
    """Group each option with its values."""
    groups: list[list[str]] = [[]]
    for word in arguments:
        if word.startswith("-") and not word[1:2].isdigit():
            groups.append([])
        groups[-1].append(word)
    return groups


def connect(nodes: Nodes, hello: Hello, is_cancelled: Callable[[], bool]) -> LauncherLink | None:
    """Connect to the rendezvous server, which admits this node; None if `is_cancelled` returns True before.

    Raises Error if no server with the same secret answers within `nodes.timeout_s`, or it refuses this node.
    """
    sentence = f"waiting for up to {nodes.timeout_s:.0f} s for the launcher at {nodes.endpoint}"
    with saying_when_slow(sentence, SAY_S):
        return _connect(nodes, hello, is_cancelled)


def _connect(nodes: Nodes, hello: Hello, is_cancelled: Callable[[], bool]) -> LauncherLink | None:
    deadline_s = time.monotonic() + nodes.timeout_s
    while not is_cancelled():
        try:
            connection = socket.create_connection((nodes.host, nodes.port), timeout=GREETING_S)
            connection.settimeout(None)
            link = LauncherLink(connection)
            try:
                _join(link, nodes, hello)
            except BaseException:
                link.close()
                raise
            return link
        except ValueError:
            raise Error(
                f"the port of --rdzv-endpoint {nodes.endpoint} is in use by a program that is no samestep launcher: "
                "choose another one, on all nodes",
                code="SS509",
            ) from None
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise Error(
                    f"no answer from {nodes.endpoint} within {nodes.timeout_s:.0f} s ({error.strerror or error}): "
                    "start the launcher on that machine too, and check that no firewall closes the port",
                    code="SS507",
                ) from None
            time.sleep(RETRY_S)
    return None


def _join(link: LauncherLink, nodes: Nodes, hello: Hello) -> None:
    """Perform the node's side of the handshake, and send its description.

    Raises Error if the secrets differ or the server refuses this node, ValueError if the peer is no rendezvous server.
    """

    def receive(*kinds: str) -> dict[str, Any]:
        message = link.receive(GREETING_S)
        if message is None or message["kind"] not in kinds:
            raise ValueError("no rendezvous server")
        return message

    challenge = receive("challenge").get("nonce")
    nonce = make_nonce()
    if not isinstance(challenge, str):
        raise ValueError("no rendezvous server")
    link.send("proof", nonce=nonce, proof=prove(nodes.secret, "node", challenge, nonce))
    answer = receive("proof", "denied")
    if not is_proven(answer, nodes.secret, "hub", challenge, nonce):
        raise Error(
            f"the launcher at {nodes.endpoint} does not have this node's secret: give all nodes the same {SECRET}, or "
            "the same file with --rdzv-secret",
            code="SS508",
        )
    link.trust()
    link.send("hello", **asdict(hello))
    answer = receive("welcome", "refused")
    if answer["kind"] == "refused":
        raise Error(answer["reason"], code=answer.get("code", ""))
