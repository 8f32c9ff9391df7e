"""Finds out which nodes share the directory of a run, and so which ranks write it, and which directory is unused."""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

from samestep.errors import RunDirectoryError
from samestep.watch.records import LOCK
from samestep.world.local_sockets import Gatherer

_TOKEN = ".samestep-node-"


def find_writers(group: Gatherer, run_dir: Path) -> tuple[Path, dict[int, int]]:
    """Find which nodes share the run's directory. The first rank of each node creates an empty file for that.

    Returns:
        Rank 0's `run_dir`, and a dict: first rank of a node -> the lowest rank with the same directory.
    """
    answers = group.gather((group.local_rank == 0, str(run_dir)))
    path = Path(answers[0][1])
    firsts = [rank for rank, (is_first, _) in enumerate(answers) if is_first or rank == 0]
    if len(firsts) == 1:
        return path, {0: 0}
    token = _create_token(path) if group.rank in firsts else None
    try:
        names = group.gather(None if token is None else token.name)
        directories = (path, *path.parents)
        writer = None
        if group.rank in firsts:
            paths = {rank: [each / names[rank] for each in directories] for rank in firsts if names[rank]}
            writer = next((rank for rank in paths if any(map(os.path.exists, paths[rank]))), group.rank)
        writers = group.gather(writer)
    finally:
        if token is not None:
            token.unlink(missing_ok=True)
    return path, {rank: writer for rank, writer in enumerate(writers) if writer is not None}


def _create_token(path: Path) -> Path | None:
    """Create an empty file in the directory, or in the nearest existing one above it; return None if that fails.

    Its name is new, so no network file system has cached that it does not exist. Creating it refreshes the node's cache
    of that directory, in which another node may just have created the run directory.
    """
    with suppress(OSError):
        for directory in (path, *path.parents):
            if directory.is_dir():
                token = directory / f"{_TOKEN}{secrets.token_hex(8)}"
                token.touch(exist_ok=False)
                return token
    return None


def find_unused(name: str, is_used: Callable[[str], bool]) -> str:
    """Return the first of x, x-2, x-3 ... that is not used."""
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(each for each in names if not is_used(each))


def holds_files(directory: Path) -> bool:
    """Return whether a directory exists, and holds more than a lock. Raises RunDirectoryError."""
    try:
        return directory.exists() and any(each.name != LOCK for each in directory.iterdir())
    except OSError as error:
        raise RunDirectoryError(
            f"{directory} cannot be read ({error.strerror}): name another directory", code="SS401"
        ) from None
