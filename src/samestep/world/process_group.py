"""The process group of torch.distributed, and the launcher's store."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import ref

import torch.distributed as dist

from samestep.torch_internals import list_gloo_sockets, reset_group_names, set_timeout
from samestep.world.environment import read_master, read_rank

NCCL = "cpu:gloo,cuda:nccl"  # a backend
JOIN_S = 300.0  # limit for the tasks of a Slurm step to join, as in `samestep launch`

TIMEOUT_S = 1800.0  # limit for an exchange
NO_LIMIT = timedelta(days=365)

# A weak reference to the newest process group of `open_process_group`. As torch has one process group in a process, all
# runs of the process share it, and it stays open until the end of the process.
_opened: list[Any] = []


def open_process_group(backend: str, timeout: timedelta, **more: Any) -> None:
    """Call torch.distributed.init_process_group, for a process group that belongs to samestep."""
    dist.init_process_group(backend, timeout=timeout, **more)
    _opened[:] = [ref(dist.group.WORLD)]


@contextmanager
def waiting_for_rank_0() -> Iterator[None]:
    """Let exchanges wait without a limit, such as for a function of the script. A script's own group has its limits."""
    is_own = has_group() and bool(_opened) and _opened[0]() is dist.group.WORLD
    if is_own:
        set_timeout(NO_LIMIT)
    try:
        yield
    finally:
        if is_own and has_group():
            set_timeout(timedelta(seconds=TIMEOUT_S))


def has_group() -> bool:
    """Return whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def find_rank() -> int:
    """Return this process's rank in the process group, else in the environment."""
    return dist.get_rank() if has_group() else read_rank()


def close_group() -> None:
    """Leave the process group, if there is one."""
    if has_group():
        dist.destroy_process_group()
    elif dist.is_available():
        reset_group_names()


def connect_to_store() -> Any:  # TCPStore
    """Open a further connection to the launcher's store."""
    host, port = read_master()
    return dist.TCPStore(host, port, None, False, timedelta(seconds=JOIN_S))  # type: ignore[attr-defined]


def release_connections() -> None:
    """In a forked child: close its copies of the process group's connections."""
    if has_group():
        null = os.open(os.devnull, os.O_RDWR)
        for fd in list_gloo_sockets():
            os.dup2(null, fd, inheritable=False)  # gloo's objects in this process may still close this number
        os.close(null)
