"""Opens the group of all ranks: which device this rank has, and how it joins the others."""

import platform
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from samestep.console import say, saying_when_slow
from samestep.errors import Error, InvalidValue
from samestep.files import read_bytes
from samestep.hashing import hash_bytes
from samestep.processes import hold
from samestep.torch_internals import add_gloo
from samestep.version import __version__
from samestep.world.environment import (
    Environment,
    has_agent_store,
    read_environment,
    read_master,
    read_restarts,
)
from samestep.world.group import Group
from samestep.world.membership import check_ranks_unchanged
from samestep.world.process_group import JOIN_S, NCCL, has_group, open_process_group

_run_numbers = count()  # of this process

PATIENCE_S = 30.0  # a rank that waits longer for the others prints where it waits


def choose_device(environment: Environment, wanted: str | None, backend: str | None = None) -> torch.device:
    """Return the device of this rank.

    `wanted` is "cpu", "cuda" (a GPU per local rank) or one GPU such as "cuda:1"; None: "cuda" if there is a GPU.
    With the backend gloo, ranks may share a GPU; NCCL does not permit it.
    Raises Error if there is no such GPU, or there are more local ranks than GPUs.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, index = (wanted or ("cuda" if num_gpus else "cpu")).partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if num_gpus == 0:
        raise InvalidValue(
            f"device {wanted} was asked for, but torch finds no GPU: leave the option out, or give cpu", code="SS111"
        )
    if index and environment.local_world_size > 1 and backend != "gloo":
        raise InvalidValue(
            f"device {wanted} is one GPU, and {environment.local_world_size} ranks run on this host: give cuda",
            code="SS111",
        )
    if index and int(index) >= num_gpus:
        raise InvalidValue(
            f"device {wanted} does not exist: torch finds {num_gpus} GPUs, cuda:0 to cuda:{num_gpus - 1}", code="SS111"
        )
    if index or (environment.launcher == "srun" and num_gpus == 1):  # Slurm may show each task only its own GPU.
        return torch.device("cuda", int(index or 0))
    if environment.local_rank >= num_gpus and backend != "gloo":
        raise InvalidValue(
            f"{environment.local_world_size} ranks on a machine with {num_gpus} GPUs: "
            f"start at most {num_gpus} ranks here, or give --device cpu, or --backend gloo to let ranks share GPUs",
            code="SS111",
        )
    return torch.device("cuda", environment.local_rank % num_gpus)


def describe_software() -> dict[str, str]:
    """Describe what must be the same on all ranks. The script is a hash; "" for code in no file."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    script = ""
    if path is not None:
        with suppress(OSError):
            script = hash_bytes(read_bytes(Path(path), is_given=True))[:12]
    versions = {"samestep": __version__, "torch": str(torch.__version__), "Python": platform.python_version()}
    return {**versions, "script": script}


def find_ranks() -> Environment:
    """Read the environment. The rank and the number of ranks are those of the process group, if there is one.

    If only the process group defines them, local ranks are counted per machine. Raises Error as `read_environment`, or
    if a launcher has set other ranks than those of the group.
    """
    environment = replace(read_environment(), run_number=next(_run_numbers))
    check_ranks_unchanged()
    if not has_group():
        return environment
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    add_gloo()
    if (rank, world_size) == (environment.rank, environment.world_size):
        return environment
    if environment.world_size > 1:
        raise InvalidValue(
            f"this process is rank {rank} of {world_size} in its process group, and RANK is {environment.rank} and "
            f"WORLD_SIZE {environment.world_size}: create the process group with the launcher's ranks, or unset both",
            rank=rank,
            code="SS506",
        )
    hosts = Group(rank, world_size, torch.device("cpu")).gather_hosts()
    local_ranks = [each for each, host in enumerate(hosts) if host == hosts[rank]]
    launcher = "torchrun" if environment.launcher == "python" else environment.launcher
    return replace(
        environment,
        rank=rank,
        world_size=world_size,
        local_rank=local_ranks.index(rank),
        local_world_size=len(local_ranks),
        launcher=launcher,
    )


def open_group(
    environment: Environment,
    device: torch.device,
    *,
    backend: str | None = None,
    compares: bool = True,
) -> Group:
    """Join the ranks, with gloo on CPU and NCCL (gloo for host tensors) on CUDA.

    With the backend gloo, tensors on GPUs are exchanged through host memory. A process group that the script has
    created is used as it is. If `compares`, all ranks must have the same script and versions. Raises Error if they
    differ, or not all ranks join.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" or backend == "gloo" else NCCL
    group = Group(environment.rank, environment.world_size, device, local_rank=environment.local_rank)
    hold(group)
    if environment.world_size > 1 and not dist.is_initialized():
        host, port = read_master()
        sentence = (
            f"rank {environment.rank} has waited {PATIENCE_S:.0f} s for all {environment.world_size} ranks to join at "
            f"{host}:{port}: check that each is started, and that rank 0 listens there"
        )
        with saying_when_slow(sentence, PATIENCE_S), _ended_by_ctrl_c():
            _join(backend, environment)

    if group.world_size > 1:
        sentence = (
            f"rank {group.rank} has waited {PATIENCE_S:g} s in samestep.Run for the other ranks: create each Run on "
            "every rank, in the same order"
        )
        with saying_when_slow(sentence, PATIENCE_S), _ended_by_ctrl_c():
            group.derive_key(environment.secret.encode(), group.gather_bytes(secrets.token_bytes()))
            if compares:
                group.agree(describe_software())
            group.connect_locally()
    return group


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Let SIGINT end this process at once: torch waits for other ranks without returning to Python's handler."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _join(backend: str, environment: Environment) -> None:
    """Join the other ranks. Raises Error if rank 0 cannot open its port."""
    try:
        store = _open_store(environment)
        if store is None:
            open_process_group(backend)
        else:
            open_process_group(backend, store=store, rank=environment.rank, world_size=environment.world_size)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise Error(
            f"port {read_master()[1]} is in use here: set MASTER_PORT to a free one, the same for all ranks",
            code="SS509",
        ) from None


def _open_store(environment: Environment) -> Any:  # Store
    """Open the store through which the ranks join; None: the one that torch opens from the environment.

    After a restart torchrun keeps its store, with the addresses of the earlier ranks, and gloo tries to connect to
    those. With one torchrun, the restart count makes the keys of each start distinct. Several torchruns count their
    restarts separately, so there this is not possible.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    host, port = read_master()
    rank = environment.rank
    world_size = environment.world_size
    limit = timedelta(seconds=JOIN_S)
    if environment.launcher == "srun":
        # multi_tenant: shares a store that this process has already opened (`StoreExchange`), as torch's env:// does.
        return TCPStore(host, port, world_size, rank == 0, limit, multi_tenant=True)
    if environment.launcher != "torchrun" or not has_agent_store():
        return None
    num_restarts, most = read_restarts()
    if environment.local_world_size == world_size:
        store = TCPStore(host, port, world_size, False, limit)
        return PrefixStore(f"samestep/restart-{num_restarts}", store)
    if most and rank == 0:
        say(
            "torchrun restarts the ranks of several nodes with the store of the previous start, in which gloo finds "
            "ranks that have ended: run export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, or use samestep "
            "launch"
        )
    return None
