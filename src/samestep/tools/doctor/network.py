"""Checks that the nodes reach each other in both directions, and with large packets."""

import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from samestep.launch.rendezvous_server import open_listener
from samestep.tools.doctor.facts import FAIL, WARN, CheckFacts, Context, Finding, failure, format_s, warning, well
from samestep.world.environment import choose_interface, read_host, read_interface, read_master
from samestep.world.host import find_interface, is_loopback, list_addresses, plain_address

TIMEOUT_S = 3.0
EXCHANGE_S = 15.0
NUM_PINGS = 12
LARGE_BYTES = 1 << 16  # fills packets of any size
TOKEN_BYTES = 16
FAMILIES = {"IPv4": socket.AF_INET, "IPv6": socket.AF_INET6}


class Echo:
    """A server on a free port that answers the pings of other nodes."""

    def __init__(self) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._socket = open_listener("", 0)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError, ConnectionError), connection:
            connection.settimeout(TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _receive(connection, TOKEN_BYTES) != self.token:
                return
            for _ in range(NUM_PINGS):
                connection.sendall(_receive(connection, 1))
            connection.sendall(_receive(connection, LARGE_BYTES))

    def close(self) -> None:
        """Stop answering."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return bytes(data)


def ping(address: str, port: int, token: bytes) -> dict[str, Any]:
    """Ping the `Echo` at an address several times, and once with large packets.

    Returns:
        "problem": "" or why it cannot be reached; "at": "large" if only large packets are lost; "rtt_s": the shortest
        round trip.
    """
    found: dict[str, Any] = {"problem": "", "at": "connect", "rtt_s": None}
    try:
        with socket.create_connection((address, port), timeout=TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token)
            found["at"] = "ping"
            for _ in range(NUM_PINGS):
                sent_s = time.perf_counter()
                connection.sendall(b"p")
                _receive(connection, 1)
                rtt_s = time.perf_counter() - sent_s
                found["rtt_s"] = rtt_s if found["rtt_s"] is None else min(rtt_s, found["rtt_s"])
            found["at"] = "large"
            connection.sendall(secrets.token_bytes(LARGE_BYTES))
            _receive(connection, LARGE_BYTES)
    except OSError as error:
        found["problem"] = error.strerror or str(error) or type(error).__name__
    return found


def choose_interface_for(host: str) -> dict[str, Any]:
    """Return the interface that is set, else that of this host's name, else that of the route to `host`.

    Returns:
        "interface": its name, "" if none was found; "own_name": the address that this host's name resolves to, which
        gloo uses unless an interface is set; "is_lost": whether other hosts cannot reach `own_name`.
    """
    if chosen := read_interface():
        return {"interface": chosen, "own_name": "", "is_lost": False}
    own = ""
    with suppress(OSError):
        own = str(socket.getaddrinfo(read_host(), None, type=socket.SOCK_STREAM)[0][4][0])
    name = "" if not own or is_loopback(own) else list_addresses().get(plain_address(own), "")
    return {"interface": name or find_interface([host]), "own_name": own, "is_lost": not name}


def describe_interface(name: str) -> dict[str, Any]:
    """Return its MTU (0: unknown), and an address of each family that is not link-local."""
    import psutil

    entries = psutil.net_if_addrs().get(name, ())
    stats = psutil.net_if_stats().get(name)
    found: dict[str, Any] = {"mtu": stats.mtu if stats else 0}
    for family, number in FAMILIES.items():
        addresses = [e.address for e in entries if e.family == number and not e.address.lower().startswith("fe80")]
        found[family] = addresses[0] if addresses else ""
    return found


def look_at_network(context: Context) -> dict[str, Any] | None:
    """On the first rank of each node: collect its interface and ping every other node. None with one node."""
    leaders = context.participants.leaders
    exchange = context.exchange
    if len(leaders) == 1:
        return None
    mine = choose_interface_for(read_master()[0])
    if mine["is_lost"]:
        choose_interface(mine["interface"])  # so that the following checks can run
    if not context.is_leader:
        return None
    mine |= describe_interface(mine["interface"])
    echo = Echo()
    try:
        theirs = exchange.exchange(
            "network/echo", {**mine, "port": echo.port, "token": echo.token.hex()}, EXCHANGE_S, leaders
        )
        jobs: dict[str, dict[str, Future[dict[str, Any]]]] = {}
        with ThreadPoolExecutor(8) as pool:
            for node, leader in enumerate(leaders):
                if leader == context.environment.rank or leader not in theirs:
                    continue
                there = theirs[leader]
                jobs[str(node)] = {
                    family: pool.submit(ping, there[family], there["port"], bytes.fromhex(there["token"]))
                    for family in FAMILIES
                    if there[family] and mine[family]
                }
        exchange.exchange("network/done", True, EXCHANGE_S, leaders)
    finally:
        echo.close()
    seen = {node: {family: job.result() for family, job in families.items()} for node, families in jobs.items()}
    return {**mine, "seen": seen}


# --- findings -----------------------------------------------------------------------------------------------------


def judge_network(facts: CheckFacts) -> Iterator[Finding]:
    """Report missing addresses, hosts that do not reach each other, and different MTUs."""
    name_node = facts.participants.name_node
    by_node = facts.by_node
    if len(facts.participants.leaders) == 1:
        yield well("one host: nothing to reach")
    if not by_node:
        return
    for node, fact in by_node.items():
        if not fact["interface"] or not (fact["IPv4"] or fact["IPv6"]):
            found = f"the interface {fact['interface'] or 'to the endpoint'} of {name_node(node)} has no address"
            yield failure(found, "name the right one: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME")
    if lost := [node for node, fact in by_node.items() if fact["is_lost"]]:
        # Without a set interface, gloo uses the address of the host's name, on many systems a loopback address.
        own = by_node[lost[0]]["own_name"] or "no address"
        interface = by_node[lost[0]]["interface"]
        yield failure(
            f"no interface is set on {facts.participants.name_nodes(lost)}, where the host's own name resolves to "
            f"{own}: gloo would listen where no other host reaches it",
            f"export GLOO_SOCKET_IFNAME={interface} on all hosts (samestep launch does; the following checks use it)",
        )
    pairs = [(node, other) for node in by_node for other in by_node if node != other]
    round_trips = []
    for node, other in pairs:
        if by_node[node]["interface"] and by_node[other]["interface"]:
            pings = by_node[node]["seen"].get(str(other), {})
            round_trips += [found["rtt_s"] for found in pings.values() if found["rtt_s"] is not None]
            yield from _judge_pair(name_node(node), name_node(other), by_node[other], pings)
    mtus = {node: fact["mtu"] for node, fact in by_node.items()}
    if len(set(mtus.values())) > 1:
        shown = ", ".join(f"{mtu} on {name_node(node)} ({by_node[node]['interface']})" for node, mtu in mtus.items())
        advice = "set one MTU on all (ip link set dev eth0 mtu 9000), as large as the switches between them take"
        yield warning(f"interfaces of several MTUs: {shown}", advice)
    common = [family for family in FAMILIES if all(fact[family] for fact in by_node.values())]
    families = " and ".join(common)
    with_6 = [node for node, fact in by_node.items() if fact["IPv6"]]
    if with_6 and "IPv6" not in common:
        families += f" (only {facts.participants.name_nodes(with_6)} by IPv6, too)"
    names = sorted({fact["interface"] for fact in by_node.values()})
    shown = f"all hosts reach each other by {families} over {', '.join(names)}, MTU {max(mtus.values())}"
    if round_trips:
        shown += f", a round trip takes {format_s(min(round_trips))} to {format_s(max(round_trips))}"
    yield well(shown, {name_node(node): fact for node, fact in by_node.items()})


def _judge_pair(name: str, other: str, there: Mapping[str, Any], pings: Mapping[str, Any]) -> Iterator[Finding]:
    """Report problems of the pings from one node to another: a warning if another family works."""
    if not pings:
        found = f"{name} and {other} have no addresses of the same family"
        yield failure(found, "give both IPv4 or both IPv6, or name another interface")
    status = WARN if any(not found["problem"] for found in pings.values()) else FAIL
    for family, found in pings.items():
        at = f"{other} at {there[family]} ({there['interface']})"
        problem = found["problem"]
        if problem and found["at"] == "large":
            text = f"only small packets get from {name} to {at} and back ({problem})"
            advice = f"a smaller MTU than {there['mtu']} on the path drops large packets: set it at both ends"
            yield Finding(status, text, advice)
        elif problem:
            advice = "open the firewall between them for all ports, or name another interface (GLOO_SOCKET_IFNAME)"
            yield Finding(status, f"{name} cannot reach {at}: {problem}", advice)
