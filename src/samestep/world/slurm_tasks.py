"""Translates the variables that Slurm sets for a task of srun into those of torchrun."""

import re
import socket
from collections.abc import Mapping

from samestep.errors import Error, InvalidValue
from samestep.processes import run_captured
from samestep.world.mpi_ranks import FIRST_PORT, HOST, NUM_PORTS, choose_interfaces

STEPS_APART = 64  # ports between two jobs: jobs on one node can run at the same time


def is_task(variables: Mapping[str, str]) -> bool:
    """Return whether this process is one of several tasks of a Slurm step.

    A process that a batch script or the shell of `salloc` starts without srun is not one. It has SLURM_NTASKS, but it
    belongs to no step or to a step with one task, and no other ranks exist.
    """
    if "SLURM_PROCID" not in variables or "SLURM_STEP_ID" not in variables:
        return False
    return variables.get("SLURM_STEP_NUM_TASKS", "") not in ("", "0", "1")


def build_variables(step: Mapping[str, str]) -> dict[str, str]:
    """Build the variables that torch reads, from those that srun sets for a task. MASTER_ADDR and MASTER_PORT are kept.

    Raises Error if a variable is missing or invalid, or the first node cannot be found.
    """

    def number(name: str) -> int:
        text = step.get(name, "")
        if not text.isdecimal():
            raise InvalidValue(
                f"this is a task of a Slurm step, and {name} is {text!r}: start the ranks by srun", code="SS506"
            )
        return int(text)

    sizes = expand_sizes(step.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = number("SLURM_NODEID")
    if node >= len(sizes):
        raise InvalidValue(
            f"SLURM_NODEID is {node} and SLURM_STEP_TASKS_PER_NODE {len(sizes)} nodes: start the ranks by srun",
            code="SS506",
        )
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
    return {
        **choose_interfaces(step, hosts),
        **{name: str(value) for name, value in place.items()},
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": step.get("MASTER_PORT", str(port)),
    }


def expand_sizes(text: str) -> list[int]:
    """Expand Slurm's tasks per node: "2(x3),1" gives [2, 2, 2, 1]. Raises Error if `text` has another form."""
    sizes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise InvalidValue(
                f"SLURM_STEP_TASKS_PER_NODE is {text!r}, not such as 2(x3),1: start the ranks by srun", code="SS506"
            )
        sizes += [int(match[1])] * int(match[2] or 1)
    return sizes


def list_hosts(text: str) -> list[str]:
    """Expand Slurm's node list, such as "n[1-3,7]". Raises Error if scontrol is not available."""
    return text.split() if text.isalnum() else _run_scontrol("show", "hostnames", text).split()


def find_address(name: str) -> str:
    """Return a node's name if it resolves, else the address that Slurm has for the node."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        found = re.search(r"\bNodeAddr=(\S+)", _run_scontrol("show", "node", name))
        return found[1] if found else name
    return name


def _run_scontrol(*words: str) -> str:
    try:
        done = run_captured(["scontrol", *words])
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        if done.returncode == 0:
            return done.stdout
        reason = " ".join(done.stderr.split())
    command = f"scontrol {' '.join(words)}"
    raise Error(
        f"{command} does not give the address of rank 0 ({reason}): set MASTER_ADDR to the first node's name",
        code="SS506",
    )
