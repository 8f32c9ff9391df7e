"""The process group of torch.distributed, and the launcher's store."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from samestep.torch_internals import list_gloo_sockets, reset_group_names, set_timeout
from samestep.world.environment import read_master, read_rank

NCCL = "cpu:gloo,cuda:nccl"  # a backend
JOIN_S = 1800.0  # limit for all ranks to join: a shared file system can take long to import torch
NO_LIMIT = timedelta(days=365)  # for an exchange: the heartbeat ends a rank that is stuck, and a slow one is no mistake


def open_process_group(backend: str, limit_s: float = JOIN_S, **more: Any) -> None:
    """Call torch.distributed.init_process_group, with a limit for all ranks to join."""
    dist.init_process_group(backend, timeout=timedelta(seconds=limit_s), **more)
    set_timeout(NO_LIMIT)


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
