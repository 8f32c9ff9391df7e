"""This machine: its identity and its network interfaces."""

import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from samestep.files import read_text


def read_host_id(namespace: str) -> str | None:
    """Identify the running kernel and one of its namespaces; None if they are hidden from this process.

    Equal values mean the same boot of the same machine, and the same namespace: "net" (ports and abstract socket names)
    or "pid" (process ids). Host names do not show this: machines made from one image, and containers, can share a name.

    A chroot may have no /proc, and the rules of a container may forbid /proc/sys. Two processes with None may be on
    one host or on two.

    Raises:
        OSError: another one, such as too many open files.
    """
    try:
        boot = read_text(Path("/proc/sys/kernel/random/boot_id")).strip()
        return f"{boot}-{os.stat(f'/proc/self/ns/{namespace}').st_ino}"
    except (FileNotFoundError, PermissionError):
        return None


def find_block_size(hosts: Sequence[str]) -> int:
    """Return the largest B so that each block of B ranks is on one host: 0 to B - 1, B to 2 B - 1, and so on.

    Args:
        hosts: per rank, its host.

    Returns:
        B, which divides the number of ranks. 1 if all ranks are on one host.

    Example::

        >>> find_block_size("aaaabbbb"), find_block_size("aaab"), find_block_size("aaaa")
        (4, 1, 1)
    """
    if len({*hosts}) == 1:
        return 1
    sizes = [size for size in range(1, len(hosts)) if len(hosts) % size == 0]
    return max(size for size in sizes if all(len({*hosts[i : i + size]}) == 1 for i in range(0, len(hosts), size)))


def is_loopback(address: str) -> bool:
    """Return whether an IP address is a loopback address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def list_addresses() -> dict[str, str]:
    """Map each IP address of this machine to its interface."""
    import psutil  # slow to import

    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def find_interface(hosts: Sequence[str]) -> str:
    """Return the interface through which this machine reaches `hosts`, one of which can be itself; "" if there is none.

    A machine's own name often resolves to 127.0.1.1, so an address outside 127.0.0.0/8 is preferred.
    """
    sources = [address for host in hosts if (address := find_source(host))]
    wanted = next((address for address in sources if not address.startswith("127.")), sources[0] if sources else "")
    return list_addresses().get(wanted.partition("%")[0], "")


def find_source(host: str) -> str:
    """Return the address from which this machine would send to `host`; "" if there is no route. Sends nothing."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


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
