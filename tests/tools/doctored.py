"""Runs `samestep doctor` on one rank, with planted faults. Start it by samestep launch.

doctored.py [--plant KIND RANK]...
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from samestep.tools import doctor
from samestep.tools.doctor import (
    CHECKS,
    Context,
    examine,
    look_at_collectives,
    look_at_connections,
    look_at_versions,
)
from samestep.world.environment import read_environment


def find_other_version(context: Context) -> Any:
    return {**look_at_versions(context), "torch": "2.0.1"}


def raise_error(context: Context) -> Any:
    raise PermissionError(13, "it is forbidden")


def hang(context: Context) -> Any:
    context.doing = "a call that does not return"
    time.sleep(600)


def reach_nobody(context: Context) -> Any:
    doctor.try_connection = lambda address, port: f"{address}: No route to host"
    return look_at_connections(context)


def add_wrongly(context: Context) -> Any:
    """Change one element of each sum on this rank."""
    add = dist.all_reduce
    dist.all_reduce = lambda tensor: (add(tensor), tensor[-1:].add_(1))
    return look_at_collectives(context)


def send_slowly(context: Context) -> Any:
    """Delay what is measured, but not the answers to it."""
    send = dist.send

    def delay(tensor: Tensor, rank: int) -> None:
        time.sleep(0.2 if len(tensor) > 1 else 0)
        send(tensor, rank)

    dist.send = delay
    return look_at_collectives(context)


# Kind -> the check whose measurement is replaced, and by what.
FAULTS: dict[str, tuple[str, Callable[[Context], Any]]] = {
    "version": ("versions", find_other_version),
    "raise": ("connections", raise_error),
    "hang": ("connections", hang),
    "cut off": ("connections", reach_nobody),
    "wrong": ("collectives", add_wrongly),
    "slow": ("collectives", send_slowly),
}
LIMIT_S = 2.0  # for a check that hangs


def main() -> None:
    """Examine. A fault "apart" of any rank makes each rank a node of its own."""
    faults = dict(zip(sys.argv[2::3], sys.argv[3::3], strict=True))
    rank = str(read_environment().rank)
    if faults.pop("apart", ""):
        doctor.read_host_id = lambda scope: rank
    checks = {check.name: check for check in CHECKS}
    for kind, where in faults.items():
        name, look = FAULTS[kind]
        if kind == "hang":
            checks[name] = replace(checks[name], limit_s=LIMIT_S)
        if where == rank:
            checks[name] = replace(checks[name], look=look)
    sys.exit(examine(read_environment(), [*checks.values()], json=True))


if __name__ == "__main__":
    main()
