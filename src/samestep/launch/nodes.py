"""The nodes of a launch on several machines: where they meet, and their secret (docs/security.md)."""

import hmac
import re
import socket
from dataclasses import dataclass, field

from samestep.errors import Error
from samestep.world.environment import SECRET, has_agent_store, read_environment, read_master, take_secret
from samestep.world.host import is_loopback, list_addresses

DEFAULT_PORT = 29400  # torchrun's
MIN_SECRET = 16  # characters


@dataclass(frozen=True)
class Nodes:
    """The nodes of a launch.

    Attributes:
        node: the number of this one.
        host, port: where they meet, at node 0.
        timeout_s: limit for the other nodes to join.
        secret: shared by all nodes.
        has_store: whether the engine that has started the nodes holds a store there.
    """

    num_nodes: int
    node: int
    host: str
    port: int
    timeout_s: float
    secret: str = field(repr=False)
    has_store: bool = False

    @property
    def endpoint(self) -> str:
        """Host and port, as on the command line."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_nodes(
    nnodes: int | None, node_rank: int | None, endpoint: str | None, timeout_s: float, secret: str = ""
) -> Nodes | None:
    """Parse the options of `launch` for several nodes. Returns None for one node. Raises Error if one is invalid."""
    if nnodes is None and endpoint is not None:
        raise Error(
            f"--rdzv-endpoint {endpoint} is where several machines meet, and --nnodes is not given: add --nnodes N, "
            "the number of machines, or leave --rdzv-endpoint out",
            code="SS104",
        )
    num_nodes = nnodes or 1
    if node_rank is not None and not 0 <= node_rank < num_nodes:
        raise Error(f"--node-rank is {node_rank}, but the {num_nodes} nodes are 0 to {num_nodes - 1}", code="SS101")
    if num_nodes == 1:
        return None
    if endpoint is None or node_rank is None:
        raise Error(
            f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT, the same on all machines, and --node-rank R, which is "
            "0 on HOST and another number on each other machine",
            code="SS104",
        )
    host, port = parse_endpoint(endpoint)
    return _check(Nodes(num_nodes, node_rank, host, port, timeout_s, secret))


def read_nodes(timeout_s: float, secret: str) -> Nodes | None:
    """Read the nodes from the variables that torchrun, srun or mpirun has set, as for a rank.

    Returns None for one node. Raises Error if they are incomplete, or several nodes are on one machine.
    """
    environment = read_environment()
    if environment.world_size == 1:
        return None
    if environment.local_world_size > 1:
        raise Error(
            f"{environment.local_world_size} agents run on this machine, and one starts all of its ranks: give "
            "torchrun --nproc-per-node 1, or srun --ntasks-per-node 1",
            code="SS104",
        )
    host, port = read_master()
    nodes = Nodes(environment.world_size, environment.rank, host, port, timeout_s, secret, has_agent_store())
    return _check(nodes)


def _check(nodes: Nodes) -> Nodes:
    """Check that the address is known, and that there is a secret. Raises Error."""
    try:
        socket.getaddrinfo(nodes.host, nodes.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Error(
            f"--rdzv-endpoint {nodes.endpoint}: no address of {nodes.host} is known here ({error.strerror})",
            code="SS507",
        ) from None
    if not nodes.secret:
        raise Error(
            f"other programs can reach {nodes.endpoint}, and there is no secret to tell them from this run's nodes: "
            f"set {SECRET} to the same text on all nodes (`openssl rand -hex 32` prints one)",
            code="SS508",
        )
    return nodes


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


def find_own_address(host: str) -> str:
    """Return the address of this machine to listen at, so that other machines reach it as `host`.

    Returns:
        An address, IPv4 before IPv6. "" for all addresses: on Debian a machine's own name resolves to 127.0.1.1 on the
        machine itself, and a name can be that of a proxy.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = sorted((str(address[0]) for *_, address in found), key=lambda address: ":" in address)
    local = list_addresses()
    own = [each for each in addresses if each.partition("%")[0] in local and not is_loopback(each)]
    if own:
        return own[0]
    # Other names can resolve differently elsewhere.
    return next(filter(is_loopback, addresses), "") if host in ("localhost", *addresses) else ""


def read_secret() -> str:
    """Return the secret from SAMESTEP_RDZV_SECRET; "" if it is not set.

    Removes the variable, so that child processes do not inherit it. Raises Error if the secret is too short.
    """
    secret = take_secret().strip()
    if secret and len(secret) < MIN_SECRET:
        raise Error(
            f"{SECRET} has {len(secret)} characters: use at least {MIN_SECRET} random ones, such as `openssl rand "
            "-hex 32` prints",
            code="SS508",
        )
    return secret


def derive_key(secret: str, purpose: str) -> str:
    """Derive a key for another purpose, from which the secret cannot be computed."""
    return hmac.new(secret.encode(), f"samestep key for {purpose}".encode(), "sha256").hexdigest()
