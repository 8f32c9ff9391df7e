"""Limits the CPU time of each rank by a control group of Linux, so that many ranks behave like many machines.

The launcher's environment names this module as the hook of the ranks (`world.environment.HOOK`).
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from samestep.errors import Error
from samestep.files import open_regular, read_text
from samestep.waiting import wait_until

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
PERIOD_US = 10_000  # the default of 100 ms would stop a rank for most of a short step, and let it run through others
LEAST_CORES = 0.1  # the kernel takes at least 1 ms per period
LEAVE_S = 5.0


@contextmanager
def open_quota(cores: float, num_ranks: int) -> Iterator[dict[str, Any]]:
    """Create a control group for the ranks, and remove it after the block.

    Args:
        cores: for each rank.
        num_ranks: the most ranks at a time.

    Yields:
        The options of `begin`, for JSON.

    Raises:
        Error: this machine allows no quotas here.
    """
    parent = find_parent()
    group = parent / f"samestep-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise Error(
            f"--cpu-quota needs a control group, and {group} cannot be created ({error.strerror}): leave it out, or "
            "run as root or in a group that is delegated to you (systemd-run --user --scope -p Delegate=yes)",
            code="SS107",
        ) from None
    try:
        # All ranks together would otherwise have the weight of one process beside the others of a busy machine.
        if (group / "cpu.max").exists():  # version 2: the group of each rank has a quota if its parent allows it
            _write(group / "cpu.weight", str(min(100 * num_ranks, 10_000)))
            _write(group / "cgroup.subtree_control", "+cpu")
        else:
            _write(group / "cpu.shares", str(min(1024 * num_ranks, 262_144)))
        yield {"group": str(group), "cores": cores}
    finally:
        wait_until(lambda: _is_removed(group), LEAVE_S)  # a process that has ended leaves its group soon after


def _is_removed(group: Path) -> bool:
    for each in (*group.glob("*/"), group):
        with suppress(OSError):
            each.rmdir()
    return not group.exists()


def _write(file: Path, text: str) -> None:
    with open(file, "w", opener=open_regular) as opened:
        opened.write(text)


def find_parent(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> Path:
    """Return the directory in which to create groups with a quota: the nearest one of this process that has the files.

    Raises:
        Error: there is none.
    """
    paths: dict[str, str] = {}
    with suppress(OSError):
        for line in read_text(own).splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    if (root / "cpu" / "cpu.cfs_quota_us").exists():  # version 1
        return root / "cpu" / paths.get("cpu", "")
    inner = root / paths.get("", "")
    for group in (inner, *inner.parents):  # version 2
        with suppress(OSError):
            # Only the root group may have both processes and groups with quotas.
            if "cpu" in read_text(group / "cgroup.subtree_control").split():
                return group
        if group == root:
            break
    raise Error(
        f"--cpu-quota needs control groups with CPU quotas, and {root} has none for this process: leave it out",
        code="SS107",
    )


def begin(options: Mapping[str, Any]) -> None:
    """Put this process into a group of its own. Called in each rank before its script. Raises OSError."""
    group = Path(options["group"]) / str(os.getpid())
    group.mkdir()
    quota_us = round(options["cores"] * PERIOD_US)
    if (group / "cpu.max").exists():
        _write(group / "cpu.max", f"{quota_us} {PERIOD_US}")
    else:
        _write(group / "cpu.cfs_period_us", str(PERIOD_US))
        _write(group / "cpu.cfs_quota_us", str(quota_us))
    _write(group / "cgroup.procs", str(os.getpid()))
