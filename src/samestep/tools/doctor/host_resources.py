"""Checks versions, cores and threads, shared memory and open files of each machine, and that they agree."""

import os
import platform
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.console import format_count, format_ranks
from samestep.files import read_text
from samestep.tools.doctor.checks import (
    Context,
    Facts,
    Finding,
    failure,
    format_bytes,
    warning,
    well,
)
from samestep.version import __version__
from samestep.world.version_check import explain_torch

MUST_AGREE = ("python", "torch", "CUDA", "NCCL", "samestep")  # a driver serves several CUDA versions
LEAST_SHM_BYTES = 512 << 20
FEWEST_FILES, FEW_FILES = 256, 1024
FILES_PER_RANK = 16  # a connection per backend and direction, and the files of a data loader
UNLIMITED_FILES = 1 << 20
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


# --- versions -----------------------------------------------------------------------------------------------------


def look_at_versions(context: Context) -> dict[str, str]:
    """Return name -> version; "" if it is not installed."""
    import torch

    nccl = ""
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "",
        "NCCL": nccl,
        "driver": read_driver(),
        "samestep": __version__,
    }


def read_driver(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of NVIDIA's driver, or ""."""
    found = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", _read(file))
    return found[1] if found else ""


def judge_versions(facts: Facts) -> Iterator[Finding]:
    """Report the ranks that differ from the majority (from rank 0 if there is none)."""
    versions = next(iter(facts.by_rank.values()))
    for name in versions:
        values = {rank: theirs[name] for rank, theirs in facts.by_rank.items()}
        counts = Counter(values.values())
        usual = max(counts, key=lambda value: (counts[value], value == values[min(values)]))
        for value in [value for value in counts if value != usual]:
            where = facts.participants.name_ranks(rank for rank, other in values.items() if other == value)
            found = f"{name} is {value or 'missing'} on {where}, and {usual or 'missing'} on the others"
            advice = f"install {name} {usual} there" if usual else f"remove {name} there, or install it on all"
            yield (failure if name in MUST_AGREE else warning)(found, advice)
    for version in dict.fromkeys(theirs["torch"] for theirs in facts.by_rank.values()):
        found, _, advice = explain_torch(version).partition(": ")
        if found:
            yield warning(found, advice)
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    everywhere = "" if len(facts.by_rank) == 1 else " on all ranks"
    yield well(shown + everywhere, versions)


# --- cores --------------------------------------------------------------------------------------------------------


def look_at_cores(context: Context) -> dict[str, Any]:
    """Collect the cores that this rank can use, and its number of threads."""
    import torch

    return {
        "allowed": sorted(os.sched_getaffinity(0)),
        "quota": read_quota(),
        "threads": context.options.num_threads or torch.get_num_threads(),
        "num_numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "load": os.getloadavg()[0],
    }


def read_quota(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> float | None:
    """Return the CPU quota of this process's control groups, in cores; None: unlimited."""
    limits = [_read(group / "cpu.max").split() for group in _find_groups(root, own)]
    limits.append([_read(root / "cpu/cpu.cfs_quota_us"), _read(root / "cpu/cpu.cfs_period_us")])  # version 1
    quotas = [int(limit[0]) / int(limit[1]) for limit in limits if len(limit) == 2 and limit[0].isdecimal()]
    return min(quotas, default=None)


def read_memory_room(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return the bytes that can still be allocated, on this machine and in its control groups."""
    import psutil

    rooms = [int(psutil.virtual_memory().available)]
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


def _read(file: Path) -> str:
    try:
        return read_text(file).strip()
    except OSError:
        return ""


def judge_cores(facts: Facts) -> Iterator[Finding]:
    """Compare ranks times threads with the cores of each node."""
    participants, measured = facts.participants, {}
    all_threads = sorted({fact["threads"] for fact in facts.by_rank.values()})
    if len(all_threads) > 1:
        advice = "set the same OMP_NUM_THREADS for all, or give --num-threads: results depend on it"
        yield failure(f"ranks compute with {' and '.join(map(str, all_threads))} threads", advice)
    most_threads = all_threads[-1]
    nodes_by_text: dict[str, list[int]] = {}
    most_ranks: dict[str, int] = {}  # of an overloaded node
    loads: dict[int, float] = {}
    for node in range(len(participants.leaders)):
        ranks = [facts.by_rank[rank] for rank in participants.of_node(node) if rank in facts.by_rank]
        if not ranks:
            continue
        num_allowed = len({core for rank in ranks for core in rank["allowed"]})
        num_cores = min([float(num_allowed), *(rank["quota"] for rank in ranks if rank["quota"] is not None)])
        load, num_numa_nodes = ranks[0]["load"], ranks[0]["num_numa_nodes"]
        measured[participants.name_node(node)] = {
            "cores": num_cores, "ranks": len(ranks), "numa_nodes": num_numa_nodes, "load": load,
            "threads": [rank["threads"] for rank in ranks],
        }  # fmt: skip
        text = f"{format_ranks(len(ranks))} x {format_count(most_threads, 'thread')}"
        text += f" on {format_count(num_cores, 'core')}"
        text += f" (a control group allows no more of {num_allowed})" if num_cores < num_allowed else ""
        text += f" of {num_numa_nodes} NUMA nodes" if num_numa_nodes > 1 else ""
        nodes_by_text.setdefault(text, []).append(node)
        if sum(rank["threads"] for rank in ranks) > num_cores:
            most_ranks[text] = max(1, int(num_cores // most_threads))
        if load > num_cores:
            loads[node] = load
    for text, most in most_ranks.items():
        advice = f"start at most {format_ranks(most)} there"
        advice += ", or give each fewer threads (--num-threads, samestep.Run)" if most_threads > 1 else ""
        yield warning(f"{text}: {participants.name_nodes(nodes_by_text[text])}", advice)
    if loads:
        found = f"other programs compute on {participants.name_nodes(loads)}: up to {max(loads.values()):.1f} at a time"
        yield warning(found, "see top; they distort the measurements")
    shown = [*nodes_by_text]
    if len(shown) > 1:
        shown = [f"{text}: {participants.name_nodes(nodes)}" for text, nodes in nodes_by_text.items()]
    yield well("; ".join(shown), measured)


# --- limits -------------------------------------------------------------------------------------------------------


def look_at_limits(context: Context) -> dict[str, Any]:
    """Collect the free space in /dev/shm (None: it does not exist), and the limit of open files."""
    import resource

    free_bytes = None
    with suppress(OSError):
        shm = os.statvfs("/dev/shm")
        free_bytes = shm.f_bavail * shm.f_frsize
    soft, hard = (UNLIMITED_FILES if limit < 0 else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    return {"shm_free_bytes": free_bytes, "files": soft, "files_at_most": hard}


def judge_limits(facts: Facts) -> Iterator[Finding]:
    """Check the room for a data loader's workers and the ranks' connections."""
    name_ranks = facts.participants.name_ranks
    needed = max(FEW_FILES, FILES_PER_RANK * len(facts.participants.hosts))
    shm = {rank: fact["shm_free_bytes"] for rank, fact in facts.by_rank.items()}
    free = {rank: free_bytes for rank, free_bytes in shm.items() if free_bytes is not None}
    if missing := shm.keys() - free.keys():
        advice = "mount a tmpfs there: workers of data loaders and NCCL pass data through it"
        yield failure(f"there is no /dev/shm on {name_ranks(missing)}", advice)
    if tight := [rank for rank, free_bytes in free.items() if free_bytes < LEAST_SHM_BYTES]:
        found = f"/dev/shm has {format_bytes(min(free.values()))} left on {name_ranks(tight)}"
        advice = "make room (docker run --ipc=host or --shm-size=8g; mount -o remount,size=8g /dev/shm): "
        yield warning(found, f"{advice}workers of data loaders pass samples through it")
    files = {rank: fact["files"] for rank, fact in facts.by_rank.items()}
    fewest, least_bytes = min(files.values()), min(free.values(), default=None)
    if low := [rank for rank, num in files.items() if num < needed]:
        found = f"only {fewest} files may be open at a time on {name_ranks(low)}, {needed} should be"
        hard = min(facts.by_rank[rank]["files_at_most"] for rank in low)
        advice = f"ulimit -n {max(needed, 65536)}" if hard >= needed else "raise nofile in /etc/security/limits.conf"
        yield (failure if fewest < FEWEST_FILES else warning)(found, advice)
    shown = f"/dev/shm has {format_bytes(least_bytes or 0)} left, {fewest} files may be open"
    yield well(shown, {"shm_free_bytes": least_bytes, "files": fewest})
