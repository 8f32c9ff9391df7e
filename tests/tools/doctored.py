"""Runs `samestep doctor` on one rank, with planted faults on a host or rank. Start it by samestep launch.

doctored.py [--plant KIND WHERE]... [directory for runs]
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from samestep.tools.doctor_checks import CHECKS, look_at_collectives, look_at_versions
from samestep.tools.examination import Context, examine
from samestep.world.environment import read_environment, read_host


def find_other_version(context: Context) -> Any:
    return {**look_at_versions(context), "torch": "2.0.1"}


def raise_error(context: Context) -> Any:
    raise PermissionError(13, "it is forbidden")


def hang(context: Context) -> Any:
    context.doing = "a call that does not return"
    time.sleep(600)


def add_wrongly(context: Context) -> Any:
    """Change one element of each sum on this rank."""
    add = dist.all_reduce
    dist.all_reduce = lambda tensor: (add(tensor), tensor[-1:].add_(1))
    return look_at_collectives(context)


# Kind -> the check whose measurement is replaced, and by what.
FAULTS: dict[str, tuple[str, Callable[[Context], Any]]] = {
    "version": ("versions", find_other_version),
    "raise": ("connections", raise_error),
    "hang": ("connections", hang),
    "wrong": ("collectives", add_wrongly),
}
LIMIT_S = 2.0  # for a check that hangs


def main() -> None:
    words, faults = sys.argv[1:], dict[str, str]()
    while words and words[0] == "--plant":
        faults[words[1]] = words[2]
        words = words[3:]
    environment = read_environment()
    checks = {check.name: check for check in CHECKS}
    for kind, where in faults.items():
        name, look = FAULTS[kind]
        if kind == "hang":
            checks[name] = replace(checks[name], limit_s=LIMIT_S)
        if where in (read_host(), str(environment.rank)):
            checks[name] = replace(checks[name], look=look)
    sys.exit(examine(environment, [*checks.values()], run_dir=words[0] if words else None, json=True))


if __name__ == "__main__":
    main()
