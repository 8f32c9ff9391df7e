"""Whether the run's directory is one for all nodes, and what is said of one of them."""

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from samestep.console import say
from samestep.errors import Error
from samestep.world.environment import read_host
from samestep.world.group import Group

T = TypeVar("T")

_TOKEN = ".samestep-node-"
_OLD_S = 3600.0


def find_keepers(group: Group, run_dir: Path) -> tuple[Path, list[int]]:
    """Finds out which nodes share the run's directory, by files that the first rank of each leaves for a moment.

    Returns:
        Rank 0's `run_dir`, and for each directory that this is the lowest rank that has it: [0] where all nodes share
        one.
    """
    told = group.gather((group.local_rank == 0, str(run_dir)))
    path = Path(told[0][1])
    firsts = [rank for rank, (is_first, _) in enumerate(told) if is_first or rank == 0]
    if len(firsts) == 1:
        return path, [0]
    token = _leave_token(path) if group.rank in firsts else None
    try:
        names = group.gather(None if token is None else token.name)
        keeper = None
        if group.rank in firsts:
            places = (path, *path.parents)
            seen = (rank for rank in firsts if names[rank] and any(_is_there(place / names[rank]) for place in places))
            keeper = next(seen, group.rank)
        keepers = group.gather(keeper)
    finally:
        if token is not None:
            token.unlink(missing_ok=True)
    return path, sorted({keeper for keeper in keepers if keeper is not None})


def _leave_token(path: Path) -> Path | None:
    """An empty file in the directory, or in the nearest one above it that is there; None where none can be made.

    Its name is new, so that no network file system remembers that there was no such file. To make it brings what the
    node knows of that directory up to date, if another node has made the run's in it just now.
    """
    with suppress(OSError):
        for place in (path, *path.parents):
            if place.is_dir():
                for old in place.glob(f"{_TOKEN}*"):  # of a start that was killed in the midst of this
                    if time.time() - old.stat().st_mtime > _OLD_S:
                        old.unlink(missing_ok=True)
                token = place / f"{_TOKEN}{secrets.token_hex(8)}"
                token.touch(exist_ok=False)
                return token
    return None


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def say_here(sentence: str) -> None:
    """Says what concerns this node alone."""
    say(f"{read_host()}: {sentence}")


def name_node(fn: Callable[[], T]) -> T:
    """What `fn` returns; an Error that it raises names this node."""
    try:
        return fn()
    except Error as error:
        raise Error(f"on {read_host()}: {error}") from None
