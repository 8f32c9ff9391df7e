"""Checks the versions of all machines, and the memory of each."""

import os
import platform
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.files import read_text
from samestep.tools.doctor.facts import (
    CheckFacts,
    Context,
    Finding,
    failure,
    warning,
    well,
)
from samestep.units import format_bytes
from samestep.version import __version__
from samestep.world.memory_room import read_memory_room
from samestep.world.version_check import explain_torch

MUST_AGREE = ("python", "torch", "CUDA", "NCCL", "samestep")  # a driver serves several CUDA versions
LEAST_SHM_BYTES = 512 << 20


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


def judge_versions(facts: CheckFacts) -> Iterator[Finding]:
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


# --- memory -------------------------------------------------------------------------------------------------------


def _read(file: Path) -> str:
    try:
        return read_text(file).strip()
    except OSError:
        return ""


def look_at_memory(context: Context) -> dict[str, Any]:
    """Collect the memory that can still be allocated, and the free space in /dev/shm (None: it does not exist)."""
    free_bytes = None
    with suppress(OSError):
        shm = os.statvfs("/dev/shm")
        free_bytes = shm.f_bavail * shm.f_frsize
    return {"free_bytes": read_memory_room(), "shm_free_bytes": free_bytes}


def judge_memory(facts: CheckFacts) -> Iterator[Finding]:
    """Check the room for the workers of data loaders."""
    name_ranks = facts.participants.name_ranks
    shm = {rank: fact["shm_free_bytes"] for rank, fact in facts.by_rank.items()}
    free = {rank: free_bytes for rank, free_bytes in shm.items() if free_bytes is not None}
    if missing := shm.keys() - free.keys():
        advice = "mount a tmpfs there: workers of data loaders and NCCL pass data through it"
        yield failure(f"there is no /dev/shm on {name_ranks(missing)}", advice)
    if tight := [rank for rank, free_bytes in free.items() if free_bytes < LEAST_SHM_BYTES]:
        found = f"/dev/shm has {format_bytes(min(free.values()))} left on {name_ranks(tight)}"
        advice = "make room (docker run --ipc=host or --shm-size=8g; mount -o remount,size=8g /dev/shm): "
        yield warning(found, f"{advice}workers of data loaders pass samples through it")
    least_bytes = min(fact["free_bytes"] for fact in facts.by_rank.values())
    least_shm_bytes = min(free.values(), default=0)
    shown = f"{format_bytes(least_bytes)} can be allocated, /dev/shm has {format_bytes(least_shm_bytes)} left"
    yield well(shown, {"free_bytes": least_bytes, "shm_free_bytes": least_shm_bytes})
