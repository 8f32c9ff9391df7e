"""Checks versions, cores and threads, shared memory and open files of each machine, and that they agree."""

import os
import platform
import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.tools.doctor.context import Context
from samestep.tools.doctor.findings import FAIL, PASS, WARN, Facts, Finding, format_bytes
from samestep.version import __version__

MUST_AGREE = ("python", "torch", "CUDA", "NCCL", "samestep")  # a driver serves several CUDA versions
LEAST_SHM_BYTES = 512 << 20
FEWEST_FILES, FEW_FILES = 256, 1024
FILES_PER_RANK = 16  # a connection per backend and direction, and the files of a data loader
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
    try:
        found = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", file.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def judge_versions(facts: Facts) -> list[Finding]:
    """Report the ranks that differ from the majority (from rank 0 if there is none)."""
    findings = []
    names = {name: None for versions in facts.by_rank.values() for name in versions}
    for name in names:
        values = {rank: versions.get(name, "") for rank, versions in facts.by_rank.items()}
        counts = Counter(values.values())
        usual = max(counts, key=lambda value: (counts[value], value == values[min(values)]))
        for value in counts:
            if value == usual:
                continue
            where = facts.participants.name_ranks(rank for rank, other in values.items() if other == value)
            found = f"{name} is {value or 'missing'} on {where}, and {usual or 'missing'} on the others"
            advice = f"install {name} {usual} there" if usual else f"remove {name} there, or install it on all"
            status = FAIL if name in MUST_AGREE else WARN
            findings.append(Finding("versions", status, found, advice, values))
    if findings:
        return findings
    versions = next(iter(facts.by_rank.values()))
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    everywhere = "" if len(facts.by_rank) == 1 else " on all ranks"
    return [Finding("versions", PASS, shown + everywhere, measured=versions)]


# --- cores --------------------------------------------------------------------------------------------------------


def look_at_cores(context: Context) -> dict[str, Any]:
    """Collect the cores that this rank can use, and its number of threads."""
    import torch

    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return {
        "allowed": sorted(allowed),
        "quota": read_quota(),
        "threads": context.options.num_threads or torch.get_num_threads(),
        "num_numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "load": os.getloadavg()[0],
    }


def read_quota(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> float | None:
    """Return the CPU quota of this process's control groups, in cores; None: unlimited."""
    quotas = []
    for group in _find_groups(root, own):
        words = _read(group / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
    quota, period = _read(root / "cpu/cpu.cfs_quota_us"), _read(root / "cpu/cpu.cfs_period_us")  # version 1
    if quota and period and int(quota) > 0:
        quotas.append(int(quota) / int(period))
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
        return file.read_text().strip()
    except OSError:
        return ""


def judge_cores(facts: Facts) -> list[Finding]:
    """Compare ranks times threads with the cores of each node."""
    participants, findings, measured = facts.participants, [], {}
    texts: dict[str, list[int]] = {}
    crowded: dict[str, list[int]] = {}
    loads: dict[int, float] = {}
    counts = {fact["threads"] for fact in facts.by_rank.values()}
    if len(counts) > 1:
        found = f"ranks compute with {' and '.join(map(str, sorted(counts)))} threads"
        advice = "set the same OMP_NUM_THREADS for all, or give --num-threads: results depend on it"
        findings.append(Finding("cores", FAIL, found, advice))
    most_threads = max(counts)
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
        text = f"{_count(len(ranks), 'rank')} x {_count(most_threads, 'thread')} on {_count(num_cores, 'core')}"
        text += f" (a control group allows no more of {num_allowed})" if num_cores < num_allowed else ""
        text += f" of {num_numa_nodes} NUMA nodes" if num_numa_nodes > 1 else ""
        is_crowded = sum(rank["threads"] for rank in ranks) > num_cores
        (crowded if is_crowded else texts).setdefault(text, []).append(node)
        if load > num_cores:
            loads[node] = load
    for text, nodes in crowded.items():
        num_cores = measured[participants.name_node(nodes[0])]["cores"]
        advice = f"start at most {_count(max(1, int(num_cores // most_threads)), 'rank')} there"
        advice += ", or give each fewer threads (--num-threads, samestep.Run)" if most_threads > 1 else ""
        findings.append(Finding("cores", WARN, f"{text}: {participants.name_nodes(nodes)}", advice))
    if loads:
        found = f"other programs compute on {participants.name_nodes(loads)}: up to {max(loads.values()):.1f} at a time"
        findings.append(Finding("cores", WARN, found, "see top; they distort the measurements"))
    if findings:
        return [replace(finding, measured=measured) for finding in findings]
    shown = [text if len(texts) == 1 else f"{text}: {participants.name_nodes(nodes)}" for text, nodes in texts.items()]
    return [Finding("cores", PASS, "; ".join(shown), measured=measured)]


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}{'s' if number != 1 else ''}"


# --- limits -------------------------------------------------------------------------------------------------------


def look_at_limits(context: Context) -> dict[str, Any]:
    """Collect the free space in /dev/shm (None: it does not exist), and the limit of open files."""
    import resource

    free_bytes = None
    with suppress(OSError):
        shm = os.statvfs("/dev/shm")
        free_bytes = shm.f_bavail * shm.f_frsize
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = 1 << 20
    return {
        "shm_free_bytes": free_bytes,
        "files": unlimited if soft < 0 else soft,
        "files_at_most": unlimited if hard < 0 else hard,
    }


def judge_limits(facts: Facts) -> list[Finding]:
    """Check the room for a data loader's workers and the ranks' connections."""
    participants, findings = facts.participants, []
    needed = max(FEW_FILES, FILES_PER_RANK * len(participants.hosts))
    missing = [rank for rank, fact in facts.by_rank.items() if fact["shm_free_bytes"] is None]
    free = {rank: fact["shm_free_bytes"] for rank, fact in facts.by_rank.items() if rank not in missing}
    tight = [rank for rank, free_bytes in free.items() if free_bytes < LEAST_SHM_BYTES]
    if missing:
        findings.append(
            Finding("limits", FAIL, f"there is no /dev/shm on {participants.name_ranks(missing)}",
                    "mount a tmpfs there: workers of data loaders and NCCL pass data through it")
        )  # fmt: skip
    if tight:
        least = format_bytes(min(free[rank] for rank in tight))
        found = f"/dev/shm has {least} left on {participants.name_ranks(tight)}"
        advice = "make room (docker run --ipc=host or --shm-size=8g; mount -o remount,size=8g /dev/shm): "
        findings.append(Finding("limits", WARN, found, f"{advice}workers of data loaders pass samples through it"))
    files = {rank: fact["files"] for rank, fact in facts.by_rank.items()}
    low = [rank for rank, num in files.items() if num < needed]
    if low:
        fewest = min(files[rank] for rank in low)
        found = f"only {fewest} files may be open at a time on {participants.name_ranks(low)}, {needed} should be"
        hard = min(facts.by_rank[rank]["files_at_most"] for rank in low)
        advice = f"ulimit -n {max(needed, 65536)}" if hard >= needed else "raise nofile in /etc/security/limits.conf"
        findings.append(Finding("limits", FAIL if fewest < FEWEST_FILES else WARN, found, advice))
    measured = {"shm_free_bytes": min(free.values(), default=None), "files": min(files.values())}
    if not findings:
        shown = f"/dev/shm has {format_bytes(min(free.values()))} left, {min(files.values())} files may be open"
        return [Finding("limits", PASS, shown, measured=measured)]
    return [replace(finding, measured=measured) for finding in findings]
