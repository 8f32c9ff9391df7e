"""What the ranks run: the same script, with the same versions of what decides its bits."""

import hashlib
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.errors import Error
from samestep.version import __version__
from samestep.world.environment import read_host


def hash_file(path: str | Path) -> str:
    """Enough of the sha256 of a script to tell it from another. Raises OSError."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]


def describe_software() -> dict[str, Any]:
    """This rank's. `script` is a hash, None for what is in no file: a notebook, `python -c`, standard input."""
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
        "hashing": hash("samestep"),  # of str: another number for each PYTHONHASHSEED
    }


def check_alike(told: Sequence[Mapping[str, Any]]) -> None:
    """Compares what `describe_software` gave on each rank.

    Raises:
        Error: versions or scripts are not the same on all.
    """
    for name in ("samestep", "torch", "Python", "script"):
        known = {rank: mine for rank, mine in enumerate(told) if mine[name] is not None}
        if not known:
            continue
        first = min(known)
        others = [rank for rank in known if known[rank][name] != known[first][name]]
        if others:
            odd, usual = known[others[0]], known[first]
            what = f"runs another {odd['file']}" if name == "script" else f"has another {name}"
            raise Error(
                f"rank {others[0]} on {odd['host']} {what} than rank {first} on {usual['host']} "
                f"({odd[name]}, not {usual[name]}): make them the same on all ranks"
            )


def explain_hashing(told: Sequence[Mapping[str, Any]]) -> str:
    """A sentence where ranks hash strings differently, so that their sets have other orders; "" where none do."""
    first, *others = told
    for rank, mine in enumerate(others, start=1):
        if mine["hashing"] != first["hashing"]:
            return (
                f"rank {rank} on {mine['host']} and rank 0 on {first['host']} hash strings differently, so the order "
                "of a set of strings, as in list(set(words)), differs between them: run export PYTHONHASHSEED=0 before "
                "the ranks are started, on every host"
            )
    return ""
