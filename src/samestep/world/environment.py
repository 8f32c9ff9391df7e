"""The environment variables: this process's rank, world size and options. Only this module reads os.environ.

Those of mpirun and srun are translated into those of torchrun.
"""

import io
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any

from samestep.config import OPTIONS, PREFIX, Overrides, parse_whole, to_variables
from samestep.errors import Error, InvalidValue
from samestep.hashing import hash_short
from samestep.world.host import find_interface

TRACE = PREFIX + "TRACE"
HOOK = PREFIX + "HOOK"  # JSON: a tool's module, and the argument of its begin(), called in each rank first
SRUN = PREFIX + "SRUN"  # the variables of this rank were derived from Slurm's
HEAL = PREFIX + "HEAL"  # set if the ranks continue after the death of another one
RESTART = PREFIX + "RESTART"  # a `Restart` in JSON
CONTINUES = PREFIX + "CONTINUES"  # after a restart, a `BegunRun` in JSON
SECRET = PREFIX + "RDZV_SECRET"  # in a launcher: the secret of all launchers; in a rank: the secret of all ranks

MIN_SECRET = 16  # characters
_INTERNAL = (TRACE, HOOK, SRUN, HEAL, RESTART, CONTINUES, SECRET)  # no misspelled options

# below the ephemeral ports of Linux
FIRST_PORT = 15000
NUM_PORTS = 17000
LOCALHOST = "127.0.0.1"

START_AGAIN = 75  # exit code EX_TEMPFAIL: stopped by a signal, and saved; the same command continues the run
FAILURE = "failure.json"  # in the directory of a start's logs: the rank whose failure ended it, and the reason


class Outcome(Enum):
    """How a run, or the launch of its ranks, has come to its end."""

    UNKNOWN = ""  # the ranks have ended with exit code 0, and no run has noted its end
    FINISHED = "finished"  # the loop has completed
    STOPPED = "stopped"  # it ended early, saved, because of a signal
    KILLED = "killed"  # a signal ended it before it had saved
    FAILED = "failed"  # a rank has failed
    LOST = "lost"  # a machine was lost, or its ranks ended for no known reason
    REFUSED = "refused"  # there is a mistake in the input


def find_exit_code(outcome: Outcome, number: int = 0) -> int:
    """Return the exit code of a run or a launch.

    Args:
        number: the signal that stopped or killed it; the exit code, or minus the signal, of the rank that has failed.
    """
    match outcome:
        case Outcome.STOPPED:  # Ctrl-C gives 130, as in other programs
            return 128 + signal.SIGINT if number == signal.SIGINT else START_AGAIN
        case Outcome.KILLED:
            return 128 + number
        case Outcome.FAILED:
            return number if number >= 0 else 128 - number
        case Outcome.LOST:
            return 1
        case Outcome.REFUSED:
            return Error.exit_code
        case _:
            return 0


@dataclass(frozen=True)
class Restart:
    """Why samestep's launcher has restarted the ranks: a sentence, and the rank that failed, if one did."""

    reason: str
    rank: int | None = None


@dataclass(frozen=True)
class BegunRun:
    """The run whose loop has begun last.

    Attributes:
        run_dir: its directory or URL.
        number: how many runs the script had created before it.
        is_done: whether its loop has ended.
    """

    run_dir: str
    number: int
    is_done: bool


@dataclass(frozen=True)
class Environment:
    """The environment of this process, as set by its launcher.

    Attributes:
        launcher: "samestep", "torchrun" (anything that sets RANK and WORLD_SIZE, mpirun, or a process group of the
            script), "srun" (a task of a Slurm step with several tasks) or "python" (no launcher).
        restart: why samestep's launcher has restarted the ranks; None at the first start.
        overrides: options of `Run` set by variables.
        interceptor: JSON of SAMESTEP_TRACE, by which a tool installs an interceptor in each rank; None without one.
        secret: a secret that only the ranks have; "" if the launcher set none.
        heals: whether the ranks continue after the death of another one.
        begun: after a restart, the run that continues in its directory, whatever the script names it now.
        run_number: how many runs this process has created before.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str
    restart: Restart | None
    overrides: Overrides
    interceptor: str | None = None
    secret: str = ""
    heals: bool = False
    begun: BegunRun | None = None
    run_number: int = 0


def read_overrides() -> Overrides:
    """Return the options that are set as SAMESTEP_* variables.

    Raises Error if a value is invalid, or the name of an unknown variable is close to that of an option.
    """
    known = {PREFIX + name.upper(): name for name in OPTIONS}
    for name in sorted(set(os.environ).difference(known, _INTERNAL)):
        if name.startswith(PREFIX) and (near := get_close_matches(name, known, 1, 0.9)):
            raise InvalidValue(f"there is no variable {name}; did you mean {near[0]}?", code="SS105")
    return {name: OPTIONS[name].parse(each, os.environ[each]) for each, name in known.items() if each in os.environ}


def advise(**options: Any) -> str:
    """Format options, to follow "start with" in a message. All launchers pass variables on to the ranks."""
    settings = " ".join(f"{name}={value}" for name, value in to_variables(options).items())
    return f"{settings} in the environment"


def read_rank() -> int:
    """Return this process's rank, to report an error in the rest of the environment; 0 if it cannot be determined."""
    if "RANK" in os.environ:
        rank = os.environ["RANK"] if "WORLD_SIZE" in os.environ else ""
    else:
        names = find_names(os.environ)
        rank = os.environ[names.rank] if names is not None else ""
    return int(rank) if rank.isdecimal() else 0


def read_master() -> tuple[str, int]:
    """Return the host and port of the rendezvous. Raises OSError if they are not set."""
    address = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise OSError("MASTER_ADDR and MASTER_PORT are not set")
    return address, int(port)


@contextmanager
def hide_launcher() -> Iterator[None]:
    """Hide the variables from which another library would conclude that it should join a process group."""
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE PMI_SIZE OMPI_COMM_WORLD_SIZE MV2_COMM_WORLD_SIZE"
    hidden = {name: os.environ.pop(name) for name in names.split() if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def has_agent_store() -> bool:
    """Return whether the ranks use their launcher's rendezvous store, not one of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def read_environment() -> Environment:
    """Read the environment. Under srun and mpirun, this sets the variables of a rank, because torch reads them, too.

    Raises Error if the variables of a rank are incomplete or invalid.
    """
    variables = os.environ
    names = None if "RANK" in variables else find_names(variables)
    if names is not None:
        variables.update(translate_variables(variables, names))
    if names is SLURM:
        variables[SRUN] = "1"

    def number(name: str, default: int) -> int:
        return parse_whole(name, variables[name]) if name in variables else default

    rank = number("RANK", 0)
    world_size = number("WORLD_SIZE", 1)
    launched = "RANK" in variables and "WORLD_SIZE" in variables
    if not launched and ("RANK" in variables or world_size > 1):
        there, missing = ("RANK", "WORLD_SIZE") if "RANK" in variables else ("WORLD_SIZE", "RANK")
        raise InvalidValue(
            f"{there} is set and {missing} is not: start the ranks with samestep launch or torchrun, or unset it",
            code="SS506",
        )
    if not 0 <= rank < world_size:
        raise InvalidValue(f"RANK is {rank} and WORLD_SIZE {world_size}: ranks are 0 to WORLD_SIZE - 1", code="SS506")
    missing_address = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
    if world_size > 1 and missing_address:
        raise InvalidValue(
            f"WORLD_SIZE is {world_size} and {missing_address[0]} is not set: start the ranks with samestep launch or "
            "torchrun, or set both to the address of rank 0",
            rank=rank,  # this rank cannot connect to the others to agree on one that reports
            code="SS506",
        )
    marks = {PREFIX + "LAUNCHER": "samestep", SRUN: "srun", "RANK": "torchrun"}
    launcher = next((launcher for mark, launcher in marks.items() if mark in variables), "python")
    return Environment(
        rank=rank,
        local_rank=number("LOCAL_RANK", rank),
        world_size=world_size,
        local_world_size=number("LOCAL_WORLD_SIZE", world_size),
        launcher=launcher,
        restart=Restart(**json.loads(variables[RESTART])) if RESTART in variables else None,
        overrides=read_overrides(),
        interceptor=variables.get(TRACE),
        secret=variables.get(SECRET, ""),
        heals=HEAL in variables,
        begun=BegunRun(**json.loads(variables[CONTINUES])) if CONTINUES in variables else None,
    )


# --- mpirun and srun --------------------------------------------------------------------------------------------------


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


def translate_variables(variables: Mapping[str, str], names: Names) -> dict[str, str]:
    """Build the variables that torch reads. Those that are set are kept.

    Raises Error if the ranks run on several machines, and no variable names that of rank 0.
    """
    sizes = expand_sizes(variables[names.local_world_size])
    size = sizes[int(variables.get("SLURM_NODEID", "0"))] if len(sizes) > 1 else sizes[0]
    address = variables.get("MASTER_ADDR", "")
    port = variables.get("MASTER_PORT", "")
    hosts = [address or LOCALHOST]
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
        hosts = [
            address or find_first_host(variables[names.nodes]),
            variables.get("SLURM_LAUNCH_NODE_IPADDR", LOCALHOST),
        ]
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


# --- this process -----------------------------------------------------------------------------------------------------


def allow_all_characters() -> None:
    """Print characters that the encoding of stdout lacks as \\xfc: an exception would end the run."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def drop_output(file: int = 1) -> None:
    """Discard further output, which cannot be written. Flushing the rest of the buffer would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), file)


def read_restarts() -> tuple[int, int]:
    """Return how often torchrun has restarted the ranks, and its maximum."""
    texts = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    count, most = (int(text) if text.isdecimal() else 0 for text in texts)
    return count, most


def fix_hash_seed() -> None:
    """Execute this program again with PYTHONHASHSEED=0, unless it is set.

    The order of a set of strings is then equal on all ranks and after each restart. The seed cannot be set later,
    because ranks are forked.
    """
    if "PYTHONHASHSEED" not in os.environ and not sys.flags.ignore_environment and sys.executable:
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def child_variables() -> dict[str, str]:
    """Return a copy of this process's environment, to extend for the processes that it starts."""
    return dict(os.environ)


def set_hook(module: str) -> None:
    """Make each rank that this process starts call `begin(None)` of a module before its script."""
    os.environ[HOOK] = json.dumps([module, None])


def read_secret() -> str:
    """Return the launchers' secret; "" if it is not set.

    Removes the variable, so that child processes do not inherit it. Raises Error if the secret is too short.
    """
    secret = os.environ.pop(SECRET, "").strip()
    if secret and len(secret) < MIN_SECRET:
        raise Error(
            f"{SECRET} has {len(secret)} characters: use at least {MIN_SECRET} random ones, such as `openssl rand "
            "-hex 32` prints",
            code="SS508",
        )
    return secret


def read_cache_dir() -> Path:
    """Return samestep's directory in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samestep"


def read_host() -> str:
    """Return this machine's name, for messages."""
    return socket.gethostname()
