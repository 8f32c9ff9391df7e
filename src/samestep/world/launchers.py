"""Translates the variables by which mpirun and srun pass a process its rank into those of torchrun."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import InvalidValue
from samestep.hashing import hash_short
from samestep.world.host import find_interface

# below the ephemeral ports of Linux
FIRST_PORT = 15000
NUM_PORTS = 17000
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Names:
    """The variables by which a launcher passes a process its rank.

    Attributes:
        local_world_size: ranks on this machine, or, of Slurm, on each one.
        job: identify the launch. MPICH has no such variable: a second launch on the machine needs a MASTER_PORT.
        nodes: a list of the machines.
    """

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    job: tuple[str, ...] = ()
    nodes: str = ""


OPEN_MPI = Names(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    ("PMIX_NAMESPACE",),
)
MPICH = Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # and Intel MPI
SLURM = Names(
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    "SLURM_STEP_NODELIST",
)


def find_names(variables: Mapping[str, str]) -> Names | None:
    """Return the names of the launcher that has started this process as one of several ranks; None if none has.

    A process that a batch script starts without srun is none: it belongs to no step or to a step with one task. In a
    job of Slurm, mpirun starts its own processes by srun, whose variables its ranks inherit.
    """
    for names in (OPEN_MPI, MPICH, SLURM):
        needed = (names.rank, names.world_size, names.local_rank, names.local_world_size)
        if all(name in variables for name in needed) and variables[names.world_size] not in ("", "0", "1"):
            return names
    return None


def build_variables(variables: Mapping[str, str], names: Names) -> dict[str, str]:
    """Build the variables that torch reads. Those that are set are kept.

    Raises Error if the ranks run on several machines, and no variable names that of rank 0.
    """
    sizes = expand_sizes(variables[names.local_world_size])
    size = sizes[int(variables.get("SLURM_NODEID", "0"))] if len(sizes) > 1 else sizes[0]
    address = variables.get("MASTER_ADDR", "")
    port = variables.get("MASTER_PORT", "")
    hosts = [address or HOST]
    if str(size) != variables[names.world_size] and not (address and port):
        if not names.nodes:
            raise InvalidValue(
                f"{names.world_size} is {variables[names.world_size]}, on several machines, and MASTER_ADDR and "
                "MASTER_PORT are not both set: set them to the host of rank 0 and a free port there, with mpirun "
                "-x MASTER_ADDR=HOST -x MASTER_PORT=29400 (MPICH: -genv MASTER_ADDR HOST), or start "
                "the ranks with samestep launch",
                code="SS506",
            )
        # The second one is for rank 0, whose own name may be that of the loopback interface.
        hosts = [address or find_first_host(variables[names.nodes]), variables.get("SLURM_LAUNCH_NODE_IPADDR", HOST)]
    interface = find_interface(hosts)
    job = "/".join(variables.get(name, "") for name in names.job)
    built = {
        **({f"{backend}_SOCKET_IFNAME": interface for backend in ("GLOO", "NCCL")} if interface else {}),
        "RANK": variables[names.rank],
        "WORLD_SIZE": variables[names.world_size],
        "LOCAL_RANK": variables[names.local_rank],
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": str(FIRST_PORT + hash_short(job.encode()) % NUM_PORTS),
    }
    return built | {name: variables[name] for name in built if variables.get(name)}


def expand_sizes(text: str) -> list[int]:
    """Expand Slurm's tasks per node: "2(x3),1" gives [2, 2, 2, 1]. Raises Error if `text` has another form."""
    sizes: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if match is None:
            raise InvalidValue(f"{text!r} is no number of ranks per machine, such as 2(x3),1", code="SS506")
        sizes += [int(match[1])] * int(match[2] or 1)
    return sizes


def find_first_host(text: str) -> str:
    """Return the first host of Slurm's list, such as "n[01-03,7]-x,m": here, n01-x."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^\[,]*))?", text)
    return "".join(match.groups("")) if match is not None else text
