"""Checks that the nodes reach each other in both directions and with large packets, and compares their clocks."""

import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from samestep.tools.doctor.context import Context, Participants
from samestep.tools.doctor.findings import FAIL, PASS, WARN, Facts, Finding, format_s
from samestep.world.environment import choose_interface, read_host, read_interface, read_master
from samestep.world.host import find_interface, is_loopback, list_addresses, plain_address

TIMEOUT_S = 3.0
EXCHANGE_S = 15.0
NUM_PINGS = 12
LARGE_BYTES = 1 << 16  # fills packets of any size
TOKEN_BYTES = 16
MOST_APART_S = 0.1
FAMILIES = {"IPv4": socket.AF_INET, "IPv6": socket.AF_INET6}


class Echo:
    """A server on a free port that answers the pings of other nodes with the time of this host."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.token = secrets.token_bytes(TOKEN_BYTES)
        for family in (socket.AF_INET6, socket.AF_INET) if socket.has_dualstack_ipv6() else (socket.AF_INET,):
            with suppress(OSError):
                both = family == socket.AF_INET6
                self._socket = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=1024)
                break
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
                _receive(connection, 1)
                connection.sendall(struct.pack("!d", self._clock()))
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


def ping(address: str, port: int, token: bytes, clock: Callable[[], float]) -> dict[str, Any]:
    """Ping the `Echo` at an address several times, and once with large packets.

    Returns:
        "problem": "" or why it cannot be reached; "at": "large" if only large packets are lost; "rtt_s": the shortest
        round trip; "ahead_s": how far its clock is ahead of this one; "bound_s": the largest error of that, half the
        round trip.
    """
    found: dict[str, Any] = {"problem": "", "at": "connect", "rtt_s": None}
    try:
        with socket.create_connection((address, port), timeout=TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token)
            found["at"] = "ping"
            for _ in range(NUM_PINGS):
                sent_s = clock()
                connection.sendall(b"p")
                (theirs_s,) = struct.unpack("!d", _receive(connection, 8))
                rtt_s = clock() - sent_s
                if found["rtt_s"] is None or rtt_s < found["rtt_s"]:
                    found |= {"rtt_s": rtt_s, "ahead_s": theirs_s - sent_s - rtt_s / 2, "bound_s": rtt_s / 2}
            found["at"] = "large"
            connection.sendall(secrets.token_bytes(LARGE_BYTES))
            _receive(connection, LARGE_BYTES)
    except OSError as error:
        found["problem"] = error.strerror or str(error) or type(error).__name__
    return found


@dataclass(frozen=True)
class Interface:
    """The network interface of the ranks' traffic.

    Attributes:
        name: the interface; "" if none was found.
        own_name: the address that this host's name resolves to; gloo uses it unless an interface is set.
        is_lost: other hosts cannot reach `own_name`.
    """

    name: str
    own_name: str = ""
    is_lost: bool = False


def choose_interface_for(host: str) -> Interface:
    """Return the interface that is set, else that of this host's name, else that of the route to `host`."""
    chosen = read_interface()
    if chosen:
        return Interface(chosen)
    own = ""
    with suppress(OSError):
        own = str(socket.getaddrinfo(read_host(), None, type=socket.SOCK_STREAM)[0][4][0])
    name = "" if not own or is_loopback(own) else list_addresses().get(plain_address(own), "")
    return Interface(name, own) if name else Interface(find_interface([host]), own, is_lost=True)


def describe_interface(name: str) -> dict[str, Any]:
    """Return its MTU, speed in Mbit/s (0: unknown), and an address of each family that is not link-local."""
    import psutil

    entries, stats = psutil.net_if_addrs().get(name, ()), psutil.net_if_stats().get(name)
    found: dict[str, Any] = {"interface": name, "mtu": stats.mtu if stats else 0, "mbit": stats.speed if stats else 0}
    for family, number in FAMILIES.items():
        addresses = [e.address for e in entries if e.family == number and not e.address.lower().startswith("fe80")]
        found[family] = addresses[0] if addresses else ""
    return found


def look_at_network(context: Context) -> dict[str, Any] | None:
    """On the first rank of each node: collect its interface and ping every other node. None with one node."""
    leaders, exchange = context.participants.leaders, context.exchange
    if len(leaders) == 1:
        return None
    interface = choose_interface_for(read_master()[0])
    if interface.is_lost:
        choose_interface(interface.name)  # so that the following checks can run
    if not context.is_leader:
        return None
    mine = {**describe_interface(interface.name), "own_name": interface.own_name, "is_lost": interface.is_lost}
    echo = Echo(context.clock)
    try:
        told = exchange.exchange(
            "network/echo", {**mine, "port": echo.port, "token": echo.token.hex()}, EXCHANGE_S, leaders
        )
        wanted = [
            (node, family, told[leader])
            for node, leader in enumerate(leaders)
            for family in FAMILIES
            if leader in told and leader != context.environment.rank and told[leader][family] and mine[family]
        ]
        with ThreadPoolExecutor(8) as pool:
            clock = context.clock
            pings = pool.map(lambda w: ping(w[2][w[1]], w[2]["port"], bytes.fromhex(w[2]["token"]), clock), wanted)
            seen: dict[str, dict[str, Any]] = {}
            for (node, family, _), found in zip(wanted, pings, strict=True):
                seen.setdefault(str(node), {})[family] = found
        exchange.exchange("network/done", True, EXCHANGE_S, leaders)
    finally:
        echo.close()
    return {**mine, "seen": seen}


# --- findings -----------------------------------------------------------------------------------------------------


def judge_network(facts: Facts) -> list[Finding]:
    """Return the findings on network and clocks."""
    participants, by_node = facts.participants, facts.by_node
    if len(participants.leaders) == 1:
        return [Finding("network", PASS, "one host: nothing to reach"), Finding("clocks", PASS, "one host, one clock")]
    return [*_judge_reach(participants, by_node), *_judge_clocks(participants, by_node)]


def _judge_reach(participants: Participants, by_node: Mapping[int, Any]) -> list[Finding]:
    findings = []
    for node, fact in by_node.items():
        if not fact["interface"] or not (fact["IPv4"] or fact["IPv6"]):
            interface, name = fact["interface"] or "to the endpoint", participants.name_node(node)
            found = f"the interface {interface} of {name} has no address"
            findings.append(
                Finding("network", FAIL, found, "name the right one: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME")
            )
    findings += _judge_default(participants, by_node)
    round_trips = []
    for node, fact in by_node.items():
        for other, there in by_node.items():
            if node == other or not (fact["interface"] and there["interface"]):
                continue
            seen = fact["seen"].get(str(other), {})
            round_trips += [found["rtt_s"] for found in seen.values() if found["rtt_s"] is not None]
            findings += _judge_pair(participants.name_node(node), participants.name_node(other), there, seen)
    mtus = {node: fact["mtu"] for node, fact in by_node.items()}
    if len(set(mtus.values())) > 1:
        shown = ", ".join(
            f"{mtu} on {participants.name_node(node)} ({by_node[node]['interface']})" for node, mtu in mtus.items()
        )
        advice = "set one MTU on all (ip link set dev eth0 mtu 9000), as large as the switches between them take"
        findings.append(Finding("network", WARN, f"interfaces of several MTUs: {shown}", advice))
    measured = {participants.name_node(node): fact for node, fact in by_node.items()}
    if findings:
        return [replace(finding, measured=measured) for finding in findings]
    with_6 = [node for node, fact in by_node.items() if fact["IPv6"]]
    if not with_6:
        families = "by IPv4"
    elif len(with_6) == len(by_node):
        families = "by IPv4 and IPv6" if all(fact["IPv4"] for fact in by_node.values()) else "by IPv6"
    else:
        families = f"by IPv4 (only {participants.name_nodes(with_6)} by IPv6, too)"
    names = sorted({fact["interface"] for fact in by_node.values()})
    said = f"all hosts reach each other {families} over {', '.join(names)}, MTU {next(iter(mtus.values()))}"
    if round_trips:
        said += f", a round trip takes {format_s(min(round_trips))} to {format_s(max(round_trips))}"
    return [Finding("network", PASS, said, measured=measured)]


def _judge_default(participants: Participants, by_node: Mapping[int, Any]) -> list[Finding]:
    """Without a set interface, gloo uses the address of the host's name, on many systems a loopback address."""
    lost = [node for node, fact in by_node.items() if fact["is_lost"]]
    if not lost:
        return []
    own, interface = by_node[lost[0]]["own_name"] or "no address", by_node[lost[0]]["interface"]
    found = f"no interface is set on {participants.name_nodes(lost)}, where the host's own name resolves to {own}: "
    found += "gloo would listen where no other host reaches it"
    advice = f"export GLOO_SOCKET_IFNAME={interface} on all hosts (samestep launch does; the following checks use it)"
    return [Finding("network", FAIL, found, advice)]


def _judge_pair(name: str, other: str, there: Mapping[str, Any], seen: Mapping[str, Any]) -> list[Finding]:
    """Return the findings on the pings from one node to another."""
    if not seen:
        found = f"{name} and {other} have no addresses of the same family"
        return [Finding("network", FAIL, found, "give both IPv4 or both IPv6, or name another interface")]
    findings = []
    is_open = any(not found["problem"] for found in seen.values())
    for family, found in seen.items():
        at = f"{other} at {there[family]} ({there['interface']})"
        if not found["problem"]:
            continue
        if found["at"] == "large":
            text = f"only small packets get from {name} to {at} and back ({found['problem']})"
            advice = f"a smaller MTU than {there['mtu']} on the path drops large packets: set it at both ends"
        else:
            text = f"{name} cannot reach {at}: {found['problem']}"
            advice = "open the firewall between them for all ports, or name another interface (GLOO_SOCKET_IFNAME)"
        findings.append(Finding("network", WARN if is_open else FAIL, text, advice))
    return findings


def _judge_clocks(participants: Participants, by_node: Mapping[int, Any]) -> list[Finding]:
    """Compare with the first node's clock, using the direction with the shorter round trip."""
    apart: dict[int, tuple[float, float]] = {}  # node -> seconds ahead of node 0, and the largest error
    for node in by_node:
        candidates = []
        for viewer, seen, sign in ((0, node, 1), (node, 0, -1)):
            pings = by_node.get(viewer, {"seen": {}})["seen"].get(str(seen), {}).values()
            candidates += [(p["bound_s"], sign * p["ahead_s"]) for p in pings if p["rtt_s"] is not None]
        if node and candidates:
            bound_s, ahead_s = min(candidates)
            apart[node] = (ahead_s, bound_s)
    measured = {participants.name_node(node): {"ahead_s": a, "bound_s": b} for node, (a, b) in apart.items()}
    findings = []
    for node, (ahead_s, bound_s) in apart.items():
        if abs(ahead_s) + bound_s <= MOST_APART_S:
            continue
        where = "ahead of" if ahead_s > 0 else "behind"
        name, reference = participants.name_node(node), participants.name_node(0)
        found = f"the clock of {name} is {format_s(abs(ahead_s))} {where} that of {reference}"
        found += f" (to within {format_s(bound_s)})"
        status = FAIL if abs(ahead_s) - bound_s > MOST_APART_S else WARN
        advice = "run chrony or another NTP client on all hosts: logs and samestep watch use these clocks"
        findings.append(Finding("clocks", status, found, advice, measured))
    missing = [node for node in range(1, len(participants.leaders)) if node not in apart]
    if missing:
        found = f"the clock of {participants.name_nodes(missing)} could not be compared"
        findings.append(Finding("clocks", WARN, found, "let the hosts reach each other first", measured))
    if findings:
        return findings
    most = max(abs(ahead_s) for ahead_s, _ in apart.values())
    bound = max(bound_s for _, bound_s in apart.values())
    said = f"at most {format_s(most)} apart (to within {format_s(bound)}, half a round trip)"
    return [Finding("clocks", PASS, said, measured=measured)]
