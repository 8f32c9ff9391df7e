"""Lets a script read rank 0 of 1 everywhere, and records where it does.

If a difference between numbers of ranks goes away then, the rank is its cause. Only calls from the script's own files
get the fixed values: torch, samestep and other libraries need the real ones.
"""

import json
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from samestep.decoding import parse_json
from samestep.files import open_regular, read_text
from samestep.world.environment import intercept_reads

RANK_VALUES = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
LINES = "lines-that-read-the-rank"
LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]))
MAX_NAMED = 4


def read_places(directory: Path) -> str:
    """Return the places that the ranks of a run have recorded in a directory, for a message; "" for none."""
    path = directory / LINES
    lines = dict.fromkeys(map(parse_json, read_text(path).splitlines())) if path.exists() else {}
    return ", ".join([*lines][:MAX_NAMED])


def begin(directory: str) -> None:
    """Fix the rank and the number of ranks of this process. Called in each rank before its script."""
    _fix_rank(Script(Path(directory, LINES)))


class Script:
    """Distinguishes calls in the script's own files from calls in libraries, and records the calling lines."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._noted: set[str] = set()

    def calls(self, name: str) -> bool:
        """Return whether the script has called the function that calls this."""
        frame: Any = sys._getframe(2)
        # os.environ is written in Python: its functions call on behalf of the script.
        while frame is not None and (
            frame.f_code.co_filename.startswith("<") or frame.f_globals.get("__name__") == intercept_reads.__module__
        ):
            frame = frame.f_back
        file = "" if frame is None else frame.f_code.co_filename
        if not file or file.startswith(LIBRARIES) or "-packages" in file:
            return False
        place = f"{name} in {Path(file).name}:{frame.f_lineno}"
        if place not in self._noted:
            self._noted.add(place)
            with open(self._file, "a", opener=open_regular) as lines:
                print(json.dumps(place), file=lines)
        return True


def _fix_rank(script: Script) -> None:
    import torch.distributed as dist

    def wrap(name: str, value: int, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **options: Any) -> Any:
            return value if script.calls(f"torch.distributed.{name}") else real(*args, **options)

        return read

    dist.get_rank = wrap("get_rank", 0, dist.get_rank)
    dist.get_world_size = wrap("get_world_size", 1, dist.get_world_size)

    def read_attribute(run: Any, name: str) -> Any:
        value = RANK_VALUES.get(name.upper())
        return object.__getattribute__(run, name) if value is None or not script.calls(f"run.{name}") else value

    resolve_name("samestep:Run").__getattribute__ = read_attribute  # as the script gets it: tools do not import train

    def read_variable(name: str, own: str) -> str:
        value = RANK_VALUES.get(name)
        return own if value is None or not script.calls(f"os.environ[{name!r}]") else str(value)

    intercept_reads(read_variable)
