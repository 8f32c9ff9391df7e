"""Checks that all ranks run the same script with the same versions of Python, torch and samestep."""

import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.errors import Error
from samestep.files import read_bytes
from samestep.hashing import hash_bytes
from samestep.version import __version__
from samestep.world.environment import read_host

TORCH_VERSIONS = ("2.11", "2.15")  # the oldest, which pyproject.toml requires, and the newest that samestep supports


def explain_torch(version: str) -> str:
    """Return a warning if samestep does not support this version of torch; else ""."""
    oldest, newest = ([*map(int, each.split("."))] for each in TORCH_VERSIONS)
    if (found := re.match(r"(\d+)\.(\d+)", version)) is None or oldest <= [int(found[1]), int(found[2])] <= newest:
        return ""
    return (
        f"torch {version} is installed, and samestep supports {TORCH_VERSIONS[0]} to {TORCH_VERSIONS[1]}: a run may "
        f'fail or give other bits; pip install "torch=={TORCH_VERSIONS[1]}.*"'
    )


def hash_file(path: str | Path) -> str:
    """Return the first 12 hexadecimal digits of a file's SHA-256. Raises OSError."""
    return hash_bytes(read_bytes(Path(path), is_given=True))[:12]


def describe_software() -> dict[str, Any]:
    """Describe this rank's software. `script` is a hash; None for code in no file (notebook, `python -c`, stdin)."""
    import torch

    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        script = None if path is None else hash_file(path)
    except OSError:
        script = None
    return {
        "host": read_host(),
        "file": Path(path or "").name,
        "samestep": __version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "script": script,
        "hashing": hash("samestep"),  # differs between values of PYTHONHASHSEED
    }


def check_alike(software: Mapping[int, Mapping[str, Any]]) -> None:
    """Compare the results of `describe_software` of ranks. Raises Error if versions or scripts differ."""
    for name in ("samestep", "torch", "Python", "script"):
        known = {rank: mine for rank, mine in software.items() if mine[name] is not None}
        if not known:
            continue
        first = min(known)
        others = [rank for rank in known if known[rank][name] != known[first][name]]
        if others:
            odd = known[others[0]]
            usual = known[first]
            what = f"runs another {odd['file']}" if name == "script" else f"has another {name}"
            raise Error(
                f"rank {others[0]} on {odd['host']} {what} than rank {first} on {usual['host']} "
                f"({odd[name]}, not {usual[name]}): make them the same on all ranks",
                code="SS504",
            )


def explain_hashing(software: Sequence[Mapping[str, Any]]) -> str:
    """Return a warning if ranks hash strings differently, so that their sets differ in order; else ""."""
    first, *others = software
    for rank, mine in enumerate(others, start=1):
        if mine["hashing"] != first["hashing"]:
            return (
                f"ranks hash strings differently, such as rank {rank} on {mine['host']} and rank 0 on {first['host']}, "
                "so that the order of a set of strings, as in list(set(words)), differs between them: run export "
                "PYTHONHASHSEED=0 before the ranks are started, on every host"
            )
    return ""
