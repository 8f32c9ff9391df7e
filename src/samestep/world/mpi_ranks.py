"""Translates the variables of mpirun into those of torchrun."""

from collections.abc import Mapping, Sequence
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
        job: identifies the launch; "" if the launcher has no such variable, so that a second launch on the machine
            needs a MASTER_PORT.
    """

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    job: str = ""


KNOWN = (
    Names(  # Open MPI
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),
    Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)


def find_names(variables: Mapping[str, str]) -> Names | None:
    """Return the names of the launcher that has started this process as one of several ranks; None if none has."""
    for names in KNOWN:
        needed = (names.rank, names.world_size, names.local_rank, names.local_world_size)
        if all(name in variables for name in needed) and variables[names.world_size] not in ("", "0", "1"):
            return names
    return None


def build_variables(variables: Mapping[str, str], names: Names) -> dict[str, str]:
    """Build the variables that torch reads. MASTER_ADDR and MASTER_PORT are kept.

    Raises Error if the ranks run on several machines and these are not set: no variable contains the machine of rank 0.
    """
    is_one_host = variables[names.local_world_size] == variables[names.world_size]
    address = variables.get("MASTER_ADDR", "")
    port = variables.get("MASTER_PORT", "")
    if not is_one_host and not (address and port):
        raise InvalidValue(
            f"{names.world_size} is {variables[names.world_size]}, on several machines, and MASTER_ADDR and "
            "MASTER_PORT are not both set: set them to the host of rank 0 and a free port there, with mpirun "
            "-x MASTER_ADDR=HOST -x MASTER_PORT=29400 (MPICH: -genv MASTER_ADDR HOST), or start "
            "the ranks with samestep launch",
            code="SS506",
        )
    address = address or HOST
    job = variables.get(names.job, "")
    return {
        **choose_interfaces(variables, [address]),
        "RANK": variables[names.rank],
        "WORLD_SIZE": variables[names.world_size],
        "LOCAL_RANK": variables[names.local_rank],
        "LOCAL_WORLD_SIZE": variables[names.local_world_size],
        "MASTER_ADDR": address,
        "MASTER_PORT": port or str(FIRST_PORT + hash_short(job.encode()) % NUM_PORTS),
    }


def choose_interfaces(variables: Mapping[str, str], hosts: Sequence[str]) -> dict[str, str]:
    """Build those variables for the network interface to `hosts`, one of which can be this one, that are not set."""
    interface = find_interface(hosts)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
    return {name: interface for name in names if name not in variables}
