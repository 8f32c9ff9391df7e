"""Runs `samestep doctor` on one rank, with a planted fault on a host or rank. Start it by samestep launch.

doctored.py [--plant KIND WHERE]... [directory for runs]
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from samestep.tools.doctor.cluster_checks import CHECKS
from samestep.tools.doctor.examination import Context, DoctorCheck, examine
from samestep.world.environment import read_environment, read_host

Look = Callable[[Context], Any]


def other_version(look: Look) -> Look:
    return lambda context: {**look(context), "torch": "2.0.1"}


def raising(look: Look) -> Look:
    def look_and_raise(context: Context) -> Any:
        raise PermissionError(13, "it is forbidden")

    return look_and_raise


def hanging(look: Look) -> Look:
    def look_and_hang(context: Context) -> Any:
        context.doing = "a call that does not return"
        time.sleep(600)

    return look_and_hang


def wrong_sums(look: Look) -> Look:
    """Change one element of a sum on this rank."""
    add = dist.all_reduce

    def add_wrongly(tensor: Any, *more: Any) -> None:
        add(tensor, *more)
        tensor[-1] += 1

    def look_with_it(context: Context) -> Any:
        dist.all_reduce = add_wrongly
        return look(context)

    return look_with_it


# Kind -> the check whose measurement is replaced, and by what.
FAULTS: dict[str, tuple[str, Callable[[Look], Look]]] = {
    "version": ("versions", other_version),
    "raise": ("connections", raising),
    "hang": ("connections", hanging),
    "wrong": ("collectives", wrong_sums),
}
LIMIT_S = 2.0  # for a check that hangs


def main() -> None:
    words, faults = sys.argv[1:], []
    while words and words[0] == "--plant":
        faults.append((words[1], words[2]))
        words = words[3:]
    environment = read_environment()
    here = [kind for kind, where in faults if where in (read_host(), str(environment.rank))]
    checks: tuple[DoctorCheck, ...] = CHECKS
    for kind, (name, plant) in FAULTS.items():
        limit_s = {"limit_s": LIMIT_S} if kind == "hang" and kind in dict(faults) else {}
        checks = tuple(replace(check, **limit_s) if check.name == name else check for check in checks)
        if kind in here:
            checks = tuple(replace(c, look=plant(c.look)) if c.name == name else c for c in checks)
    sys.exit(examine(environment, checks, run_dir=words[0] if words else None, json=True))


if __name__ == "__main__":
    main()
