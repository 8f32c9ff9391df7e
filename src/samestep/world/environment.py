"""Who this process is: the environment, read once into frozen values. Nothing else in samestep reads os.environ."""

import io
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from samestep.config import OPTIONS, PREFIX, Overrides, format_flags, to_variables
from samestep.errors import Error
from samestep.world import slurm_tasks

TRACE = PREFIX + "TRACE"
HOOK = PREFIX + "HOOK"  # JSON: a module of a tool, and what its begin() is called with in each rank, before the script
TERMINAL = PREFIX + "TERMINAL"  # pid:file
SRUN = PREFIX + "SRUN"  # the variables of a rank were made of Slurm's
LOG = PREFIX + "LOG"  # pid:file
SECRET = PREFIX + "RDZV_SECRET"  # of a launcher: what the launchers of all nodes know; of a rank: what all ranks know

# Files in `error_dir`, by which ranks and their launcher tell each other what no exit code says.
STOPPED = "stopped"  # a run ended early, saved, because of a signal
FINISHED = "finished"  # a run's loop came to its own end
BEGUN = "begun"  # holds the directory of the run whose loop has begun
ROOM = "room"  # holds how many ranks that run can take
LEAVE = "leave"  # a rank that is sent SIGTERM is to end at once: another one has failed

START_AGAIN = 75  # an exit code, EX_TEMPFAIL: stopped because it was told to, and saved; the same command goes on


def stop_code(signum: int) -> int:
    """The exit code of a run that was told to stop by a signal, and has saved: Ctrl-C's is every program's."""
    return 128 + signal.SIGINT if signum == signal.SIGINT else START_AGAIN


@dataclass(frozen=True)
class Restart:
    """Why a launcher of ours has started the ranks anew: a sentence, and the rank that failed, where one did."""

    reason: str
    rank: int | None = None

    def to_variables(self) -> dict[str, str]:
        """The variable that tells the ranks."""
        return {PREFIX + "RESTART": json.dumps(asdict(self))}


@dataclass(frozen=True)
class Environment:
    """This process's place in the world, as the launcher told it.

    `launcher` is "samestep", "torchrun" (anything that sets RANK and WORLD_SIZE), "srun" (a task of a Slurm step of
    several) or "python" (alone).
    `error_dir` is where a rank that fails leaves its error for samestep's launcher.
    `restart` tells after what that launcher has started it anew.
    `secret` is known to all ranks, and to nobody else; "" where the launcher gave none.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str
    error_dir: str | None
    restart: Restart | None
    overrides: Overrides
    trace: str | None = None
    secret: str = ""


def read_overrides(variables: Mapping[str, str] | None = None) -> Overrides:
    """The options that are set as SAMESTEP_* variables.

    Raises:
        Error: a value is not of its option's type, or a variable's name is close to that of an option.
    """
    variables = os.environ if variables is None else variables
    known = {PREFIX + name.upper(): name for name in OPTIONS}
    for name in variables:
        if name.startswith(PREFIX) and name not in known and (near := get_close_matches(name, known, 1, 0.9)):
            raise Error(f"there is no variable {name}; did you mean {near[0]}?")
    return {name: OPTIONS[name].parse(each, variables[each]) for each, name in known.items() if each in variables}


def advise(**options: Any) -> str:
    """How to set options for the command that started this process, to follow "start with" in a message."""
    settings = [f"{name}={value}" for name, value in to_variables(options).items()]
    launcher = os.environ.get(PREFIX + "LAUNCHER")  # "call": samestep.spawn started this rank.
    if launcher == "call":
        pairs = ", ".join(f'"{name}": "{value}"' for name, value in to_variables(options).items())
        return f"env={{{pairs}}} for samestep.spawn"
    if launcher is not None or Path(sys.argv[0]).name == "samestep":
        return format_flags(**options)
    if "RANK" in os.environ or "ipykernel" in sys.modules:
        return f"{' '.join(settings)} in the environment"
    return f"{' '.join(settings)} {shlex.join(sys.orig_argv)}"


def read_rank() -> int:
    """This process's rank, for errors in all the rest of the environment; 0 where nothing can be made of it."""
    known = "RANK" in os.environ or not slurm_tasks.is_task(os.environ)
    rank = os.environ.get("RANK" if known else "SLURM_PROCID", "")
    return int(rank) if rank.isdecimal() and ("WORLD_SIZE" in os.environ or not known) else 0


def read_master() -> tuple[str, int]:
    """Where the ranks meet. Raises OSError where nothing says so."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise OSError("MASTER_ADDR and MASTER_PORT are not set")
    return address, int(port)


def read_interface() -> str:
    """The interface that is set for the ranks' traffic, the first where there are several; "" where none is."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]


def check_interface() -> None:
    """Raises Error where an interface is set that this machine has not: gloo would end with a traceback."""
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name in (known for _, known in socket.if_nameindex()):
            continue
        import psutil  # slow, and knows names of further addresses, such as eth0:1

        if name not in (there := psutil.net_if_addrs()):
            raise Error(f"GLOO_SOCKET_IFNAME is {name}, and this machine has {', '.join(there)}: unset it, or name one")


def choose_interface(name: str) -> None:
    """Sets it, where none is set; for groups that are opened from now on."""
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def has_agent_store() -> bool:
    """Whether the ranks meet in a store of their launcher's, and not of rank 0's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Reads the place in the world. A task of Slurm's is given the variables of a rank: torch looks for them, too.

    Raises:
        Error: a number is not one, or those that say where this rank stands are not complete.
    """
    if variables is None:
        if "RANK" not in os.environ and slurm_tasks.is_task(os.environ):
            os.environ.update(slurm_tasks.build_variables(os.environ) | {SRUN: "1"})
        variables = os.environ

    def number(name: str, default: int) -> int:
        text = variables.get(name)
        if text is None:
            return default
        try:
            return int(text)
        except ValueError:
            raise Error(f"{name} must be a whole number, not {text!r}") from None

    rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1)
    launched = "RANK" in variables and "WORLD_SIZE" in variables
    if not launched and ("RANK" in variables or world_size > 1):
        there, missing = ("RANK", "WORLD_SIZE") if "RANK" in variables else ("WORLD_SIZE", "RANK")
        raise Error(f"{there} is set and {missing} is not: start the ranks by samestep launch or torchrun, or unset it")
    if not 0 <= rank < world_size:
        raise Error(f"RANK is {rank} and WORLD_SIZE {world_size}: ranks are 0 to WORLD_SIZE - 1")
    missing_address = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
    if world_size > 1 and missing_address:
        raise Error(
            f"WORLD_SIZE is {world_size} and {missing_address[0]} is not set: start the ranks by samestep launch or "
            "torchrun, or say where rank 0 is to be found",
            rank=rank,  # which cannot hear what another one says
        )
    local_rank = number("LOCAL_RANK", rank)
    local_world_size = number("LOCAL_WORLD_SIZE", world_size)
    launchers = {PREFIX + "LAUNCHER": "samestep", SRUN: "srun", "RANK": "torchrun"}
    launcher = next((launcher for mark, launcher in launchers.items() if mark in variables), "python")
    return Environment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        launcher=launcher,
        error_dir=variables.get(PREFIX + "ERROR_DIR"),
        restart=Restart(**json.loads(variables[PREFIX + "RESTART"])) if PREFIX + "RESTART" in variables else None,
        overrides=read_overrides(variables),
        trace=variables.get(TRACE),
        secret=variables.get(SECRET, ""),
    )


def ready_standard_files() -> None:
    """Puts the null device in the place of standard files that are closed, as a daemon may start this process: else
    the next file that is opened, such as a run's ledger, gets one's number, and what C code prints is written into it.
    What the encoding of the others lacks is printed as \\xfc: no reason to lose a run.
    """
    with suppress(OSError):
        while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(file, True)
        os.close(file)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def drop_output(file: int = 1) -> None:
    """Nobody takes it any more. What is left in its buffer would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), file)


def read_restarts() -> tuple[int, int]:
    """How often torchrun has started the ranks again, and how often it may."""
    texts = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    count, most = (int(text) if text.isdecimal() else 0 for text in texts)
    return count, most


def check_surroundings() -> None:
    """As `ready_standard_files`. Raises Error where the working directory has been removed."""
    ready_standard_files()
    try:
        os.getcwd()
    except FileNotFoundError:
        raise Error("the working directory has been removed: change to one that is there") from None


def fix_hash_seed() -> None:
    """Starts this program again with PYTHONHASHSEED=0, unless it is set: the order of a set of strings is then the
    same in all ranks, on all hosts and after each restart. Ranks are forked, so Python cannot be given the seed later.
    """
    if "PYTHONHASHSEED" not in os.environ and not sys.flags.ignore_environment and sys.executable:
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def count_job_nodes() -> int:
    """The nodes of the Slurm job that this process is in; 1 where it is in none."""
    count = os.environ.get("SLURM_JOB_NUM_NODES", "")
    return int(count) if count.isdecimal() else 1


def read_terminal() -> int:
    """The file by which this process reaches the terminal, also where its launcher has put its output elsewhere."""
    file = _read_own_file(TERMINAL)
    return 2 if file is None else file


def read_log_pipe() -> int | None:
    """The file by which this process tells its launcher where its log is to be; None without a launcher of ours."""
    return _read_own_file(LOG)


def _read_own_file(name: str) -> int | None:
    pid, _, file = os.environ.get(name, "").partition(":")  # a parent's is not this process's
    return int(file) if pid == str(os.getpid()) else None


def child_variables() -> dict[str, str]:
    """A copy of this process's environment, for a launcher to add to and hand to the processes it starts."""
    return dict(os.environ)


def take_secret() -> str:
    """The secret of the launchers, which is removed from the environment: no process that this one starts gets it."""
    return os.environ.pop(SECRET, "")


def read_cache_dir() -> Path:
    """Where this user's programs keep what can be had again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samestep"


# What a launcher on another host is given of this process's environment, besides the SAMESTEP_* variables: what
# decides how torch computes and where code is found. Keys and tokens must be there already.
PASSED = (
    "CUBLAS_WORKSPACE_CONFIG", "GLOO_SOCKET_IFNAME", "MKL_NUM_THREADS", "NCCL_DEBUG", "NCCL_IB_HCA",
    "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHONPATH", "VIRTUAL_ENV",
)  # fmt: skip


def read_passed() -> dict[str, str]:
    """The variables for launchers on other hosts. Raises Error where a SAMESTEP_* number is not one."""
    kept = {name: value for name, value in os.environ.items() if name in PASSED}
    return kept | to_variables(read_overrides())


def read_ssh_address() -> str:
    """The address of this host by which ssh was reached that has started this process; "" where none has."""
    return " ".join(os.environ.get("SSH_CONNECTION", "").split()[2:3])


def read_host() -> str:
    """This machine's name, for messages."""
    return socket.gethostname()
