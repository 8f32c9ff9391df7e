"""The tasks that Slurm's srun starts as ranks: what Slurm tells each of them, in torchrun's variables."""

import re
import socket
from collections.abc import Mapping, Sequence

from samestep.errors import Error

FIRST_PORT, NUM_PORTS = 15000, 17000  # below those that Linux hands out by itself
STEPS_APART = 64  # ports from one job to the next: those of a node may run at once
HOST = "127.0.0.1"


def is_task(variables: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks of a step.

    What a batch script or the shell of `salloc` starts without srun is not: they know how many tasks their job may
    have (SLURM_NTASKS), but are in no step, or in one of a single task, and nobody has started the other ranks.
    """
    if "SLURM_PROCID" not in variables or "SLURM_STEP_ID" not in variables:
        return False
    return variables.get("SLURM_STEP_NUM_TASKS", "") not in ("", "0", "1")


def build_variables(step: Mapping[str, str]) -> dict[str, str]:
    """The variables by which torch's ranks find each other. MASTER_ADDR and MASTER_PORT stay where they are set.

    Args:
        step: the variables that srun gives to a task.

    Raises:
        Error: they are not complete, or the first node cannot be found.
    """

    def number(name: str) -> int:
        text = step.get(name, "")
        if not text.isdecimal():
            raise Error(f"this is a task of a Slurm step, and {name} is {text!r}: start the ranks by srun")
        return int(text)

    sizes = expand_sizes(step.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = number("SLURM_NODEID")
    if node >= len(sizes):
        raise Error(f"SLURM_NODEID is {node} and SLURM_STEP_TASKS_PER_NODE {len(sizes)} nodes: start the ranks by srun")
    place = {
        "RANK": number("SLURM_PROCID"),
        "LOCAL_RANK": number("SLURM_LOCALID"),
        "WORLD_SIZE": number("SLURM_STEP_NUM_TASKS"),
        "LOCAL_WORLD_SIZE": sizes[node],
    }
    port = FIRST_PORT + (number("SLURM_JOB_ID") * STEPS_APART + number("SLURM_STEP_ID")) % NUM_PORTS
    if "MASTER_ADDR" in step:
        hosts = [step["MASTER_ADDR"]]
    elif len(sizes) == 1:
        hosts = [HOST]
    else:
        names = list_hosts(step.get("SLURM_STEP_NODELIST") or step.get("SLURM_JOB_NODELIST", ""))
        hosts = [find_address(name) for name in names[:2]]
    interface = find_interface(hosts)
    chosen = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
    return {
        **{name: value for name, value in chosen.items() if name not in step},
        **{name: str(value) for name, value in place.items()},
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": step.get("MASTER_PORT", str(port)),
    }


def expand_sizes(text: str) -> list[int]:
    """Slurm's tasks per node, "2(x3),1", as [2, 2, 2, 1]. Raises Error where it is none."""
    sizes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise Error(f"SLURM_STEP_TASKS_PER_NODE is {text!r}, not such as 2(x3),1: start the ranks by srun")
        sizes += [int(match[1])] * int(match[2] or 1)
    return sizes


def list_hosts(text: str) -> list[str]:
    """Slurm's list of nodes, "n[1-3,7]", as their names. Raises Error where scontrol is not there."""
    return text.split() if text.isalnum() else _ask("show", "hostnames", text).split()


def find_address(name: str) -> str:
    """A node's name where the system knows it as a host's, else the address that Slurm has for it."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        found = re.search(r"\bNodeAddr=(\S+)", _ask("show", "node", name))
        return found[1] if found else name
    return name


def _ask(*words: str) -> str:
    import subprocess  # most processes that read this module never need it

    asked = f"scontrol {' '.join(words)}"
    try:
        done = subprocess.run(["scontrol", *words], capture_output=True, text=True, check=False)
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        if done.returncode == 0:
            return done.stdout
        reason = " ".join(done.stderr.split())
    raise Error(f"{asked} does not tell where rank 0 is ({reason}): set MASTER_ADDR to the first node's name")


def find_interface(hosts: Sequence[str]) -> str:
    """The interface by which this node reaches `hosts`, one of which may be itself; "" where there is none."""
    import psutil

    mine = [address for host in hosts if (address := _find_own_address(host))]
    # A host's own name may well be 127.0.1.1 to itself: then the other one counts.
    wanted = next((address for address in mine if not address.startswith("127.")), mine[0] if mine else "")
    for name, entries in psutil.net_if_addrs().items():
        if wanted in [entry.address.partition("%")[0] for entry in entries]:
            return str(name)
    return ""


def _find_own_address(host: str) -> str:
    """From which this machine would send to `host`; nothing is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
