"""The memory that this process can still allocate."""

import resource
from pathlib import Path

from samestep.files import read_text

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
STATUS = Path("/proc/self/status")
MEMORY = Path("/proc/meminfo")
LIMITS = {"RLIMIT_DATA": ("VmData:", resource.RLIMIT_DATA), "RLIMIT_AS": ("VmSize:", resource.RLIMIT_AS)}


def find_own_room(num_sharing: int) -> tuple[int, str]:
    """Return the bytes that this process can still allocate, and the name of what limits them.

    Args:
        num_sharing: number of processes that share the memory of this host, or of its control group.
    """
    rooms = [(read_memory_room() // num_sharing, "free memory of this host")]
    used = _read_counters(STATUS)
    for name, (counter, limit) in LIMITS.items():
        if (most := resource.getrlimit(limit)[0]) != resource.RLIM_INFINITY and counter in used:
            rooms.append((max(0, most - used[counter]), name))
    return min(rooms)


def read_memory_room(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return the bytes that can still be allocated, on this machine and in its control groups."""
    rooms = [_read_counters(MEMORY).get("MemAvailable:", 0)]
    names = [(group / "memory.max", group / "memory.current") for group in _find_groups(root, own)]
    names.append((root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"))  # version 1
    for most, used in names:
        if (limit := _read(most)).isdecimal() and (usage := _read(used)).isdecimal():
            rooms.append(int(limit) - int(usage))
    return max(0, min(rooms))


def _find_groups(root: Path, own: Path) -> list[Path]:
    """Return the directories of this process's control groups (version 2), the innermost first."""
    paths = [line.partition("::")[2] for line in _read(own).splitlines() if "::" in line]
    inner = root / (paths[0].lstrip("/") if paths else "")
    return [group for group in (inner, *inner.parents) if group == root or root in group.parents]


def _read_counters(file: Path) -> dict[str, int]:
    """Return the sizes in a file of /proc, in bytes. It is faster than to import psutil."""
    rows = [line.split() for line in _read(file).splitlines()]
    return {row[0]: int(row[1]) * 1024 for row in rows if row[-1] == "kB"}


def _read(file: Path) -> str:
    try:
        return read_text(file).strip()
    except OSError:
        return ""
